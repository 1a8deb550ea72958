"""The interface of the pools that compute the host's share: `worker_pool.py` and `inline_pool.py`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from pipeline.arrays import FloatArray
from pipeline.coordinator_config import WorkerCores
from pipeline.device import Device
from pipeline.experts.host_shards import HostShard
from shm.mask import DENSE, Mask, Tally

if TYPE_CHECKING:
    from torch import Tensor


class Ticket(Protocol):
    """A layer's host share that a pool has accepted."""

    busy: float  # seconds that the slowest worker computed; set with the result

    @property
    def shards(self) -> Collection[object]:
        """The shards of the share; without any the result is zeros."""

    @property
    def tally(self) -> Tally:
        """Of the share's mask, after the result."""

    def result(self) -> FloatArray:
        """Wait for the partial sums and add them in shard order: float32 [R, H]. Raises ShardFailed where a
        shard cannot be computed, PeerLost where the engine cannot continue."""

    def result_on(self, device: Device) -> Tensor:
        """The same on the device, with the same bits."""

    def abandon(self) -> None:
        """Cancel the share: `result` will not be called."""


class HostPool(Protocol):
    """Computes the host's share of layers. Used by the engine's thread alone."""

    workers: int  # processes
    cores: WorkerCores  # for which shares are divided into shards

    def wait_ready(self, limit: float) -> None:
        """Return when the pool accepts shares. Raises PeerLost after `limit` seconds."""

    def announce(self) -> None:
        """A layer's share is probably submitted in a moment."""

    def submit(
        self,
        layer: int,
        shards: Sequence[HostShard],
        x: FloatArray,
        waits: bool = True,
        mask: Mask = DENSE,
    ) -> Ticket:
        """Begin a share's shards, at most one for each worker, and return at once. x: float32 [R, H],
        unchanged until the ticket's result. `waits`: the caller only waits for the result. `mask`: of a
        format that has masks."""

    def update(self, wait_ms: int) -> bool:
        """Handle the workers' messages, starts and exits; False if nothing has arrived."""
