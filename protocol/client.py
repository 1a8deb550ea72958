"""The client library: requests to an engine, for the command line, scripts and tests.

    async with Client.connect(endpoint, name="demo") as client:
        answer = client.generate(prompt="What is a generator?", max_tokens=64)
        async for token in answer:
            print(token.text, end="")

Works on asyncio and uvloop. One task per client receives for all its requests. Answers are small (at most
`max_tokens` messages) and are buffered on arrival, so a slow reader of one never delays another. Scores can
be hundreds of megabytes, so `score` opens a connection of its own, from which the caller's loop receives
directly. A slow caller fills that connection's short queue and thereby slows down only its own score; the
heartbeats of both connections continue.

With `retry`, a client survives the exit of its engine: it reconnects to an engine of the same model at the
same address and requests the missing part. An answer then continues after a pause. If it is greedy or seeded,
it is the answer of an uninterrupted engine (to rounding); otherwise the rest is a new sample.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from protocol.answer import Answer
from protocol.connection import SILENCE_SECONDS, ConnectOptions, end_task
from protocol.errors import EngineGone, ProtocolError, RequestFailed
from protocol.link import Link
from protocol.messages import (
    CALIBRATION_TOKENS,
    Calibrate,
    Calibrated,
    Calibrating,
    ChatMessage,
    ExpertActivity,
    ExpertActivityReply,
    Generate,
    PolicyChanged,
    Sampling,
    Score,
    Scores,
    SetPolicy,
    Shaping,
    Stats,
    StatsReply,
    Tokenize,
    Tokenized,
    Welcome,
)
from protocol.pending import Pending, copy_of
from protocol.scoring import score_blocks

REPLY_SECONDS = 60.0  # for Stats, which are not queued behind other requests
POLICY_SECONDS = 900.0  # for SetPolicy, which may copy many gigabytes and measure costs


class Client:
    """A connection to an engine. Once the engine is gone, every pending and later call raises EngineGone."""

    def __init__(self, options: ConnectOptions) -> None:
        """For `connect`."""
        self.on_policy: Callable[[PolicyChanged], None] | None = None
        """Called in the event loop when another client has changed the policy."""
        self.on_pause: Callable[[ProtocolError], None] | None = None
        """Called in the event loop with the reason when the connection is lost and the client reconnects."""
        self.on_reconnect: Callable[[], None] | None = None
        """Called in the event loop after a reconnection, when unfinished requests have been sent again."""
        self._options = options
        self._link = Link(options, self._on_lost, self._on_reconnected)
        self._pending = Pending(self._link)
        self._requests = itertools.count()
        self._ended: ProtocolError | None = None
        self._lost = asyncio.Event()

    @staticmethod
    @asynccontextmanager
    async def connect(
        endpoint: str,
        *,
        name: str = "",
        timeout: float = 5.0,
        retry: float = 0.0,
        silence: float = SILENCE_SECONDS,
    ) -> AsyncIterator[Client]:
        """A client for the length of the block. It waits `timeout` seconds for a starting engine and `retry`
        seconds for a restart. An engine that sends nothing for `silence` seconds, not even
        heartbeats, counts as lost; the client sends five heartbeats in that time.

        Raises EngineGone if no engine answers within `timeout` seconds, VersionMismatch if the engine
        speaks another version, ProtocolError for an endpoint that cannot be used.
        """
        client = Client(ConnectOptions(endpoint, name, timeout, retry, silence))
        await client._link.open()
        try:
            receiver = asyncio.create_task(client._receive(), name=f"receiver from {endpoint}")
            try:
                yield client
            finally:
                try:
                    client._close()
                finally:
                    await end_task(receiver)
        finally:
            await client._link.close()

    @property
    def endpoint(self) -> str:
        """The endpoint of the engine that this client is connected to."""
        return self._options.endpoint

    @property
    def welcome(self) -> Welcome:
        """The Welcome of the engine, of the latest one after a reconnection."""
        return self._link.welcome

    @property
    def strays(self) -> int:
        """Tokens and ends of requests that had already ended: always 0 unless the engine has a bug."""
        return self._pending.strays

    def generate(
        self,
        *,
        prompt: str | None = None,
        token_ids: Sequence[int] | None = None,
        messages: Sequence[ChatMessage] | None = None,
        max_tokens: int = 128,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        conversation: str | None = None,
        resume: Sequence[int] = (),
        rival: int = -1,
        reserve: int = 1,
        shaping: Shaping = Shaping(),  # noqa: B008 - frozen
        logprobs: int = -1,
        template: str = "",
    ) -> Answer:
        """Request an answer to exactly one of `prompt`, `token_ids`, `messages`; the request is sent at once.

        Raises EngineGone, and MalformedMessage for values of a wrong type. The answer raises the engine's
        refusal.
        """
        request = self._next_request()
        return self._pending.generate(
            Generate(
                request,
                prompt,
                None if token_ids is None else tuple(token_ids),
                None if messages is None else tuple(messages),
                max_tokens,
                sampling,
                tuple(stop),
                ignore_eos,
                conversation,
                tuple(resume),
                rival,
                reserve=reserve,
                shaping=shaping,
                logprobs=logprobs,
                template=template,
            )
        )

    async def score(
        self,
        *,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
        stepwise: bool = False,
        prefill: int = 1,
        full: bool = False,
        top: int = 0,
    ) -> AsyncGenerator[Scores, None]:
        """Log-probabilities of exactly one of `text`, `token_ids`, block by block; see messages.Score.

        Ends after the last block. Leaving the loop before cancels the request. Raises RequestFailed with the
        engine's reason, or where the engine cancelled the request; EngineGone, MalformedMessage.
        """
        ids = None if token_ids is None else tuple(token_ids)
        asked = Score(self._next_request(), text, ids, stepwise, prefill, full, top)
        async with aclosing(score_blocks(asked, self._options, self.welcome)) as blocks:
            async for block in blocks:
                yield block

    async def tokenize(
        self,
        *,
        text: str | None = None,
        messages: Sequence[ChatMessage] | None = None,
        template: str = "",
        token_ids: Sequence[int] | None = None,
    ) -> Tokenized:
        """Token ids of a text or a conversation, or the text of ids; see messages.Tokenize. Raises
        RequestFailed with the engine's reason, EngineGone, MalformedMessage."""
        ids = None if token_ids is None else tuple(token_ids)
        turns = None if messages is None else tuple(messages)
        asked = Tokenize(self._next_request(), text, turns, template, ids)
        reply: Tokenized = await self._ask(asked, REPLY_SECONDS)
        return reply

    async def stats(self) -> dict[str, Any]:
        """The engine's counters. Raises RequestFailed, EngineGone."""
        reply: StatsReply = await self._ask(Stats(self._next_request()), REPLY_SECONDS)
        return reply.stats

    async def expert_activity(self) -> ExpertActivityReply:
        """What happened to each expert since the first of these calls. Raises RequestFailed, EngineGone."""
        reply: ExpertActivityReply = await self._ask(ExpertActivity(self._next_request()), REPLY_SECONDS)
        return reply

    async def set_policy(
        self, name: str, options: dict[str, str] | None = None, *, counted: bool = True
    ) -> PolicyChanged:
        """Change the engine's policy for all clients. Without `counted`, placements by use ignore the steps
        under it. Raises RequestFailed with the reason, EngineGone."""
        asked = SetPolicy(self._next_request(), name, dict(options or {}), counted)
        reply: PolicyChanged = await self._ask(asked, POLICY_SECONDS)
        return reply

    async def calibrate(
        self,
        *,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
        tokens: int = CALIBRATION_TOKENS,
        starts: Sequence[int] = (),
        share: float = 1.0,
        max_loss: float | None = None,
        on_progress: Callable[[Calibrating], None] | None = None,
    ) -> Calibrated:
        """Have the engine calibrate its model on exactly one of `text`, `token_ids`, at most so many `tokens`
        of it. `starts`, `share`: of excerpts; they and `max_loss`: see `Calibrate`. That may take many
        minutes, and the engine serves no other request meanwhile. If the engine is restarted, the calibration
        starts again. Cancelling the caller cancels it. Raises RequestFailed with the engine's reason,
        EngineGone, MalformedMessage."""
        ids = None if token_ids is None else tuple(token_ids)
        asked = Calibrate(self._next_request(), text, ids, tokens, tuple(starts), share, max_loss)
        calibrated: Calibrated = await self._pending.request(asked, on_progress)
        return calibrated

    async def lost(self) -> ProtocolError:
        """Wait until the client gives the engine up; returns the error that later calls raise."""
        await self._lost.wait()
        assert self._ended is not None
        return copy_of(self._ended)

    def _next_request(self) -> int:
        if self._ended is not None:
            raise copy_of(self._ended)
        return next(self._requests)

    async def _ask(self, message: Stats | ExpertActivity | SetPolicy | Tokenize, limit: float) -> Any:
        limit += self._options.retry
        try:
            async with asyncio.timeout(limit):
                return await self._pending.request(message)
        except TimeoutError:
            asked = type(message).__name__
            raise RequestFailed(f"the engine did not answer {asked} in {limit:g} s") from None

    async def _receive(self) -> None:
        try:
            while True:
                self._dispatch(await self._link.receive())
        except ProtocolError as e:
            self._end(e)
        except Exception as e:
            self._end(EngineGone(f"this client failed: {e!r}"))
            raise  # `connect` raises it at the end of its block

    def _dispatch(self, message: object) -> None:
        match message:
            case PolicyChanged(request=-1):
                if self.on_policy is not None:
                    # The event loop reports an error in a callback; it must not end this receiver.
                    asyncio.get_running_loop().call_soon(self.on_policy, message)
            case _:
                self._pending.dispatch(message)

    def _on_lost(self, lost: ProtocolError) -> None:
        self._pending.on_engine_lost()
        if self.on_pause is not None:
            asyncio.get_running_loop().call_soon(self.on_pause, lost)

    async def _on_reconnected(self) -> None:
        await self._pending.resend()
        if self.on_reconnect is not None:
            asyncio.get_running_loop().call_soon(self.on_reconnect)

    def _end(self, reason: ProtocolError) -> None:
        """Fail every pending and later call."""
        if self._ended is None:
            self._ended = reason
            self._lost.set()
            self._pending.fail(reason)

    def _close(self) -> None:
        """Cancel this client's requests in the engine."""
        if self._ended is None:
            self._pending.cancel_all()
            self._end(EngineGone("this client is closed"))
