"""The interface of what carries Work to the workers of a pool and their answers back: `peers.py` over ZeroMQ,
`ring_exchange.py` through shared memory."""

from __future__ import annotations

from typing import Protocol

from pipeline.device import Fence
from protocol.messages import Abandon, Partial, Work


class WorkerExchange(Protocol):
    """Used by the engine's thread alone."""

    def wait_ready(self, count: int, limit: float) -> None:
        """Wait until `count` workers have announced themselves. Raises PeerLost after `limit` seconds."""

    def is_up(self, index: int) -> bool:
        """The worker runs and was marked up."""

    def mark_up(self, index: int, incarnation: int) -> None:
        """Mark this incarnation up, and report that to the supervisor, unless it has exited meanwhile."""

    def report_hung(self, index: int) -> None:
        """Report to the supervisor, which kills it, a worker that has work and makes no progress."""

    def send(self, index: int, message: Work | Abandon) -> None:
        """Send to a worker, which may notice it only after `flush`; dropped where it has exited (`receive`
        delivers that). Large arrays must not change until its answer. Raises PeerLost where a running worker
        takes no message for too long."""

    def announce(self) -> int | None:
        """A layer's Works follow in a moment: wake the workers, where that takes time, but for one that
        sleeps on this thread's core. The index of that one, where it is known."""

    def flush(self) -> None:
        """Wake the workers to which messages were sent."""

    def receive(self, wait_ms: int) -> list[tuple[int, object]]:
        """Messages as (index, message): Partial, WorkFailed, and in order among them the Ready of each new
        worker and the WorkerDied of each that exited; waits at most `wait_ms` for the first. Raises PeerLost
        where the engine cannot continue."""

    def release(self, index: int, partial: Partial, fence: Fence) -> None:
        """The y of a Partial of this worker, which may be memory that the worker will write again, is not
        read any more once the device has passed the fence; None where it is not read by the device."""
