"""POST /v1/completions: texts and token ids to continue, several at once; their own log-probabilities."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pipeline.gateway.answers import TokenTexts, Usage, events_of
from pipeline.gateway.bodies import MOST_PROMPTS, CompletionBody, Object
from pipeline.gateway.call import Call, Pieces, event_of
from pipeline.gateway.chat import DONE
from pipeline.gateway.errors import bad
from pipeline.gateway.settings import Settings, grammar_of, settings_of
from pipeline.text.detokenizer import Detokenizer
from protocol.answer import Answer
from protocol.client import Client
from protocol.messages import Done, Sampling, Shaping, Token, Welcome

DEFAULT_TOKENS = 16
DEFAULT_SAMPLING = Sampling(temperature=1.0)  # OpenAI's; a model's makers recommend theirs for chats

Prompt = str | tuple[int, ...]


@dataclass(frozen=True)
class CompletionRequest:
    """Answer that a body asks for."""

    prompts: tuple[Prompt, ...]
    settings: Settings
    echo: bool

    @property
    def only_scored(self) -> bool:
        """Returns whether the log-probabilities of the prompt already say its next token: of an echo with
        at most one greedy token, as lm-evaluation-harness asks."""
        settings = self.settings
        greedy = settings.sampling.temperature == 0 and settings.sampling.repetition_penalty == 1
        plain = greedy and settings.shaping == Shaping() and not settings.stop
        scored = self.echo and settings.logprobs >= 0
        return scored and (settings.max_tokens == 0 or (settings.max_tokens == 1 and plain))


def completion_request(body: CompletionBody, welcome: Welcome) -> CompletionRequest:
    """Returns what a body asks for. Raises ApiError."""
    prompts = _prompts(body.prompt, welcome)
    echo = bool(body.echo)
    most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    if not most and not echo:
        raise bad("max_tokens", "must be 1 or more without echo")
    settings = settings_of(
        body,
        welcome,
        most,
        stop=body.stop,
        choices=body.n,
        default=DEFAULT_SAMPLING,
        grammar=grammar_of(body.response_format, "response_format"),
        logprobs=body.logprobs,
    )
    if echo and (settings.stream or settings.choices > 1):
        raise bad("echo", "is not supported with stream or n")
    if len(prompts) * settings.choices > MOST_PROMPTS:
        raise bad("n", f"of {len(prompts)} prompts makes more than {MOST_PROMPTS} answers")
    return CompletionRequest(prompts, settings, echo)


def _prompts(given: str | list[str | int | list[int]], welcome: Welcome) -> tuple[Prompt, ...]:
    """Returns the prompts of a text, texts, token ids, or lists of these."""
    several: list[Any] = given if isinstance(given, list) else [given]
    if several and all(isinstance(value, int) for value in several):
        several = [several]
    if not 1 <= len(several) <= MOST_PROMPTS:
        raise bad("prompt", f"must be a string or token ids, or an array of up to {MOST_PROMPTS} of them")
    prompts: list[Prompt] = []
    for value in several:
        if isinstance(value, int) or not value:
            raise bad("prompt", "must be no mixture of texts and numbers, and nothing empty")
        if isinstance(value, list) and not 0 <= min(value) <= max(value) < welcome.vocabulary:
            raise bad("prompt", f"has an id outside the vocabulary of {welcome.vocabulary}")
        if isinstance(value, str) and not welcome.has_tokenizer:
            raise bad("prompt", "this model has no tokenizer; give token ids")
        prompts.append(value if isinstance(value, str) else tuple(value))
    return tuple(prompts)


async def create(call: Call) -> None:
    """Answer a request."""
    client = await call.client()
    welcome = client.welcome
    request = await call.body(CompletionBody, lambda body: completion_request(body, welcome))
    call.grammar_field = request.settings.grammar_field
    completion = Completion(call, client, request, await call.service.detokenizer())
    if request.settings.stream:
        await call.stream(completion.stream())
    else:
        await call.answer(completion.whole())


@dataclass
class Choice:
    """One continuation, with log-probabilities in OpenAI's legacy shape."""

    text: str = ""
    reason: str | None = "length"
    tokens: Pieces = field(default_factory=Pieces)
    values: Pieces = field(default_factory=Pieces)  # their log-probabilities
    best: Pieces = field(default_factory=Pieces)
    offsets: Pieces = field(default_factory=Pieces)  # in the text
    end: int = 0

    def add(self, text: str, logprob: float | None, best: dict[str, float] | None) -> int:
        """Add a token's log-probabilities; returns the number of their bytes."""
        size = self.tokens.add(text) + self.values.add(logprob)
        size += self.best.add(best) + self.offsets.add(self.end)
        self.end += len(text)
        return size

    def body(self, index: int, top: int) -> Object:
        """Returns the choice as clients read it. `top`: as of Settings.logprobs."""
        logprobs = None
        if top >= 0 and self.tokens:
            logprobs = {
                "tokens": self.tokens,
                "token_logprobs": self.values,
                "top_logprobs": self.best if top else None,
                "text_offset": self.offsets,
            }
        return {"index": index, "text": self.text, "logprobs": logprobs, "finish_reason": self.reason}


class Completion:
    """The answer to one request, in chunks or as a whole."""

    def __init__(
        self, call: Call, client: Client, request: CompletionRequest, detokenizer: Detokenizer | None
    ) -> None:
        self._call = call
        self._client = client
        self._request = request
        self._top = request.settings.logprobs
        self._texts = TokenTexts(detokenizer)
        self._usage = Usage(call.service.meter)

    def _body(self, choices: list[Object], **usage: Any) -> Object:
        head = {"id": f"cmpl-{self._call.id}", "object": "text_completion", "created": self._call.created}
        name = self._call.service.model_name(self._client.welcome)
        return head | {"model": name, "choices": choices} | usage

    async def whole(self) -> Object:
        """Returns the whole answer. Raises ProtocolError, ApiError."""
        request = self._request
        choices = [Choice() for _ in range(len(request.prompts) * request.settings.choices)]
        if request.echo:
            for choice, prompt in zip(choices, request.prompts, strict=True):
                await self._echo(choice, prompt)
        if not request.only_scored and request.settings.max_tokens:
            async with aclosing(self._events()) as events:
                async for place, event in events:
                    self._call.hold(self._add(choices[place], event))
        bodies = [choice.body(index, self._top) for index, choice in enumerate(choices)]
        return self._body(bodies, usage=self._usage.openai())

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yields chunks. Raises ProtocolError, ApiError."""
        include_usage = self._request.settings.include_usage
        usage = {"usage": None} if include_usage else {}
        async with aclosing(self._events()) as events:
            async for place, event in events:
                choice = Choice(reason=None)
                self._add(choice, event)
                if choice.text or choice.reason or choice.tokens:
                    yield event_of(self._body([choice.body(place, self._top)], **usage))
        if include_usage:
            yield event_of(self._body([], usage=self._usage.openai()))
        yield DONE

    async def _events(self) -> AsyncGenerator[tuple[int, Token | Done], None]:
        choices = self._request.settings.choices
        answers = (self._generate(p, index) for p in self._request.prompts for index in range(choices))
        async with aclosing(events_of(self._call, answers)) as events:
            async for place, event in events:
                self._usage.add(event, new_prompt=place % choices == 0)
                yield place, event

    def _generate(self, prompt: Prompt, index: int) -> Answer:
        what: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"token_ids": prompt}
        return self._client.generate(**what, **self._request.settings.of_choice(index))

    def _add(self, choice: Choice, event: Token | Done) -> int:
        """Add a new token, or the end, to a choice; returns the number of bytes of log-probabilities."""
        choice.text += event.text
        if isinstance(event, Done):
            choice.reason = event.reason
        elif self._top >= 0:
            best = self._texts.best(event.top_tokens, event.top_logprobs)
            return choice.add(self._texts.text(event.token), event.logprob, best)
        return 0

    async def _echo(self, choice: Choice, prompt: Prompt) -> None:
        """Add the prompt and, if wanted, the log-probabilities of its tokens; of a scored request also its
        one new token."""
        ids: Sequence[int]
        if isinstance(prompt, str):
            choice.text, ids = prompt, (await self._client.tokenize(text=prompt)).ids.tolist()
        else:
            choice.text, ids = self._texts.decode(prompt), prompt
        if self._request.only_scored or not self._request.settings.max_tokens:
            self._usage.prompt += len(ids)
        if self._top < 0:
            return
        scores = self._client.score(on_waiting=self._call.waits, token_ids=ids, top=max(self._top, 1))
        blocks = [block async for block in scores]
        choice.add(self._texts.text(ids[0]), None, None)
        for block in blocks:
            for row, logprob in enumerate(block.chosen.tolist()):
                best = self._best(block.top_tokens[row].tolist(), block.top_logprobs[row].tolist())
                text = self._texts.text(ids[block.start + row + 1])
                best.setdefault(text, logprob)
                self._call.hold(choice.add(text, logprob, best))
        if self._request.only_scored and self._request.settings.max_tokens:
            tokens, values = blocks[-1].top_tokens[-1].tolist(), blocks[-1].top_logprobs[-1].tolist()
            choice.add(self._texts.text(tokens[0]), values[0], self._best(tokens, values))
            choice.text += self._texts.decode(tokens[:1])
            self._usage.completion += 1

    def _best(self, tokens: Iterable[int], values: Iterable[float]) -> dict[str, float]:
        return self._texts.best(list(tokens)[: self._top], list(values)[: self._top])
