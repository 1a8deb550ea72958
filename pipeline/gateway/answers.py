"""The choices of one request: answers of the engine that run at once, as one sequence of events, with their
usage; and tokens and their log-probabilities as clients read them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import suppress
from typing import Any

from pipeline.gateway.call import Meter
from pipeline.gateway.errors import ApiError
from protocol.answer import Answer
from protocol.client import Client
from protocol.errors import ProtocolError
from protocol.messages import Done, Token

Event = tuple[int, Token | Done]


async def events_of(answers: Sequence[Answer]) -> AsyncGenerator[Event, None]:
    """Tokens, and at the end of each answer its Done, with the answer's place. Leaving the loop cancels them
    all. Raises ProtocolError as the first that fails, ApiError where the engine has cancelled one."""
    try:
        if len(answers) == 1:
            async for token in answers[0]:
                yield 0, token
            yield 0, _done_of(answers[0])
            return
        queue: asyncio.Queue[Event | ProtocolError | ApiError] = asyncio.Queue()
        tasks = [asyncio.create_task(_feed(queue, place, answer)) for place, answer in enumerate(answers)]
        try:
            left = len(answers)
            while left:
                event = await queue.get()
                if not isinstance(event, tuple):
                    raise event
                left -= isinstance(event[1], Done)
                yield event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for answer in answers:
            with suppress(ProtocolError):
                await answer.cancel()


async def started(answers: Iterable[Answer]) -> list[Answer]:
    """Answers that are sent one by one. Where one cannot be sent, those before it are cancelled. Raises
    ProtocolError."""
    found: list[Answer] = []
    try:
        for answer in answers:
            found.append(answer)
    except ProtocolError:
        for answer in found:
            with suppress(ProtocolError):
                await answer.cancel()
        raise
    return found


async def _feed(queue: asyncio.Queue[Any], place: int, answer: Answer) -> None:
    try:
        async for token in answer:
            queue.put_nowait((place, token))
        queue.put_nowait((place, _done_of(answer)))
    except (ProtocolError, ApiError) as e:
        queue.put_nowait(e)


def _done_of(answer: Answer) -> Done:
    assert answer.done is not None
    if answer.done.reason == "cancelled":  # by the engine: a client that cancels does not read on
        raise ApiError(503, "the engine cancelled this answer: it is shutting down")
    return answer.done


class Usage:
    """Tokens of all answers of a request, which the meter counts as well."""

    def __init__(self, meter: Meter) -> None:
        self.prompt = 0
        self.cached = 0
        self.completion = 0
        self.reasoning = 0
        self.fidelity: dict[str, Any] | None = None
        self._meter = meter
        self._began = time.perf_counter()
        self._first = False  # the first token has come

    def note_token(self) -> None:
        if not self._first:
            self._first = True
            self._meter.first_token.add(time.perf_counter() - self._began)

    def add(self, answer: Answer, *, new_prompt: bool = True) -> None:
        """`new_prompt`: not another choice for the same one."""
        done = answer.done
        assert done is not None
        cached = int(done.stats.get("kv_reused_tokens", 0))
        prompt = int(done.stats.get("prompt_tokens", 0))
        if new_prompt:
            self.prompt += prompt
            self.cached += cached
        tokens = len(answer.token_ids)
        self.completion += tokens
        self.fidelity = done.stats.get("fidelity", self.fidelity)
        self._meter.prompt_tokens += prompt
        self._meter.cached_tokens += cached
        self._meter.answer_tokens += tokens
        self._meter.reasons[done.reason] += 1
        self._meter.whole.add(time.perf_counter() - self._began)

    def openai(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }
        if self.fidelity is not None:
            usage["fidelity"] = self.fidelity
        return usage


class TokenTexts:
    """The bytes of tokens, which the engine knows. Those that were asked for are kept."""

    def __init__(self, client: Client, known: dict[int, bytes]) -> None:
        self._client = client
        self._known = known

    async def learn(self, ids: Iterable[int]) -> None:
        """Raises ProtocolError."""
        missing = sorted(set(ids) - self._known.keys())
        if missing and self._client.welcome.has_tokenizer:
            found = await self._client.tokenize(token_ids=missing)
            self._known.update(zip(missing, found.pieces, strict=True))

    def bytes(self, token: int) -> bytes:
        return self._known.get(token, b"")

    def text(self, token: int) -> str:
        """A token that is no whole characters is shown by its bytes."""
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    async def chat(self, token: Token) -> dict[str, Any]:
        """An entry of `logprobs.content`."""
        await self.learn((token.token, *token.top_tokens))
        best = zip(token.top_tokens, token.top_logprobs, strict=True)
        return self._entry(token.token, token.logprob) | {
            "top_logprobs": [self._entry(other, logprob) for other, logprob in best]
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": logprob, "bytes": list(self.bytes(token))}

    def best(self, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, float]:
        """A row of the legacy `top_logprobs`: tokens with the same text are one, the best of them."""
        found: dict[str, float] = {}
        for token, logprob in zip(tokens, logprobs, strict=True):
            found.setdefault(self.text(token), logprob)
        return found
