"""The host's side of a layer, as the engine sees it: processes of their own (`worker_pool.py`) or the
coordinator itself (`inline_pool.py`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from pipeline.arrays import FloatArray, Phase
from pipeline.experts.host_shards import HostShard
from pipeline.experts.shares import HostShare


class Ticket(Protocol):
    """A layer's host share that a pool has accepted."""

    busy: float  # seconds that the slowest worker computed; known once there is a result

    @property
    def shards(self) -> Collection[object]:
        """Its shards; without any the result is zeros."""

    def result(self) -> FloatArray:
        """Wait for the partial sums and add them in shard order: float32 [R, H]. Raises ShardFailed where a
        shard cannot be computed, PeerLost where the engine is to end."""

    def abandon(self) -> None:
        """Cancel it: its result will not be asked for."""


class HostPool(Protocol):
    """Computes the host's share of layers. Used by the engine's thread alone."""

    workers: int

    def wait_ready(self, limit: float) -> None:
        """Return when the pool accepts shares. Raises PeerLost after `limit` seconds."""

    def submit(self, layer: int, share: HostShare, x: FloatArray, phase: Phase) -> Ticket:
        """Begin a share and return at once. x: float32 [R, H], unchanged until the ticket's result."""

    def submit_shards(self, layer: int, shards: Sequence[HostShard], x: FloatArray) -> Ticket:
        """The same for shards, at most one for each worker."""

    def update(self, wait_ms: int) -> bool:
        """Handle the workers' messages, starts and exits; False if nothing has arrived."""
