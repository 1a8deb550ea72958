"""The fields that all endpoints with an answer have: how long it is, how tokens are chosen, where it ends."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from pipeline.gateway.body import Fields
from pipeline.gateway.tools import Grammar
from pipeline.text.detokenizer import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from protocol.messages import Sampling, Shaping, TokenBias, Welcome

log = logging.getLogger(__name__)

MOST_CHOICES = 16
MOST_SEED = (1 << 63) - 1
MOST_TOP_K = 1 << 31
MOST_BIASES = 1024
MOST_BIAS = 100


# Fields of OpenAI's, Anthropic's and other servers' that would change the answer, and the values that do not.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("functions", "function_call", "audio", "web_search_options", "mcp_servers"), ([],)),
    **dict.fromkeys(("stop_token_ids", "bad_words", "allowed_token_ids", "prompt_logprobs"), ([], 0)),
    **dict.fromkeys(("truncate_prompt_tokens", "documents", "chat_template"), ([],)),
    **dict.fromkeys(("use_beam_search", "include_stop_str_in_output", "return_token_ids"), (False,)),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "truncation": ("disabled",),
    "length_penalty": (1, 1.0),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "typical_p": (1, 1.0),
    "mirostat": (0,),
}


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


def take_sampling(fields: Fields, default: Sampling) -> Sampling:
    """`default`: what is not given."""
    top_k = fields.integer("top_k", -1, MOST_TOP_K, default.top_k)
    seed = fields.integer("seed", -MOST_SEED, MOST_SEED, None)
    return replace(
        default,
        temperature=fields.number("temperature", 0.0, 100.0, default.temperature),
        top_k=max(top_k, 0),  # -1: no limit, as other servers have it
        top_p=fields.number("top_p", 1e-9, 1.0, default.top_p),
        min_p=fields.number("min_p", 0.0, 1.0, default.min_p),
        repetition_penalty=fields.number("repetition_penalty", 0.01, 100.0, default.repetition_penalty),
        seed=None if seed is None else seed & MOST_SEED,
    )


def take_shaping(fields: Fields, welcome: Welcome, grammar: Grammar) -> Shaping:
    return Shaping(
        presence_penalty=fields.number("presence_penalty", -2.0, 2.0, 0.0),
        frequency_penalty=fields.number("frequency_penalty", -2.0, 2.0, 0.0),
        bias=_biases(fields, welcome.vocabulary),
        grammar=grammar.text,
    )


def _biases(fields: Fields, vocabulary: int) -> tuple[TokenBias, ...]:
    given = fields.object("logit_bias", None) or {}
    if len(given) > MOST_BIASES:
        fields.refuse("logit_bias", f"has {len(given)} tokens; {MOST_BIASES} is the most")
    biases = []
    for token, bias in given.items():
        if not (token.isascii() and token.isdecimal()) or len(token) > 10 or int(token) >= vocabulary:
            fields.refuse("logit_bias", f"{token[:40]!r} is no token id; they end at {vocabulary - 1}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= MOST_BIAS:
            fields.refuse("logit_bias", f"the bias of token {token} must be from -{MOST_BIAS} to {MOST_BIAS}")
        biases.append(TokenBias(int(token), float(bias)))
    return tuple(biases)


def take_settings(
    fields: Fields,
    welcome: Welcome,
    max_tokens: int,
    *,
    default: Sampling | None = None,
    grammar: Grammar = Grammar(),  # noqa: B008 - frozen
    logprobs: int = -1,
    stop_field: str = "stop",
) -> Settings:
    """`max_tokens`, `default`: where not given; sampling is then as the model's makers recommend.
    `stop_field`: how `stop` is called here. Raises ApiError."""
    stop = fields.strings(stop_field)
    if len(stop) > MAX_STOP_STRINGS or not all(0 < len(text) <= MAX_STOP_CHARACTERS for text in stop):
        limits = f"up to {MAX_STOP_STRINGS} texts of 1 to {MAX_STOP_CHARACTERS} characters"
        fields.refuse(stop_field, f"takes {limits}")
    stream = fields.flag("stream")
    options = fields.within("stream_options")
    include_usage = options is not None and options.flag("include_usage")
    if options is not None and not stream:
        fields.refuse("stream_options", "belongs to stream: true")
    return Settings(
        max_tokens=max_tokens,
        sampling=take_sampling(fields, default or welcome.sampling),
        stop=stop,
        ignore_eos=fields.flag("ignore_eos"),
        choices=fields.integer("n", 1, MOST_CHOICES, 1),
        stream=stream,
        include_usage=include_usage,
        shaping=take_shaping(fields, welcome, grammar),
        logprobs=logprobs,
        grammar_field=grammar.field,
    )


def note_unknown(fields: Fields, endpoint: str) -> None:
    """Fields of other servers are accepted, as clients send them by habit, but not those that change answers.
    Raises ApiError."""
    for name, harmless in UNSUPPORTED.items():
        value = fields.any(name)
        if value is not None and value not in harmless:
            fields.refuse(name, "is not supported here")
    if unknown := fields.unknown:
        names = ", ".join(name[:40] for name in unknown[:8])
        log.info("%s: fields without a meaning here: %s", endpoint, names)
