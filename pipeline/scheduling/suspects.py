"""Requests that may crash the coordinator. What it computes is written into the control segment; after a
crash the supervisor gives it to the next coordinator. A request that was being computed at a crash is then
computed alone, so that another crash has one cause; one that was at two is refused, whoever sends it again.

A request's key is made from what it asks for, without its number and what a client has of its answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from pipeline.errors import RequestError
from protocol.messages import Calibrate, Generate, Score, SetPolicy
from shm.control import ControlSegment

MOST_CRASHES = 2
ALONE_STEPS = 32  # of a suspect, after which it counts as innocent
NO_KEY = 0


def key_of(message: Generate | Score | Calibrate | SetPolicy) -> int:
    """Returns the key of a request: an int64."""
    if isinstance(message, Generate):
        message = replace(message, resume=())
    asked = type(message).__name__.encode() + msgspec.msgpack.encode(replace(message, request=0))
    return int.from_bytes(blake2b(asked, digest_size=8).digest(), signed=True)


class Suspects:
    """Used by the engine's thread alone."""

    def __init__(self, control: ControlSegment, crashes: dict[int, int]) -> None:
        """`crashes`: of earlier coordinators, by the requests that they were computing."""
        self._control = control
        self._crashes = crashes

    def check(self, key: int) -> None:
        """Raises RequestError for a request that was being computed at too many crashes."""
        if (crashes := self._crashes.get(key, 0)) >= MOST_CRASHES:
            reason = f"the engine crashed {crashes} times while it was computing this request"
            raise RequestError(f"{reason}; it is not computed again before the engine is started anew")

    def __contains__(self, key: int) -> bool:
        """Returns whether this request has to be computed alone."""
        return key in self._crashes

    def clear(self, key: int) -> None:
        """Note that this request has been computed without a crash."""
        self._crashes.pop(key, None)

    @contextmanager
    def computing(self, keys: Sequence[int]) -> Iterator[None]:
        """Write down that these requests are being computed. What ends by an exception stays written: the
        engine's thread ends by it."""
        before = self._control.requests
        self._control.requests = [(key, self._crashes.get(key, 0)) for key in keys if key != NO_KEY]
        yield
        self._control.requests = before
