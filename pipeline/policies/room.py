"""The room of a cache: how many whole experts it holds, which are the most counted, what is reserved for
predicted ones, and each layer's share of it, by AdapMoE's expected on-demand loads and their minimum.

E experts a layer, k a token, L layers. A cache of size t holds t of the layer's E experts, assumed to be
independent of the experts that are needed (the paper's equation 10). Sizes are whole experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from typing import Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

from pipeline.policies.calibration import Calibration, at_limits
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
    """Returns the room of a cache of whole experts, without sizes of layers."""
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
        """Compare with this many experts placed."""
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


Key = tuple[int, int]  # layer, expert


class Reserve:
    """Room for predicted experts: while a layer is computed with its own, those of later ones are fetched. Of
    an expert that the cache keeps in part, the reserve holds the other tiles."""

    def __init__(self, wanted: int, whole: int, tiles: int) -> None:
        """Room for `wanted` experts of `tiles` tiles, but at most for half of the `whole` experts that the
        cache holds."""
        self.size = min(wanted, whole // 2)  # experts without a cached tile
        self.tiles = self.size * tiles
        self.note = ""  # what does not fit
        if self.size < wanted:
            self.note = (
                f"predicted experts have half of the cache, room for {self.size} instead of {wanted}, so not"
                " all of them are prefetched"
            )
        self._free = self.tiles
        self._held: dict[int, dict[int, int]] = {}  # tiles, by layer and expert

    def take(self, wanted: Iterable[tuple[Key, int]]) -> list[Key]:
        """Hold so many tiles of these experts, as far as there is room for all of an expert's, and return
        them."""
        taken = []
        for key, tiles in wanted:
            if tiles > self._free:
                break
            self._free -= tiles
            self._held.setdefault(key[0], {})[key[1]] = tiles
            taken.append(key)
        return taken

    def holds(self, layer: int) -> bool:
        """Whether a tile of this layer is held."""
        return bool(self._held.get(layer))

    def give(self, expert: Key, tiles: int) -> bool:
        """Hold so many tiles less of this expert; False where none of it is held."""
        layer, index = expert
        held = self._held.get(layer)
        if not held or index not in held:
            return False
        given = min(tiles, held[index])
        self._free += given
        held[index] -= given
        if not held[index]:
            del held[index]
        return True

    def release(self, layer: int, needed: Collection[int] = ()) -> list[tuple[Key, int]]:
        """Hold no expert of a layer any longer but these; the others in ascending order, with the tiles that
        were held."""
        held = self._held.get(layer)
        if not held:
            return []
        released = sorted(held.keys() - set(needed))
        freed = [((layer, expert), held.pop(expert)) for expert in released]
        self._free += sum(tiles for _, tiles in freed)
        return freed


Floats = NDArray[np.float64]
Predictor = Literal["raw", "residual"]

# weight of a size's square, added to its loads: of equal loads the more even sizes win. Without prefetch the
# loads are linear in the size, and every division of the total would tie.
_EVEN = 1e-12


def expected_loads(experts: int, needed: Sequence[float], accuracy: float) -> Floats:
    """The expected on-demand loads of one layer a token, float64 [E + 1]: one for each cache size 0..E.

    `needed[j]` is the share of tokens that need j experts, `accuracy` the share of predictions that come
    true. Of j needed experts M ~ Hypergeometric(E, E - t, j) miss the cache; a right prediction has loaded
    one of them in time, so E[(M - accuracy) * 1(M >= 1)] = E[M] - accuracy * P(M >= 1) are left. For j in
    1..2 this is the paper's equations 11 to 15. Raises ValueError where `needed` counts more experts than a
    layer has."""
    if len(needed) > experts + 1:
        raise ValueError(f"{len(needed) - 1} experts cannot be needed of {experts}")
    loads = np.zeros(experts + 1)
    absent = np.arange(experts, -1, -1) / experts
    for j, share in enumerate(needed):
        loads += share * (j * absent - accuracy * (1 - _all_cached(experts, j)))
    return loads


@lru_cache(maxsize=64)
def _all_cached(experts: int, j: int) -> Floats:
    """The probability that j needed experts are all in the cache, for each size of it, [E + 1]."""
    return np.array([comb(size, j) / comb(experts, j) for size in range(experts + 1)])


def best_sizes(loads: ArrayLike, total: int) -> list[int]:
    """The sizes, one a layer, that minimise the summed loads with at most `total` experts in all: the paper's
    knapsack, equations 16 to 19. `loads` is [L, E + 1]."""
    table = np.asarray(loads, dtype=np.float64)
    layers, sizes = table.shape
    total = min(total, layers * (sizes - 1))
    best = np.zeros(total + 1)  # [j]: the least loads of the layers so far with at most j experts
    chosen = []
    for layer in range(layers):
        # [j, size]: the least loads of the earlier layers with j - size experts, inf below 0
        left = sliding_window_view(np.concatenate((np.full(sizes - 1, np.inf), best)), sizes)[:, ::-1]
        with_size = left + table[layer]
        chosen.append(with_size.argmin(axis=1))
        best = with_size.min(axis=1)
    answer = []
    for choice in reversed(chosen):
        answer.append(int(choice[total]))
        total -= answer[-1]
    return answer[::-1]


def filled(sizes: Sequence[int], experts: int, total: int) -> list[int]:
    """The sizes with the rest of `total` added, one expert at a time to the smallest layer."""
    answer = list(sizes)
    for _ in range(min(total, len(answer) * experts) - sum(answer)):
        answer[answer.index(min(answer))] += 1
    return answer


def layer_sizes(
    view: View, total: int, limits: Sequence[float], predictor: Predictor | None = "raw"
) -> list[int]:
    """AdapMoE's cache sizes, whole experts a layer, for `total` experts over all layers (all are distributed,
    as far as layers have experts).

    `limits` [L]: the share of a token's weight that the gate in force may drop, from which the calibration's
    tables have the experts that tokens keep and the accuracy of predictions, both in decode. `predictor`: the
    one to plan with, None without prefetch; the first layer has the accuracy of its trained gate, 0 without
    one. The view has a calibration."""
    shape, calibration = view.shape, view.calibration
    assert calibration is not None
    needed = at_limits(calibration.kept, limits)
    accuracy = np.zeros(shape.layers)
    if predictor is not None:
        accuracy[:] = at_limits(calibration.gated_accuracy[predictor], limits)
        first = at_limits(calibration.gated_accuracy["first"], limits)[0]
        accuracy[0] = first if calibration.first_gate is not None else 0.0
    loads = [
        expected_loads(shape.experts, share, right)
        for share, right in zip(needed.tolist(), accuracy.tolist(), strict=True)
    ]
    uneven = _EVEN * np.arange(shape.experts + 1) ** 2
    return filled(best_sizes(np.array(loads) + uneven, total), shape.experts, total)
