"""What a replay's link has to move, and what predictions are still worth counting."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.counters import PrefetchedTiles
from pipeline.replay.outcome import PhaseOutcome

Key = tuple[int, int]  # layer, expert


@dataclass(slots=True, eq=False)
class Order:
    """Tiles [lo, lo + count) of an expert, moved in the background."""

    key: Key
    lo: int
    count: int
    predicted: PhaseOutcome | None  # count a prediction's landings
    ordered_at: float  # time of the order
    started: int = 0  # tiles that have begun to move
    cancelled: bool = False


@dataclass(slots=True)
class Prediction:
    """As in the mover: a predicted expert that is kept and was not used yet."""

    counters: PhaseOutcome  # of the phase that predicted it
    number: int  # in the order in which predictions were made
    unused: PrefetchedTiles = field(default_factory=PrefetchedTiles)
    ordered: bool = False  # an order of it was made
