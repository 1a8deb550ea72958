"""POST /v1/completions: texts and token ids to continue, several at once; their own log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pipeline.gateway.answers import TokenTexts, Usage, events_of, started
from pipeline.gateway.asgi import event_of
from pipeline.gateway.bodies import MOST_PROMPTS, CompletionBody
from pipeline.gateway.call import Call, check_model
from pipeline.gateway.chat import DONE
from pipeline.gateway.chat_run import hashed
from pipeline.gateway.engine_links import model_name
from pipeline.gateway.errors import ApiError, bad
from pipeline.gateway.settings import Settings, settings_of
from pipeline.gateway.tools import grammar_of
from protocol.answer import Answer
from protocol.client import Client
from protocol.messages import Done, Sampling, Scores, Token, Welcome

DEFAULT_TOKENS = 16
DEFAULT_SAMPLING = Sampling(temperature=1.0)  # OpenAI's; a model's makers recommend theirs for chats
OPENING = 64  # ids or characters by which a prompt's KV is found again

Prompt = str | tuple[int, ...]


@dataclass(frozen=True)
class CompletionRequest:
    prompts: tuple[Prompt, ...]
    settings: Settings
    echo: bool

    @property
    def only_scored(self) -> bool:
        """The log-probabilities of the prompt already say its one greedy next token."""
        settings = self.settings
        return (
            self.echo
            and settings.logprobs >= 0
            and settings.max_tokens <= 1
            and (settings.max_tokens == 0 or settings.sampling.temperature == 0)
            and settings.sampling.repetition_penalty == 1
            and not (settings.shaping.bias or settings.shaping.grammar or settings.stop)
            and settings.choices == 1
        )


def completion_request(body: CompletionBody, welcome: Welcome) -> CompletionRequest:
    """Raises ApiError."""
    check_model(body.model, welcome)
    prompts = _prompts(body.prompt, welcome)
    echo = bool(body.echo)
    most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    if not most and not echo:
        raise bad("max_tokens", "must be 1 or more without echo")
    if body.suffix:
        raise bad("suffix", "is not supported: the model continues texts at their end")
    settings = settings_of(
        body,
        welcome,
        most,
        stop=body.stop,
        choices=body.n,
        default=DEFAULT_SAMPLING,
        grammar=grammar_of(body, {"response_format": body.response_format}),
        logprobs=body.logprobs,
    )
    if len(prompts) * settings.choices > MOST_PROMPTS:
        raise bad("n", f"of {len(prompts)} prompts makes more than {MOST_PROMPTS} answers")
    if body.best_of not in (None, settings.choices):
        raise bad("best_of", "must be n: all answers are returned")
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


async def completions(call: Call) -> None:
    client = await call.client()
    request = completion_request(await call.body(CompletionBody), client.welcome)
    call.grammar_field = request.settings.grammar_field
    maker = _Maker(call, client, request)
    if request.settings.stream:
        await call.stream(maker.stream())
    else:
        await call.answer(maker.whole())


@dataclass
class _Logprobs:
    """OpenAI's legacy shape."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, text: str, logprob: float | None, best: dict[str, float] | None, offset: int) -> None:
        self.tokens.append(text)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(best)
        self.text_offset.append(offset)

    def body(self, top: int) -> dict[str, Any]:
        return vars(self) | ({} if top else {"top_logprobs": None})


class _Maker:
    """The answer to one request, in chunks or as a whole."""

    def __init__(self, call: Call, client: Client, request: CompletionRequest) -> None:
        self._client = client
        self._request = request
        self._key_name = call.key_name
        self._texts = TokenTexts(client, call.service.pieces)
        self._usage = Usage(call.service.meter)
        self._head = {
            "id": f"cmpl-{call.id}",
            "object": "text_completion",
            "created": call.created,
            "model": model_name(client.welcome),
        }

    async def whole(self) -> dict[str, Any]:
        request = self._request
        choices = [_Choice(index) for index in range(len(request.prompts) * request.settings.choices)]
        if request.echo:
            # Each on a connection of its own, so a few at a time; all of them wait in the engine.
            gate = asyncio.Semaphore(4)
            try:
                async with asyncio.TaskGroup() as group:
                    for choice in choices[:: request.settings.choices]:
                        group.create_task(self._echo(choice, gate))
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
        for choice in choices:  # of one prompt
            first = choices[choice.index - choice.index % request.settings.choices]
            if choice is not first:
                choice.text, choice.logprobs = first.text, _copied(first.logprobs)
        if request.settings.max_tokens and not request.only_scored:
            async with aclosing(self._events()) as events:
                async for place, event in events:
                    choices[place].text += event.text
                    if isinstance(event, Token):
                        await self._note(choices[place], event)
                    else:
                        choices[place].reason = event.reason
        return self._head | {
            "choices": [choice.body(self._request.settings.logprobs) for choice in choices],
            "usage": self._usage.openai(),
        }

    async def stream(self) -> AsyncIterator[bytes]:
        request = self._request
        if request.echo and (request.settings.logprobs >= 0 or not request.settings.max_tokens):
            raise ApiError(400, "echo: with logprobs or without new tokens it is not streamed", "echo")
        usage = {"usage": None} if request.settings.include_usage else {}
        if request.echo:
            for index in range(len(request.prompts) * request.settings.choices):
                text, _ = await self._prompt_text(request.prompts[index // request.settings.choices])
                yield self._chunk(index, text, None, None, usage)
        async with aclosing(self._events()) as events:
            async for place, event in events:
                logprobs = None
                if isinstance(event, Token) and request.settings.logprobs >= 0:
                    choice = _Choice(place)
                    await self._note(choice, event)
                    logprobs = choice.logprobs.body(request.settings.logprobs)
                reason = event.reason if isinstance(event, Done) else None
                if event.text or reason or logprobs:
                    yield self._chunk(place, event.text, logprobs, reason, usage)
        if request.settings.include_usage:
            yield event_of(self._head | {"choices": [], "usage": self._usage.openai()})
        yield DONE

    def _chunk(
        self,
        place: int,
        text: str,
        logprobs: dict[str, Any] | None,
        reason: str | None,
        usage: dict[str, Any],
    ) -> bytes:
        choice = {"index": place, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return event_of(self._head | usage | {"choices": [choice]})

    async def _events(self) -> AsyncGenerator[tuple[int, Token | Done], None]:
        settings = self._request.settings
        answers = await started(
            self._generate(prompt, index)
            for prompt in self._request.prompts
            for index in range(settings.choices)
        )
        async with aclosing(events_of(answers)) as events:
            async for place, event in events:
                if isinstance(event, Token):
                    self._usage.note_token()
                else:
                    self._usage.add(answers[place], new_prompt=place % settings.choices == 0)
                yield place, event

    def _generate(self, prompt: Prompt, index: int) -> Answer:
        what: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"token_ids": prompt}
        if len(self._request.prompts) == 1:
            what["conversation"] = f"{hashed([self._key_name, prompt[:OPENING]])}/{index}"
        return self._client.generate(**what, **self._request.settings.of_choice(index))

    async def _note(self, choice: _Choice, token: Token) -> None:
        """The log-probabilities of a new token."""
        if self._request.settings.logprobs >= 0:
            await self._texts.learn((token.token, *token.top_tokens))
            text = self._texts.text(token.token)
            best = self._texts.best(token.top_tokens, token.top_logprobs)
            choice.logprobs.add(text, token.logprob, best, choice.offset)
            choice.offset += len(text)

    # --- echo ------------------------------------------------------------------------------------------

    async def _prompt_text(self, prompt: Prompt) -> tuple[str, Sequence[int]]:
        """Text and ids."""
        if isinstance(prompt, str):
            return prompt, (await self._client.tokenize(text=prompt)).ids.tolist()
        if not self._client.welcome.has_tokenizer:
            return "", prompt
        return (await self._client.tokenize(token_ids=prompt)).text, prompt

    async def _echo(self, choice: _Choice, gate: asyncio.Semaphore) -> None:
        """The prompt and, if wanted, the log-probabilities of its tokens; of a scored request also its one
        new token."""
        request = self._request
        top = request.settings.logprobs
        text, ids = await self._prompt_text(request.prompts[choice.index // request.settings.choices])
        choice.text = text
        if request.only_scored or not request.settings.max_tokens:
            choice.reason = "length"
            self._usage.prompt += len(ids)
        if top < 0:
            return
        async with gate:
            blocks = [block async for block in self._client.score(token_ids=ids, top=max(top, 1))]
        await self._texts.learn((*ids, *(int(t) for block in blocks for t in block.top_tokens.ravel())))
        choice.logprobs.add(self._texts.text(ids[0]), None, None, 0)
        choice.offset = len(self._texts.text(ids[0]))
        for token, logprob, best in _rows(blocks, ids):
            chosen = self._texts.text(token)
            row = self._texts.best([t for t, _ in best[:top]], [value for _, value in best[:top]])
            row.setdefault(chosen, logprob)
            choice.logprobs.add(chosen, logprob, row, choice.offset)
            choice.offset += len(chosen)
        if request.only_scored and request.settings.max_tokens:
            last = blocks[-1]
            token = int(last.top_tokens[-1, 0])
            values = last.top_logprobs[-1].tolist()
            others = self._texts.best(last.top_tokens[-1].tolist()[:top], values[:top])
            choice.logprobs.add(self._texts.text(token), values[0], others, choice.offset)
            choice.text += (await self._client.tokenize(token_ids=[token])).text
            self._usage.completion += 1


def _rows(blocks: Sequence[Scores], ids: Sequence[int]) -> list[tuple[int, float, list[tuple[int, float]]]]:
    """For each token after the first: its log-probability, and the best tokens of its place with theirs."""
    rows = []
    for block in blocks:
        for row, logprob in enumerate(block.chosen.tolist()):
            best = zip(block.top_tokens[row].tolist(), block.top_logprobs[row].tolist(), strict=True)
            rows.append((ids[block.start + row + 1], logprob, list(best)))
    return rows


@dataclass
class _Choice:
    index: int
    text: str = ""
    reason: str = "length"
    offset: int = 0
    logprobs: _Logprobs = field(default_factory=_Logprobs)

    def body(self, top: int) -> dict[str, Any]:
        logprobs = self.logprobs.body(top) if top >= 0 else None
        return {
            "index": self.index,
            "text": self.text,
            "logprobs": logprobs,
            "finish_reason": self.reason,
        }


def _copied(logprobs: _Logprobs) -> _Logprobs:
    return _Logprobs(*(list(values) for values in vars(logprobs).values()))
