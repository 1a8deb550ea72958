"""What requests share in the gateway, so that no API key shuts out the others: the event loop's time, the
memory of bodies that are read, and the places of requests whose bodies are complete. Without keys all are one
client, and so are with keys all requests that have none."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pipeline.fairness import Turns
from pipeline.gateway.errors import ApiError

MOST_BYTES = 256 << 20  # of all bodies
OWN_BYTES = 4 << 20  # that a key may have where the others have taken all
MOST_CALLS = 1024  # requests at once; the engine itself decides which of them run
OWN_CALLS = 16  # that a key may have where the others have taken all places
PACE = 0.004  # seconds from one beginning without a key to the next
COSTLY = 0.004  # seconds of a core; bodies of a few kB take a tenth of it
PAUSES = 4.0  # times what a costly body took
MOST_PAUSE = 1.0  # seconds
BUSY = "the bodies and answers of requests take all the memory for them; try again later"
T = TypeVar("T")


@dataclass(eq=False)
class Body:
    """A body that is read, or `grows` as an answer does, of which something waits. `limit`: of its arrival,
    None once it is complete; or of sending it, once that has begun. `ended`: its memory was needed."""

    key: str
    grows: bool = False
    size: int = 0
    limit: asyncio.Timeout | None = None
    ended: bool = False


class Bodies:
    """The bodies in memory, also complete ones until they are decoded, and answers that become large. Where
    there are too many bytes, the key that has most of them loses its oldest incomplete one. Used by the event
    loop."""

    def __init__(self, most: int = MOST_BYTES, own: int = OWN_BYTES) -> None:
        self._most, self._own = most, own
        self._bytes: Counter[str] = Counter()  # by key
        self._bodies: dict[Body, None] = {}  # the oldest first

    @contextmanager
    def one(self, key: str, *, grows: bool = False) -> Iterator[Body]:
        """A body of this key, which counts within the block."""
        body = Body(key, grows)
        self._bodies[body] = None
        try:
            yield body
        finally:
            self._remove(body)

    def grow(self, body: Body, size: int) -> None:
        """Count bytes that have arrived. Raises ApiError where there is no memory for them."""
        if body.ended:
            raise ApiError(429, BUSY)
        body.size += size
        self._bytes[body.key] += size
        while self._bytes.total() > self._most:
            victim = self._victim(self._bytes[body.key])
            if self._bytes[body.key] <= self._own and (victim is None or victim.key == body.key):
                return
            if victim is None or victim is body:
                raise ApiError(429, BUSY)
            self.end(victim)

    def end(self, body: Body) -> None:
        """End one, whose memory is needed."""
        body.ended = True
        if body.limit is not None and not body.limit.expired():  # it may be about to end by itself
            body.limit.reschedule(asyncio.get_running_loop().time())
        self._remove(body)

    def shrink(self, body: Body, size: int) -> None:
        """Count bytes that were sent, or are kept no longer."""
        if not body.ended:
            body.size -= size
            self._bytes[body.key] -= size

    def _victim(self, least: int) -> Body | None:
        """Returns the oldest incomplete body of the key with most bytes, None where no key with `least` bytes
        has one. Small ones, of which there may be many, are left alone."""
        incomplete = [
            body
            for body in self._bodies
            if (body.limit or body.grows) and body.size > self._most >> 10 and self._bytes[body.key] >= least
        ]
        return max(incomplete, key=lambda body: self._bytes[body.key], default=None)

    def _remove(self, body: Body) -> None:
        if body in self._bodies:
            del self._bodies[body]
            self._bytes[body.key] -= body.size


class Places:
    """The places of requests that are computed, or wait for that. Used by the event loop."""

    def __init__(self, most: int = MOST_CALLS, own: int = OWN_CALLS) -> None:
        self._most, self._own = most, own
        self._taken: Counter[str] = Counter()  # by key

    def take(self, key: str) -> None:
        """Take a place. Raises ApiError where all are taken and the key has its own share of them."""
        if self._taken.total() >= self._most and self._taken[key] >= self._own:
            raise ApiError(429, f"{self._most} requests are running; try again later")
        self._taken[key] += 1

    def leave(self, key: str) -> None:
        """Give a place back."""
        self._taken[key] -= 1

    def beside(self, key: str) -> bool:
        """Returns whether a request of another API key has a place."""
        return self._taken.total() > self._taken[key] + (self._taken[""] if key else 0)


class Line:
    """Requests that wait for their turns, the first one first. One whose client goes is out of it. Used by
    the event loop."""

    def __init__(self, unused: Callable[[], None] = lambda: None) -> None:
        """`unused`: called where a request is cancelled that has just been given its turn."""
        self._unused = unused
        self._turns: dict[asyncio.Future[bool], None] = {}

    async def wait(self, gone: asyncio.Future[None]) -> None:
        """Wait for a turn. `gone`: done once the client is. Raises ConnectionError where it goes before."""
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._turns[turn] = None

        def leave(_: object) -> None:
            if not turn.done():
                turn.set_result(False)

        gone.add_done_callback(leave)
        try:
            if not await turn:
                raise ConnectionResetError
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.result():
                self._unused()
            raise
        finally:
            gone.remove_done_callback(leave)
            self._turns.pop(turn, None)

    def next(self) -> bool:
        """Give the first one its turn. Returns False where none waits."""
        while self._turns:
            turn = next(iter(self._turns))
            del self._turns[turn]
            if not turn.done():
                turn.set_result(True)
                return True
        return False

    def __bool__(self) -> bool:
        return bool(self._turns)


class Starts:
    """The beginnings of requests: one in a turn of the event loop, accounts in turn. Many small requests then
    cost the tokens of answers, which need some turns each, one of them and not as many as there are
    connections. While requests with a key are computed, those without one begin `pace` seconds apart. Used by
    the event loop."""

    def __init__(self, places: Places, pace: float = PACE) -> None:
        self._places, self._pace = places, pace
        self._lines: dict[bytes, Line] = {}  # by account
        self._turns = Turns()
        self._busy = False  # one has begun in this turn of the loop
        self._paced = False  # one without a key has begun less than `pace` ago

    async def wait(self, account: str, gone: asyncio.Future[None]) -> None:
        """Wait until a request of this account may begin. `gone`: done once its client is. Raises
        ConnectionError where that is before."""
        name = account.encode()
        if self._busy or self._lines.get(name) or not self._may(name):
            await self._lines.setdefault(name, Line()).wait(gone)
        else:
            self._begin(name)

    def _may(self, name: bytes) -> bool:
        return bool(name) or not self._paced or not self._places.beside("")

    def _begin(self, name: bytes) -> None:
        loop = asyncio.get_running_loop()
        self._busy = True
        self._turns.take(name)
        loop.call_soon(self._next)
        if not name and not self._paced and self._places.beside(""):
            self._paced = True
            loop.call_later(self._pace, self._unpace)

    def _unpace(self) -> None:
        self._paced = False
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = False
        while not self._busy and (waiting := [name for name in self._lines if self._may(name)]):
            name = self._turns.order(waiting)[0]
            if self._lines[name].next():
                self._begin(name)
            if not self._lines[name]:
                del self._lines[name]


class Decoding:
    """Bodies become requests in threads, one of each key at a time. Nothing else runs in this process while
    JSON is decoded, so after a costly body the next one of its key waits while other keys' requests are
    computed. Used by the event loop."""

    def __init__(self, places: Places, spent: Callable[[], float] = time.thread_time) -> None:
        """`spent`: seconds of a core that the calling thread has taken."""
        self._places, self._spent = places, spent
        self._lines: dict[str, Line] = {}  # by key that has a body in a thread, or has to wait after one

    async def run(self, key: str, work: Callable[[], T], gone: asyncio.Future[None]) -> T:
        """Returns the result of `work`, which decodes a body of this key. `gone`: done once its client is.
        Raises ConnectionError where that is before its turn."""
        if key in self._lines:
            await self._lines[key].wait(gone)
        else:
            self._lines[key] = Line(partial(self._next, key))
        cost = 0.0

        def timed() -> T:
            nonlocal cost
            began = self._spent()
            try:
                return work()
            finally:
                cost = self._spent() - began

        try:
            return await asyncio.to_thread(timed)
        finally:
            if cost > COSTLY and self._places.beside(key):
                pause = min(cost * PAUSES, MOST_PAUSE)
                asyncio.get_running_loop().call_later(pause, self._next, key)
            else:
                self._next(key)

    def _next(self, key: str) -> None:
        if not self._lines[key].next():
            del self._lines[key]
