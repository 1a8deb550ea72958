"""The client library: everything that talks to an engine as a person or a script would.

    async with Client.connect(endpoint, name="demo") as client:
        answer = client.generate(prompt="What is a generator?", max_tokens=64)
        async for token in answer:
            print(token.text, end="")

Works on asyncio and uvloop. One task per client receives for all its requests. Answers are small (at most
`max_tokens` messages) and are kept as they arrive, so a slow reader of one never holds up another. Scores
can be hundreds of megabytes: `score` therefore opens a connection of its own, from which the caller's loop
receives directly. A slow caller fills that connection's short queue and so slows the engine down, for
itself alone; the heartbeats of both connections go on beside it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from protocol.answer import Answer
from protocol.connection import Connection, end_task, open_connection
from protocol.errors import EngineGone, ProtocolError, RequestFailed
from protocol.messages import (
    ChatMessage,
    Done,
    Error,
    Generate,
    PolicyChanged,
    Queued,
    Sampling,
    Score,
    Scores,
    SetPolicy,
    Stats,
    StatsReply,
    Token,
    Welcome,
)

REPLY_SECONDS = 60.0  # for Stats, which wait for no other request
POLICY_SECONDS = 900.0  # for SetPolicy, which may place many gigabytes and measure costs
SCORES_HWM = 4  # blocks of Scores that may wait on this side


class Client:
    """A connection to an engine. Once the engine is gone, every pending and later call raises EngineGone."""

    def __init__(self, connection: Connection, endpoint: str, name: str, timeout: float) -> None:
        self.welcome: Welcome = connection.welcome
        self.on_policy: Callable[[PolicyChanged], None] | None = None
        """Called in the event loop when another client has changed the policy."""
        self.strays = 0
        """Tokens and ends that came for a request which had ended: an engine's mistake, never expected."""
        self._connection = connection
        self._endpoint, self._name, self._timeout = endpoint, name, timeout
        self._requests = itertools.count()
        self._answers: dict[int, Answer] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._ended: ProtocolError | None = None
        self._lost = asyncio.Event()

    @staticmethod
    @asynccontextmanager
    async def connect(endpoint: str, *, name: str = "", timeout: float = 5.0) -> AsyncIterator[Client]:
        """A client for the length of the block; an engine that is starting is waited for.

        Raises EngineGone where nobody answers within `timeout` seconds, VersionMismatch where the engine
        speaks another version, ProtocolError for an endpoint that is not ipc://.
        """
        async with open_connection(endpoint, name, timeout) as connection:
            client = Client(connection, endpoint, name, timeout)
            receiver = asyncio.create_task(client._receive(), name=f"receiver from {endpoint}")
            try:
                yield client
            finally:
                try:
                    client._close()
                finally:
                    await end_task(receiver)

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
    ) -> Answer:
        """Ask for an answer to exactly one of `prompt`, `token_ids`, `messages`; the request is sent at once.

        Raises EngineGone, and MalformedMessage for values of a wrong type. What the engine refuses is
        raised by the answer.
        """
        request = self._next_request()
        answer = Answer(self._connection, request)
        self._connection.send(
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
            )
        )
        self._answers[request] = answer
        return answer

    async def score(
        self,
        *,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
        stepwise: bool = False,
        prefill: int = 1,
        full: bool = False,
    ) -> AsyncGenerator[Scores, None]:
        """Log-probabilities of exactly one of `text`, `token_ids`, block by block; see messages.Score.

        Ends when all have come. Leaving the loop before cancels the request. Raises RequestFailed with the
        engine's reason, or where the engine cancelled the request; EngineGone, MalformedMessage.
        """
        request = self._next_request()
        ids = None if token_ids is None else tuple(token_ids)
        async with open_connection(
            self._endpoint, f"{self._name}/score", self._timeout, receive_hwm=SCORES_HWM
        ) as connection:
            connection.send(Score(request, text, ids, stepwise, prefill, full))
            try:
                while True:
                    match await connection.receive():
                        case Scores(request=its) as block if its == request:
                            yield block
                        case Done(request=its, reason=reason) as done if its == request:
                            if reason == "error":
                                raise RequestFailed(done.error, done.usage)
                            if reason == "cancelled":
                                raise RequestFailed("the engine gave this request up; it is shutting down")
                            return
                        case Error(request=its, text=error) if its == request:
                            raise RequestFailed(error, usage=True)
            except ProtocolError:
                raise  # the request has ended, or the engine has
            except BaseException:  # the caller left the loop or was cancelled
                connection.cancel(request)
                raise

    async def stats(self) -> dict[str, Any]:
        """The engine's counters. Raises RequestFailed, EngineGone."""
        reply: StatsReply = await self._ask(Stats(self._next_request()), REPLY_SECONDS)
        return reply.stats

    async def set_policy(self, name: str, options: dict[str, str] | None = None) -> PolicyChanged:
        """Change the engine's policy for everybody. Raises RequestFailed with the engine's reason where it
        is unknown or cannot be had, EngineGone."""
        asked = SetPolicy(self._next_request(), name, dict(options or {}))
        reply: PolicyChanged = await self._ask(asked, POLICY_SECONDS)
        return reply

    async def lost(self) -> ProtocolError:
        """Wait until the engine is gone; returns what every call raises from then on."""
        await self._lost.wait()
        assert self._ended is not None
        return _another(self._ended)

    def _next_request(self) -> int:
        if self._ended is not None:
            raise _another(self._ended)
        return next(self._requests)

    async def _ask(self, message: Stats | SetPolicy, limit: float) -> Any:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._connection.send(message)
        self._replies[message.request] = reply
        try:
            async with asyncio.timeout(limit):
                return await reply
        except TimeoutError:
            asked = type(message).__name__
            raise RequestFailed(f"the engine did not answer {asked} in {limit:g} s") from None
        finally:
            del self._replies[message.request]

    async def _receive(self) -> None:
        try:
            while True:
                self._dispatch(await self._connection.receive())
        except ProtocolError as e:
            self._end(e)
        except Exception as e:
            self._end(EngineGone(f"this client failed: {e!r}"))
            raise  # by `connect`, when the block ends

    def _dispatch(self, message: object) -> None:
        """Give a message to whoever asked. What belongs to no request (any more) is dropped."""
        match message:
            case Token(request=request) | Queued(request=request) if answer := self._answers.get(request):
                answer.take(message)
            case Done(request=request) if answer := self._answers.pop(request, None):
                answer.take(message)
            case Error(request=request, text=text) if answer := self._answers.pop(request, None):
                answer.take(RequestFailed(text, usage=True))
            case StatsReply(request=request) | PolicyChanged(request=request) if request in self._replies:
                self._settle(request, message, None)
            case Error(request=request, text=text) if request in self._replies:
                self._settle(request, None, RequestFailed(text, usage=True))
            case PolicyChanged(request=-1) if self.on_policy is not None:
                # An error in the callback is the event loop's to report, not the end of this receiver.
                asyncio.get_running_loop().call_soon(self.on_policy, message)
            case Token() | Done() | Queued():
                self.strays += 1

    def _settle(self, request: int, reply: object, failure: ProtocolError | None) -> None:
        future = self._replies[request]
        if future.done():  # given up by its caller in this very moment
            return
        if failure is not None:
            future.set_exception(failure)
        else:
            future.set_result(reply)

    def _end(self, reason: ProtocolError) -> None:
        """Fail everything that waits, and all later calls."""
        if self._ended is not None:
            return
        self._ended = reason
        self._lost.set()
        for answer in self._answers.values():
            answer.take(_another(reason))
        self._answers.clear()
        for request in self._replies:
            self._settle(request, None, _another(reason))

    def _close(self) -> None:
        """Leave nothing running in the engine for a client that goes."""
        if self._ended is None:
            for request in self._answers:
                self._connection.cancel(request)
            self._end(EngineGone("this client is closed"))


def _another(error: ProtocolError) -> ProtocolError:
    """The same error to raise in one more place: an exception object belongs to one traceback."""
    return type(error)(str(error))
