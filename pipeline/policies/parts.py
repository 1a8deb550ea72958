"""Helpers of several parts of policies: the room of a cache, and the most counted experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.policies.calibration import Calibration
from pipeline.policies.view import ModelShape, View

Counts = NDArray[np.int64]  # [L, E] rows routed to each expert
ENOUGH_TOKENS = 256  # that were counted, for a comparison of counts
DIFFERENT = 0.85  # of the hits of its own text a placement has on text that routes differently, at most


@dataclass(frozen=True)
class Room:
    """What a replacement's cache holds at most."""

    experts: int  # over all layers
    kept: Sequence[int]  # [L] leading tiles of each cached expert
    sizes: Sequence[int] | None = None  # [L] experts of each layer, in all at most `experts`; None: any


def whole_experts(shape: ModelShape, capacity: int) -> int:
    """How many whole experts a cache of `capacity` tiles holds."""
    return min(capacity // shape.tiles, shape.layers * shape.experts)


def whole_room(shape: ModelShape, tiles: int) -> Room:
    """That of a cache of whole experts, without sizes of layers."""
    return Room(tiles // shape.tiles, [shape.tiles] * shape.layers)


def cacheable(view: View) -> int:
    """The capacity, in tiles, but for what is more than all experts."""
    shape = view.shape
    return min(view.capacity, shape.layers * shape.experts * shape.tiles)


def evenly(layers: int, budget: int) -> list[int]:
    """`budget` experts divided evenly over the layers, the remainder to the first layers."""
    each, left = divmod(budget, layers)
    return [each + (layer < left) for layer in range(layers)]


def most_counted(counts: NDArray[np.int64], sizes: Sequence[int]) -> NDArray[np.bool_]:
    """The sizes[l] most counted experts of each layer, of counts [L, E]. Ties go to the smaller index."""
    # a stable sort of the negated counts keeps equal ones in index order
    order = np.argsort(-counts, axis=1, kind="stable")
    chosen = np.zeros(counts.shape, dtype=bool)
    for layer, size in enumerate(sizes):
        chosen[layer, order[layer, :size]] = True
    return chosen


def evenly_counted(counts: NDArray[np.int64], budget: int) -> NDArray[np.bool_]:
    """`budget` experts of counts [L, E]: the same number in every layer, the most counted ones; the remainder
    (fewer than L) goes to the next most counted anywhere. Ties go to the first layer and expert."""
    layers = len(counts)
    each, left = divmod(budget, layers)
    chosen = most_counted(counts, [each] * layers)
    rest = np.flatnonzero(~chosen)
    by_count = np.argsort(-counts.ravel()[rest], kind="stable")
    chosen.ravel()[rest[by_count[:left]]] = True
    return chosen


def counted_tokens(counts: Counts, top_k: int) -> int:
    """The tokens that counts [L, E] are of."""
    return int(counts[0].sum()) // top_k


def placed_share(used: Counts, counts: Counts, experts: int) -> float:
    """The share of `counts` that `evenly_counted(used, experts)` holds: the hits of that placement."""
    return float(counts[evenly_counted(used, experts)].sum() / max(counts.sum(), 1))


@dataclass(frozen=True)
class TextComparison:
    """Hits of a calibration's most used experts: `prompts`, of what its own text's prompts used, because the
    placement counted the decoded tokens; `engine`, of what the tokens used that the engine has computed."""

    prompts: float
    engine: float

    @classmethod
    def of(cls, calibration: Calibration, popularity: Counts, experts: int) -> TextComparison:
        """With this many experts placed."""
        used = calibration.decode_counts
        return cls(
            placed_share(used, calibration.prefill_counts, experts), placed_share(used, popularity, experts)
        )

    @property
    def differs(self) -> bool:
        """Whether the two route differently enough for a warning."""
        return self.engine <= DIFFERENT * self.prompts


def other_text_note(view: View) -> tuple[str, ...]:
    """A note where the calibration's most used experts serve the tokens that this engine has computed clearly
    worse than the calibration's own text."""
    shape, calibration = view.shape, view.calibration
    experts = whole_experts(shape, view.capacity)
    tokens = counted_tokens(view.popularity, shape.top_k)
    if calibration is None or not 0 < experts < shape.layers * shape.experts or tokens < ENOUGH_TOKENS:
        return ()
    hits = TextComparison.of(calibration, view.popularity, experts)
    if not hits.differs:
        return ()
    return (
        f"the calibration's text routes differently from the {tokens} tokens that this engine has computed:"
        f" the experts placed by it are {100 * hits.engine:.0f}% of those used here,"
        f" {100 * hits.prompts:.0f}% of those used by its own prompts; calibrate on text of the kind that you"
        " run",
    )


def unused_tiles_note(name: str, view: View) -> tuple[str, ...]:
    """A note where a preset of whole experts must leave tiles of the cache empty."""
    shape = view.shape
    unused = view.capacity - whole_experts(shape, view.capacity) * shape.tiles
    if unused == 0 or view.capacity >= shape.layers * shape.experts * shape.tiles:
        return ()
    return (
        f"{name}: {unused} of the cache's {view.capacity} tiles stay empty, because it keeps whole experts "
        f"and an expert has {shape.tiles} tiles",
    )
