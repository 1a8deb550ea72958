"""What requests share in the gateway, so that no API key shuts out the others: the event loop's time, the
memory of bodies that are read, and the places of requests whose bodies are complete. Without keys all are one
client, and so are with keys all requests that have none."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pipeline.fairness import Turns
from pipeline.gateway.errors import ApiError

MOST_BYTES = 256 << 20  # of all bodies
OWN_BYTES = 4 << 20  # that a key may have where the others have taken all
MOST_CALLS = 1024  # requests at once; the engine itself decides which of them run
OWN_CALLS = 16  # that a key may have where the others have taken all places
BUSY = "the bodies and answers of requests take all the memory for them; try again later"


@dataclass(eq=False)
class Body:
    """A body that is read, or `grows` as an answer does that is sent as a whole. `limit`: of its arrival;
    None once it is complete. `ended`: its memory was needed."""

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
            victim.ended = True
            if victim.limit is not None:
                victim.limit.reschedule(asyncio.get_running_loop().time())
            self._remove(victim)

    def _victim(self, least: int) -> Body | None:
        """Returns the oldest incomplete body of the key with most bytes, None where no key with `least` bytes
        has one."""
        incomplete = [
            body for body in self._bodies if (body.limit or body.grows) and self._bytes[body.key] >= least
        ]
        return max(incomplete, key=lambda body: self._bytes[body.key], default=None)

    def _remove(self, body: Body) -> None:
        if body in self._bodies:
            del self._bodies[body]
            self._bytes[body.key] -= body.size


class Starts:
    """The beginnings of requests: one in a turn of the event loop, accounts in turn. Many small requests then
    cost the tokens of answers, which need some turns each, one of them and not as many as there are
    connections. Used by the event loop."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, deque[asyncio.Future[None]]] = {}  # by account, no queue empty
        self._turns = Turns()
        self._busy = False  # one has begun in this turn of the loop

    async def wait(self, account: str) -> None:
        """Wait until a request of this account may begin."""
        if not self._busy:
            self._busy = True
            asyncio.get_running_loop().call_soon(self._next)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(account.encode(), deque()).append(turn)
        await turn

    def _next(self) -> None:
        while self._waiting:
            account = self._turns.next(self._waiting)
            turn = self._waiting[account].popleft()
            if not self._waiting[account]:
                del self._waiting[account]
            if not turn.done():  # by its task's end
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._busy = False


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
