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
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from protocol.answer import Answer, score_blocks
from protocol.connection import SILENCE_SECONDS, ConnectOptions, Link, end_task
from protocol.errors import EngineGone, MalformedMessage, ProtocolError, RequestFailed
from protocol.messages import (
    Calibrate,
    Calibrated,
    Calibrating,
    Done,
    Error,
    ExpertActivity,
    ExpertActivityReply,
    Generate,
    PolicyChanged,
    Queued,
    Score,
    Scores,
    SetPolicy,
    Stats,
    StatsReply,
    Token,
    Tokenize,
    Tokenized,
    Waiting,
    Welcome,
)

REPLY_SECONDS = 60.0  # for Stats, which are not queued behind other requests
POLICY_SECONDS = 900.0  # for SetPolicy, which may copy many gigabytes and measure costs


Asked = Stats | ExpertActivity | SetPolicy | Tokenize | Calibrate


@dataclass
class _PendingAnswer:
    """A Generate that has not ended."""

    message: Generate
    answer: Answer
    cancelled: bool = False


@dataclass
class _PendingReply:
    """A request with one reply that has not been answered."""

    message: Asked
    reply: asyncio.Future[Any]
    on_progress: Callable[[Calibrating], None] | None = None

    def resolve(self, reply: object) -> None:
        if self.reply.done():  # its caller has just been cancelled
            return
        if isinstance(reply, ProtocolError):
            self.reply.set_exception(reply)
        else:
            self.reply.set_result(reply)


class Client:
    """A connection to an engine. Once the engine is gone, every pending and later call raises EngineGone."""

    def __init__(self, options: ConnectOptions) -> None:
        """Called by `connect`."""
        self.on_policy: Callable[[PolicyChanged], None] | None = None
        """Called in the event loop when another client has changed the policy."""
        self.on_pause: Callable[[ProtocolError], None] | None = None
        """Called in the event loop with the reason when the connection is lost and the client reconnects."""
        self.on_reconnect: Callable[[], None] | None = None
        """Called in the event loop after a reconnection, when unfinished requests have been sent again."""
        self._options = options
        self._link = Link(options, self._on_lost, self._on_reconnected)
        self.strays = 0
        """Tokens and ends of requests that had already ended: always 0 unless the engine has a bug."""
        self._answers: dict[int, _PendingAnswer] = {}
        self._replies: dict[int, _PendingReply] = {}
        self._cancelled: set[int] = set()  # cancelled Calibrates without their Done so far
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

    def generate(self, **fields: Any) -> Answer:
        """Request an answer, at once; `fields` are those of messages.Generate. Raises EngineGone, and
        MalformedMessage for values of a wrong type. The answer raises the engine's refusal."""
        asked = Generate(self._next_request(), **_frozen(fields))
        self._link.send(asked)
        answer = Answer(asked.request, self._cancel)
        self._answers[asked.request] = _PendingAnswer(asked, answer)
        return answer

    async def score(
        self, *, on_waiting: Callable[[str], None] = lambda why: None, **fields: Any
    ) -> AsyncGenerator[Scores, None]:
        """Log-probabilities of a text, block by block; `fields` are those of messages.Score. `on_waiting`: as
        of an Answer.

        Ends after the last block. Leaving the loop before cancels the request. Raises RequestFailed with the
        engine's reason, or where the engine cancelled the request; EngineGone, MalformedMessage.
        """
        asked = Score(self._next_request(), **_frozen(fields))
        async with aclosing(score_blocks(asked, self._options, self.welcome, on_waiting)) as blocks:
            async for block in blocks:
                yield block

    async def tokenize(self, **fields: Any) -> Tokenized:
        """Token ids of a text or a conversation; `fields` are those of messages.Tokenize. Raises
        RequestFailed with the engine's reason, EngineGone, MalformedMessage."""
        asked = Tokenize(self._next_request(), **_frozen(fields))
        reply: Tokenized = await self._ask(asked, REPLY_SECONDS)
        return reply

    async def stats(self) -> dict[str, Any]:
        """The engine's counters. Raises RequestFailed, EngineGone."""
        reply: StatsReply = await self._ask(Stats(self._next_request()), REPLY_SECONDS)
        return reply.stats

    async def expert_activity(self) -> ExpertActivityReply:
        """Returns what happened to each expert since the first of these calls. Raises RequestFailed,
        EngineGone."""
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
        self, *, on_progress: Callable[[Calibrating], None] | None = None, **fields: Any
    ) -> Calibrated:
        """Have the engine calibrate its model on a text; `fields` are those of messages.Calibrate. That may
        take many minutes, and the engine serves no other request meanwhile. If the engine is restarted, the
        calibration starts again. Cancelling the caller cancels it. Raises RequestFailed with the engine's
        reason, EngineGone, MalformedMessage."""
        asked = Calibrate(self._next_request(), **_frozen(fields))
        calibrated: Calibrated = await self._request(asked, on_progress)
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

    async def _ask(self, message: Asked, limit: float) -> Any:
        limit += self._options.retry
        try:
            async with asyncio.timeout(limit):
                return await self._request(message)
        except TimeoutError:
            asked = type(message).__name__
            raise RequestFailed(f"the engine did not answer {asked} in {limit:g} s") from None

    async def _request(self, message: Asked, on_progress: Callable[[Calibrating], None] | None = None) -> Any:
        """Send the message and return its reply. `on_progress` is called in the event loop with each
        Calibrating. If the caller is cancelled, so is its Calibrate. Raises as `generate`, RequestFailed
        with the engine's reason, and the error that ended the client."""
        self._link.send(message)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._replies[message.request] = _PendingReply(message, reply, on_progress)
        try:
            return await reply
        except asyncio.CancelledError:
            if isinstance(message, Calibrate) and self._link.up:
                self._cancelled.add(message.request)
                self._link.cancel(message.request)
            raise
        finally:
            del self._replies[message.request]

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
        """Pass a message to its request. A message of no unfinished request is dropped."""
        match message:
            case PolicyChanged(request=-1):
                if self.on_policy is not None:
                    # The event loop reports an error in a callback; it must not end this receiver.
                    asyncio.get_running_loop().call_soon(self.on_policy, message)
            case Token(request=request) | Queued(request=request) | Waiting(request=request) if (
                pending := self._answers.get(request)
            ):
                pending.answer.feed(message)
            case Done(request=request) if pending := self._answers.pop(request, None):
                pending.answer.feed(message)
            case Error(request=request, text=text) if pending := self._answers.pop(request, None):
                pending.answer.feed(RequestFailed(text, usage=True))
            case (
                StatsReply(request=request)
                | ExpertActivityReply(request=request)
                | PolicyChanged(request=request)
                | Calibrated(request=request)
                | Tokenized(request=request)
            ) if request in self._replies:
                self._replies[request].resolve(message)
            case Calibrating(request=request):
                progressing = self._replies.get(request)
                if progressing is not None and progressing.on_progress is not None:
                    asyncio.get_running_loop().call_soon(progressing.on_progress, message)
            case Done(request=request, reason=reason) as done if request in self._replies:
                text = (
                    "the engine cancelled this; it is shutting down" if reason == "cancelled" else done.error
                )
                self._replies[request].resolve(RequestFailed(text, done.usage))
            case Error(request=request, text=text) if request in self._replies:
                self._replies[request].resolve(RequestFailed(text, usage=True))
            case Done(request=request) | Calibrated(request=request) if request in self._cancelled:
                self._cancelled.remove(request)
            case Token() | Done() | Queued() | Waiting() | Calibrated():
                self.strays += 1

    def _on_lost(self, lost: ProtocolError) -> None:
        """End cancelled requests. The others wait: an engine refuses those that have crashed others."""
        self._cancelled.clear()
        for pending in list(self._answers.values()):
            if pending.cancelled:
                self._end_cancelled(pending)
        if self.on_pause is not None:
            asyncio.get_running_loop().call_soon(self.on_pause, lost)

    async def _on_reconnected(self) -> None:
        """Request the missing parts from the new engine. Raises ConnectionLost."""
        replies = list(self._replies.values())
        for pending in list(self._answers.values()):
            if pending.cancelled:
                self._end_cancelled(pending)
                continue
            try:
                had = (*pending.message.resume, *pending.answer.token_ids)
                await self._link.send_when_possible(replace(pending.message, resume=had))
            except MalformedMessage as e:  # prompt and answer together exceed a message's limit
                self._answers.pop(pending.message.request).answer.feed(e)
        for waiting in replies:
            if not waiting.reply.done():
                await self._link.send_when_possible(waiting.message)
        if self.on_reconnect is not None:
            asyncio.get_running_loop().call_soon(self.on_reconnect)

    def _end(self, reason: ProtocolError) -> None:
        """Give the engine up: fail every unfinished and later request with this error."""
        if self._ended is not None:
            return
        self._ended = reason
        self._lost.set()
        for pending in self._answers.values():
            pending.answer.feed(copy_of(reason))
        self._answers.clear()
        for waiting in self._replies.values():
            waiting.resolve(copy_of(reason))

    def _close(self) -> None:
        """Cancel everything that the engine still computes for this client."""
        if self._ended is None:
            for request in self._answers:
                self._link.cancel(request)
            for request, waiting in self._replies.items():
                if isinstance(waiting.message, Calibrate):
                    self._link.cancel(request)
            self._end(EngineGone("this client is closed"))

    def _cancel(self, request: int) -> None:
        pending = self._answers.get(request)
        if pending is not None:
            pending.cancelled = True
            self._link.cancel(request)
            if not self._link.up:
                self._end_cancelled(pending)

    def _end_cancelled(self, pending: _PendingAnswer) -> None:
        """End a cancelled answer without the Done that the lost engine cannot send."""
        request = pending.message.request
        if self._answers.pop(request, None) is not None:
            pending.answer.feed(Done(request, "cancelled"))


def _frozen(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a message, which holds tuples: its caller may change a list."""
    return {
        name: tuple(value) if isinstance(value, list | range) else value for name, value in fields.items()
    }


def copy_of(error: ProtocolError) -> ProtocolError:
    """A copy to raise in another place: an exception object belongs to one traceback."""
    return type(error)(str(error))
