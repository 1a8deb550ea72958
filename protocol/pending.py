"""A client's unfinished requests, and how they continue when the engine is restarted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from protocol.answer import Answer
from protocol.errors import MalformedMessage, ProtocolError, RequestFailed
from protocol.link import Link, RetryBudget
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
    SetPolicy,
    Stats,
    StatsReply,
    Token,
    Tokenize,
    Tokenized,
)


@dataclass
class _PendingAnswer:
    """A Generate that has not ended."""

    message: Generate
    answer: Answer
    cancelled: bool = False
    retries: RetryBudget = field(default_factory=RetryBudget)


@dataclass
class _PendingReply:
    """A Stats, ExpertActivity, SetPolicy, Tokenize or Calibrate that has not been answered."""

    message: Stats | ExpertActivity | SetPolicy | Calibrate | Tokenize
    reply: asyncio.Future[Any]
    on_progress: Callable[[Calibrating], None] | None = None
    retries: RetryBudget = field(default_factory=RetryBudget)

    def resolve(self, reply: object) -> None:
        if self.reply.done():  # its caller has just been cancelled
            return
        if isinstance(reply, ProtocolError):
            self.reply.set_exception(reply)
        else:
            self.reply.set_result(reply)


class Pending:
    """The unfinished requests of one client, by number. Each ends once: by the engine's message, or here if
    no engine is left to send it."""

    def __init__(self, link: Link) -> None:
        self.strays = 0  # Tokens and ends of requests that had already ended
        self._link = link
        self._answers: dict[int, _PendingAnswer] = {}
        self._replies: dict[int, _PendingReply] = {}
        self._cancelled: set[int] = set()  # cancelled Calibrates without their Done so far

    def generate(self, message: Generate) -> Answer:
        """Raises MalformedMessage, and RequestFailed if too many messages wait to be sent."""
        self._link.send(message)
        answer = Answer(message.request, self._cancel)
        self._answers[message.request] = _PendingAnswer(message, answer)
        return answer

    async def request(
        self,
        message: Stats | ExpertActivity | SetPolicy | Calibrate | Tokenize,
        on_progress: Callable[[Calibrating], None] | None = None,
    ) -> Any:
        """Send the message and return its reply. `on_progress` is called in the event loop with each
        Calibrating. If the caller is cancelled, so is its Calibrate. Raises as `generate`, RequestFailed
        with the engine's reason, and the error given to `fail`."""
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

    def dispatch(self, message: object) -> None:
        """Pass a message to its request. A message of no unfinished request is dropped."""
        match message:
            case Token(request=request) | Queued(request=request) if pending := self._answers.get(request):
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
            case Token() | Done() | Queued() | Calibrated():
                self.strays += 1

    def on_engine_lost(self) -> None:
        """End cancelled requests and those that may have crashed several engines. The others wait."""
        self._cancelled.clear()
        for pending in list(self._answers.values()):
            failure = pending.retries.count_loss(len(pending.answer.token_ids))
            if pending.cancelled:
                self._end_cancelled(pending)
            elif failure is not None:
                self._answers.pop(pending.message.request).answer.feed(failure)
        for waiting in self._replies.values():
            failure = waiting.retries.count_loss(0)
            if failure is not None:
                waiting.resolve(failure)

    async def resend(self) -> None:
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

    def cancel_all(self) -> None:
        """Cancel everything that the engine still computes for this client."""
        for request in self._answers:
            self._link.cancel(request)
        for request, waiting in self._replies.items():
            if isinstance(waiting.message, Calibrate):
                self._link.cancel(request)

    def fail(self, reason: ProtocolError) -> None:
        """The client has given the engine up: end every request with this error."""
        for pending in self._answers.values():
            pending.answer.feed(copy_of(reason))
        self._answers.clear()
        for waiting in self._replies.values():
            waiting.resolve(copy_of(reason))

    def _cancel(self, request: int) -> None:
        pending = self._answers.get(request)
        if pending is not None:
            pending.cancelled = True
            self._link.cancel(request)
            if not self._link.up:
                self._end_cancelled(pending)

    def _end_cancelled(self, pending: _PendingAnswer) -> None:
        """End it without the Done that the lost engine cannot send."""
        request = pending.message.request
        if self._answers.pop(request, None) is not None:
            pending.answer.feed(Done(request, "cancelled"))


def copy_of(error: ProtocolError) -> ProtocolError:
    """A copy to raise in another place: an exception object belongs to one traceback."""
    return type(error)(str(error))
