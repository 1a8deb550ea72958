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

from pipeline.scheduling.jobs import NO_KEY, Job
from protocol.messages import Calibrate, Done, Error, Generate, Score, SetPolicy
from shm.control import ControlSegment

MOST_CRASHES = 2
ALONE_STEPS = 32  # of a suspect's decoding, after which it counts as innocent


def key_of(message: object) -> int:
    """Returns the key of a request: an int64; NO_KEY of a message that has nothing computed."""
    if not isinstance(message, Generate | Score | Calibrate | SetPolicy):
        return NO_KEY
    asked = replace(message, request=0, resume=()) if isinstance(message, Generate) else message
    packed = type(message).__name__.encode() + msgspec.msgpack.encode(replace(asked, request=0))
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), signed=True)


class Suspects:
    """Used by the engine's thread alone."""

    def __init__(self, control: ControlSegment, crashes: dict[int, int]) -> None:
        """`crashes`: of earlier coordinators, by the requests that they were computing."""
        self._control = control
        self._crashes = crashes
        self._computing: list[list[int]] = []  # now, and what goes on behind that
        self.stepping = False  # what has begun last is a step

    def refusal(self, message: object) -> Done | Error | None:
        """Returns the refusal of a request that was being computed at too many crashes; None of others."""
        if not self._crashes or (crashes := self._crashes.get(key_of(message), 0)) < MOST_CRASHES:
            return None
        text = f"the engine crashed {crashes} times while it was computing this request"
        text += "; it is not computed again before the engine is started anew"
        if isinstance(message, SetPolicy):
            return Error(message.request, text)
        assert isinstance(message, Generate | Score | Calibrate)
        return Done(message.request, "error", text, usage=True)

    @contextmanager
    def handling(self, message: object) -> Iterator[None]:
        """Note that a message is being handled; a request is computed meanwhile, or queued."""
        key = key_of(message)
        self._begin([key])
        yield
        self.end()
        if not isinstance(message, Generate | Score):
            self._crashes.pop(key, None)

    @contextmanager
    def computing(self, jobs: Sequence[Job]) -> Iterator[None]:
        """Note that these jobs are being computed. What ends by an exception that ends the engine's thread
        stays written."""
        self._begin([job.key for job in jobs])
        self.stepping = True
        yield
        self.end()

    def end(self) -> None:
        """Note that what began last has ended."""
        self._computing.pop()
        self.stepping = False
        self._write()

    def add(self, job: Job, message: Generate | Score) -> None:
        """Set what a new job is known by."""
        job.key = key_of(message)
        job.alone_steps = ALONE_STEPS if job.key in self._crashes else 0

    def apart(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Returns the jobs of each decode step: suspects alone, all others together."""
        together = [job for job in jobs if not job.alone_steps]
        return [together] * bool(together) + [[job] for job in jobs if job.alone_steps]

    def count_step(self, job: Job) -> None:
        """Count a step that went well."""
        if job.alone_steps and (job.reason not in (None, "error") or not job.prefilling):
            job.alone_steps = 0 if job.reason is not None else job.alone_steps - 1
            if not job.alone_steps:
                self._crashes.pop(job.key, None)

    def _begin(self, keys: list[int]) -> None:
        self._computing.append(keys)
        self._write()

    def _write(self) -> None:
        keys = self._computing[-1] if self._computing else []
        self._control.requests = [(key, self._crashes.get(key, 0)) for key in keys if key != NO_KEY]
