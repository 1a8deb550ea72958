"""The host's side of a layer, as the engine sees it: processes of their own (`worker_pool.py`) or the
coordinator itself (`own_cores.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pipeline.arrays import FloatArray, Phase
from pipeline.experts.host_shards import HostShard
from pipeline.experts.shares import HostShare

Ticket = Any  # a pool's own: has `runs`, without which there is no result, and `busy`, seconds of computing


class HostPool(Protocol):
    """Computes the host's share of layers. Used by the engine's thread alone."""

    workers: int

    def wait_ready(self, limit: float) -> None:
        """Return when it can take shares. Raises PeerLost after `limit` seconds."""

    def submit(self, layer: int, share: HostShare, x: FloatArray, phase: Phase) -> Ticket:
        """Begin a share and return at once. x: float32 [R, H], unchanged until `result`."""

    def submit_shards(self, layer: int, runs: Sequence[HostShard], x: FloatArray) -> Ticket:
        """The same for runs, at most one for each worker."""

    def result(self, ticket: Ticket) -> FloatArray:
        """The sum of the ticket's runs: float32 [R, H]. Raises ShardFailed, PeerLost."""

    def abandon(self, ticket: Ticket) -> None:
        """Nobody will ask for its result."""

    def update(self, wait_ms: int) -> bool:
        """Take in what has come, and who came or died; True if there was anything."""
