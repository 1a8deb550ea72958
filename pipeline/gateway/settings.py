"""What all endpoints with an answer read of a body: how long it is, how tokens are chosen, where it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from pipeline.gateway.bodies import MOST_SEED, Common
from pipeline.gateway.errors import bad
from pipeline.gateway.tools import Grammar
from pipeline.text.detokenizer import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from protocol.messages import Sampling, Shaping, TokenBias, Welcome


@dataclass(frozen=True)
class Settings:
    """`sampling`, `stop`, ...: as of `Client.generate`."""

    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    ignore_eos: bool
    choices: int
    stream: bool
    include_usage: bool
    shaping: Shaping = Shaping()  # noqa: RUF009 - frozen
    logprobs: int = -1
    grammar_field: str | None = None  # of the request, from which the shaping's grammar is

    def of_choice(self, index: int) -> dict[str, Any]:
        """Arguments of `Client.generate` for one of the choices: each has a seed of its own."""
        sampling, seed = self.sampling, self.sampling.seed
        if seed is not None and index:
            sampling = replace(sampling, seed=(seed + index) & MOST_SEED)
        return {
            "max_tokens": self.max_tokens,
            "sampling": sampling,
            "stop": self.stop,
            "ignore_eos": self.ignore_eos,
            "shaping": self.shaping,
            "logprobs": self.logprobs,
        }


def settings_of(
    body: Common,
    welcome: Welcome,
    max_tokens: float,
    *,
    stop: str | list[str] | None,
    stop_field: str = "stop",
    choices: float | None = None,
    default: Sampling | None = None,
    grammar: Grammar = Grammar(),  # noqa: B008 - frozen
    logprobs: float | None = None,
) -> Settings:
    """`default`: sampling that is not given; without it as the model's makers recommend. Raises ApiError."""
    options, stream = body.stream_options, bool(body.stream)
    if options is not None and not stream:
        raise bad("stream_options", "belongs to stream: true")
    return Settings(
        max_tokens=int(max_tokens),
        sampling=_sampling(body, default or welcome.sampling),
        stop=_stop(stop, stop_field),
        ignore_eos=bool(body.ignore_eos),
        choices=int(choices or 1),
        stream=stream,
        include_usage=options is not None and bool(options.include_usage),
        shaping=Shaping(
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            bias=_biases(body.logit_bias or {}, welcome.vocabulary),
            grammar=grammar.text,
        ),
        logprobs=-1 if logprobs is None else int(logprobs),
        grammar_field=grammar.field,
    )


def _stop(given: str | list[str] | None, name: str) -> tuple[str, ...]:
    stop = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stop) > MAX_STOP_STRINGS or not all(0 < len(text) <= MAX_STOP_CHARACTERS for text in stop):
        raise bad(name, f"takes up to {MAX_STOP_STRINGS} texts of 1 to {MAX_STOP_CHARACTERS} characters")
    return stop


def _sampling(body: Common, default: Sampling) -> Sampling:
    names = ("temperature", "top_p", "min_p", "repetition_penalty")
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        given["top_k"] = max(int(body.top_k), 0)  # -1: no limit, as other servers have it
    return replace(default, **given, seed=None if body.seed is None else body.seed & MOST_SEED)


def _biases(given: dict[str, float], vocabulary: int) -> tuple[TokenBias, ...]:
    for token in given:
        if not (token.isascii() and token.isdecimal()) or len(token) > 10 or int(token) >= vocabulary:
            raise bad("logit_bias", f"{token[:40]!r} is no token id; they end at {vocabulary - 1}")
    return tuple(TokenBias(int(token), bias) for token, bias in given.items())
