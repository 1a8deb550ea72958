"""The host's side of a layer, as the engine uses it: worker processes (`worker_pool.py`) or the coordinator
itself (`inline_pool.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pipeline.arrays import FloatArray, Phase
from pipeline.experts.host_shards import HostShard
from pipeline.experts.shares import HostShare

Ticket = Any  # a pool's own: has `shards`, without which there is no result, and `busy`, seconds of computing


class HostPool(Protocol):
    """Computes the host's share of layers. Used by the engine's thread alone."""

    workers: int

    def wait_ready(self, limit: float) -> None:
        """Return when it can take shares. Raises PeerLost after `limit` seconds."""

    def submit(self, layer: int, share: HostShare, x: FloatArray, phase: Phase) -> Ticket:
        """Begin a share and return at once. x: float32 [R, H], unchanged until `result`."""

    def submit_shards(self, layer: int, shards: Sequence[HostShard], x: FloatArray) -> Ticket:
        """The same for shards, at most one for each worker."""

    def result(self, ticket: Ticket) -> FloatArray:
        """The sum of the ticket's shards: float32 [R, H]. Raises ShardFailed, PeerLost."""

    def abandon(self, ticket: Ticket) -> None:
        """The ticket's result will not be asked for."""

    def update(self, wait_ms: int) -> bool:
        """Process the messages that are here, starts and exits of workers among them; True if there were
        any."""
