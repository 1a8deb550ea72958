"""What a policy sees of the work that is under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Landing(NamedTuple):
    """Tiles of one expert that are under way: its next `tiles` tiles beyond the residency."""

    expert: int
    tiles: int
    seconds: float  # from now until the last of them has landed


class Backlog(Protocol):
    """What link and host still have to do, in seconds from now by the costs in force: 0 without costs."""

    @property
    def link_seconds(self) -> float:
        """Until the link has moved everything that is ordered."""

    @property
    def host_seconds(self) -> float:
        """Until the host is free: an earlier layer's share still runs, as under early dispatch."""

    def landing(self, layer: int) -> Sequence[Landing]:
        """The layer's tiles under way, in the order in which they will land if nothing is demanded."""


class NoBacklog:
    """A `Backlog` in which nothing is under way."""

    link_seconds = host_seconds = 0.0

    def landing(self, layer: int) -> Sequence[Landing]:
        return ()
