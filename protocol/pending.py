"""What a client has asked for and not yet got to the end of, and what becomes of it when the engine dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from protocol.answer import Answer
from protocol.errors import MalformedMessage, ProtocolError, RequestFailed
from protocol.link import Link, RetryBudget
from protocol.messages import (
    Calibrate,
    Calibrated,
    Calibrating,
    Done,
    Error,
    Generate,
    PolicyChanged,
    Queued,
    SetPolicy,
    Stats,
    StatsReply,
    Token,
)


@dataclass
class _Asked:
    """A Generate that has not ended."""

    message: Generate
    answer: Answer
    cancelled: bool = False
    lives: RetryBudget = field(default_factory=RetryBudget)


@dataclass
class _Waiting:
    """A Stats, SetPolicy or Calibrate that has not been answered."""

    message: Stats | SetPolicy | Calibrate
    reply: asyncio.Future[Any]
    on_progress: Callable[[Calibrating], None] | None = None
    lives: RetryBudget = field(default_factory=RetryBudget)

    def settle(self, reply: object) -> None:
        if self.reply.done():  # given up by its caller in this very moment
            return
        if isinstance(reply, ProtocolError):
            self.reply.set_exception(reply)
        else:
            self.reply.set_result(reply)


class Pending:
    """The live requests of one client, by their numbers. Each ends once: by the engine's word, or by ours
    where there is no engine to say it."""

    def __init__(self, link: Link) -> None:
        self.strays = 0  # Tokens and ends for requests that had ended
        self._link = link
        self._answers: dict[int, _Asked] = {}
        self._replies: dict[int, _Waiting] = {}
        self._given_up: set[int] = set()  # of Calibrates that were cancelled: their Done is yet to come

    def generate(self, message: Generate) -> Answer:
        """Raises MalformedMessage, and RequestFailed where too much waits to be sent."""
        self._link.send(message)
        answer = Answer(message.request, self._cancel)
        self._answers[message.request] = _Asked(message, answer)
        return answer

    async def ask(
        self,
        message: Stats | SetPolicy | Calibrate,
        on_progress: Callable[[Calibrating], None] | None = None,
    ) -> Any:
        """The reply. `on_progress` is called in the event loop with what comes before it. A Calibrate that is
        not waited for any more is cancelled. Raises as `generate`, RequestFailed with the engine's reason,
        what `fail` was given."""
        self._link.send(message)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._replies[message.request] = _Waiting(message, reply, on_progress)
        try:
            return await reply
        except asyncio.CancelledError:
            if isinstance(message, Calibrate) and self._link.up:
                self._given_up.add(message.request)
                self._link.cancel(message.request)
            raise
        finally:
            del self._replies[message.request]

    def dispatch(self, message: object) -> None:
        """Give a message to whoever asked. What belongs to no request (any more) is dropped."""
        match message:
            case Token(request=request) | Queued(request=request) if asked := self._answers.get(request):
                asked.answer.take(message)
            case Done(request=request) if asked := self._answers.pop(request, None):
                asked.answer.take(message)
            case Error(request=request, text=text) if asked := self._answers.pop(request, None):
                asked.answer.take(RequestFailed(text, usage=True))
            case (
                StatsReply(request=request) | PolicyChanged(request=request) | Calibrated(request=request)
            ) if request in self._replies:
                self._replies[request].settle(message)
            case Calibrating(request=request):
                asked_for = self._replies.get(request)
                if asked_for is not None and asked_for.on_progress is not None:
                    asyncio.get_running_loop().call_soon(asked_for.on_progress, message)
            case Done(request=request, reason=reason) as done if request in self._replies:
                text = "the engine gave this up; it is shutting down" if reason == "cancelled" else done.error
                self._replies[request].settle(RequestFailed(text, done.usage))
            case Error(request=request, text=text) if request in self._replies:
                self._replies[request].settle(RequestFailed(text, usage=True))
            case Done(request=request) | Calibrated(request=request) if request in self._given_up:
                self._given_up.remove(request)
            case Token() | Done() | Queued() | Calibrated():
                self.strays += 1

    def lose_engine(self) -> None:
        """End what was cancelled, and what may be killing one engine after the other. The rest waits."""
        self._given_up.clear()
        for asked in list(self._answers.values()):
            failure = asked.lives.lost(len(asked.answer.token_ids))
            if asked.cancelled:
                self._end_cancelled(asked)
            elif failure is not None:
                self._answers.pop(asked.message.request).answer.take(failure)
        for waiting in self._replies.values():
            failure = waiting.lives.lost(0)
            if failure is not None:
                waiting.settle(failure)

    async def ask_again(self) -> None:
        """Ask a new engine for what is missing; what is asked for from now on, `generate` and `ask` send.
        Raises ConnectionLost."""
        replies = list(self._replies.values())
        for asked in list(self._answers.values()):
            if asked.cancelled:
                self._end_cancelled(asked)
                continue
            try:
                await self._link.send_again(replace(asked.message, resume=asked.answer.token_ids))
            except MalformedMessage as e:  # question and answer together are more than a message may hold
                self._answers.pop(asked.message.request).answer.take(e)
        for waiting in replies:
            if not waiting.reply.done():
                await self._link.send_again(waiting.message)

    def cancel_all(self) -> None:
        """Leave nothing running in the engine."""
        for request in self._answers:
            self._link.cancel(request)
        for request, waiting in self._replies.items():
            if isinstance(waiting.message, Calibrate):
                self._link.cancel(request)

    def fail(self, reason: ProtocolError) -> None:
        """There is no engine any more: raise this for everything."""
        for asked in self._answers.values():
            asked.answer.take(another(reason))
        self._answers.clear()
        for waiting in self._replies.values():
            waiting.settle(another(reason))

    def _cancel(self, request: int) -> None:
        asked = self._answers.get(request)
        if asked is not None:
            asked.cancelled = True
            self._link.cancel(request)
            if not self._link.up:
                self._end_cancelled(asked)

    def _end_cancelled(self, asked: _Asked) -> None:
        """In the place of an engine that will not say it."""
        request = asked.message.request
        if self._answers.pop(request, None) is not None:
            asked.answer.take(Done(request, "cancelled"))


def another(error: ProtocolError) -> ProtocolError:
    """The same error to raise in one more place: an exception object belongs to one traceback."""
    return type(error)(str(error))
