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

With `retry`, a client survives its engine: it waits for another at the same address, of the same model, and
asks it for what is missing. An answer then goes on where it was, after a pause. It is what it would have been
without (to rounding) where it is greedy or seeded; otherwise its rest is drawn anew, as good a sample.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from protocol.answer import Answer
from protocol.connection import end_task
from protocol.errors import EngineGone, ProtocolError, RequestFailed
from protocol.keys import Address
from protocol.link import Link
from protocol.messages import (
    Calibrate,
    Calibrated,
    Calibrating,
    ChatMessage,
    Generate,
    PolicyChanged,
    Sampling,
    Score,
    Scores,
    SetPolicy,
    Stats,
    StatsReply,
    Welcome,
)
from protocol.pending import Pending, another
from protocol.scoring import scored

REPLY_SECONDS = 60.0  # for Stats, which wait for no other request
POLICY_SECONDS = 900.0  # for SetPolicy, which may place many gigabytes and measure costs


class Client:
    """A connection to an engine. Once the engine is gone, every pending and later call raises EngineGone."""

    def __init__(self, address: Address, name: str, timeout: float, retry: float) -> None:
        """For `connect`."""
        self.on_policy: Callable[[PolicyChanged], None] | None = None
        """Called in the event loop when another client has changed the policy."""
        self.on_pause: Callable[[ProtocolError], None] | None = None
        """Called in the event loop with the reason when the connection was lost and a new one is tried."""
        self.on_reconnect: Callable[[], None] | None = None
        """Called in the event loop when there is one, and all that was under way has been asked for again."""
        self._endpoint = address.endpoint
        self._address, self._name, self._timeout, self._retry = address, name, timeout, retry
        self._link = Link(address, name, timeout, retry, paused=self._paused, resumed=self._resumed)
        self._pending = Pending(self._link)
        self._requests = itertools.count()
        self._ended: ProtocolError | None = None
        self._lost = asyncio.Event()

    @staticmethod
    @asynccontextmanager
    async def connect(
        where: str | Address, *, name: str = "", timeout: float = 5.0, retry: float = 0.0
    ) -> AsyncIterator[Client]:
        """A client for the length of the block; an engine that is starting is waited for, and one that is
        gone, for `retry` seconds.

        Raises EngineGone where nobody answers within `timeout` seconds, VersionMismatch where the engine
        speaks another version, ProtocolError for an endpoint that cannot be used.
        """
        client = Client(Address(where) if isinstance(where, str) else where, name, timeout, retry)
        await client._link.open()
        try:
            receiver = asyncio.create_task(client._receive(), name=f"receiver from {client._endpoint}")
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
    def welcome(self) -> Welcome:
        """What the engine said it is; of the latest one, where there were several."""
        return self._link.welcome

    @property
    def strays(self) -> int:
        """Tokens and ends that came for a request which had ended: an engine's mistake, never expected."""
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
    ) -> Answer:
        """Ask for an answer to exactly one of `prompt`, `token_ids`, `messages`; the request is sent at once.

        Raises EngineGone, and MalformedMessage for values of a wrong type. What the engine refuses is
        raised by the answer.
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
    ) -> AsyncGenerator[Scores, None]:
        """Log-probabilities of exactly one of `text`, `token_ids`, block by block; see messages.Score.

        Ends when all have come. Leaving the loop before cancels the request. Raises RequestFailed with the
        engine's reason, or where the engine cancelled the request; EngineGone, MalformedMessage.
        """
        ids = None if token_ids is None else tuple(token_ids)
        asked = Score(self._next_request(), text, ids, stepwise, prefill, full)
        blocks = scored(asked, self._address, f"{self._name}/score", self._timeout, self._retry, self.welcome)
        async with aclosing(blocks):
            async for block in blocks:
                yield block

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

    async def calibrate(
        self,
        *,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
        tokens: int = Calibrate.tokens,
        on_progress: Callable[[Calibrating], None] | None = None,
    ) -> Calibrated:
        """Have the engine calibrate its model on exactly one of `text`, `token_ids`, at most so many `tokens`
        of it; nobody else is served meanwhile, and it may take many minutes. Where the engine dies and the
        client goes on with another, it begins again. A caller that waits no longer ends it. Raises
        RequestFailed with the engine's reason, EngineGone, MalformedMessage."""
        ids = None if token_ids is None else tuple(token_ids)
        asked = Calibrate(self._next_request(), text, ids, tokens)
        calibrated: Calibrated = await self._pending.ask(asked, on_progress)
        return calibrated

    async def lost(self) -> ProtocolError:
        """Wait until the engine is given up; returns what every call raises from then on."""
        await self._lost.wait()
        assert self._ended is not None
        return another(self._ended)

    def _next_request(self) -> int:
        if self._ended is not None:
            raise another(self._ended)
        return next(self._requests)

    async def _ask(self, message: Stats | SetPolicy, limit: float) -> Any:
        limit += self._retry
        try:
            async with asyncio.timeout(limit):
                return await self._pending.ask(message)
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
            raise  # by `connect`, when the block ends

    def _dispatch(self, message: object) -> None:
        match message:
            case PolicyChanged(request=-1):
                if self.on_policy is not None:
                    # An error in a callback is the event loop's to report, not the end of this receiver.
                    asyncio.get_running_loop().call_soon(self.on_policy, message)
            case _:
                self._pending.dispatch(message)

    def _paused(self, lost: ProtocolError) -> None:
        self._pending.lose_engine()
        if self.on_pause is not None:
            asyncio.get_running_loop().call_soon(self.on_pause, lost)

    async def _resumed(self) -> None:
        await self._pending.ask_again()
        if self.on_reconnect is not None:
            asyncio.get_running_loop().call_soon(self.on_reconnect)

    def _end(self, reason: ProtocolError) -> None:
        """Fail everything that waits, and all later calls."""
        if self._ended is None:
            self._ended = reason
            self._lost.set()
            self._pending.fail(reason)

    def _close(self) -> None:
        """Leave nothing running in the engine for a client that goes."""
        if self._ended is None:
            self._pending.cancel_all()
            self._end(EngineGone("this client is closed"))
