"""Replacement parts: they decide which experts stay resident. These keep whole experts. A layer's share of
the cache may follow from AdapMoE's expected on-demand loads.

E experts a layer, k a token, L layers. A cache of size t holds t of the layer's E experts, assumed to be
independent of the experts that are needed (the paper's equation 10). Sizes are whole experts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import comb
from typing import ClassVar, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

from pipeline.arrays import IntArray
from pipeline.policies.calibration import at_limits
from pipeline.policies.options import Choice, Number, Option
from pipeline.policies.parts import STAY, Expert, Moves, Parts, Replacement, Room, evenly, whole_room
from pipeline.policies.predictions import FEW_EXPERTS
from pipeline.policies.view import Active, ModelShape, Signals, View

Floats = NDArray[np.float64]
Predictor = Literal["raw", "residual"]

SETTLED = (
    16  # windows after which a cache that began at random follows the workload: each changes few experts
)


def even_room(shape: ModelShape, tiles: int) -> Room:
    """Whole experts, divided evenly over the layers."""
    room = whole_room(shape, tiles)
    return replace(room, sizes=evenly(shape.layers, room.experts))


class Keep(Replacement):
    """Placed experts stay; a fetched expert is computed and evicted."""

    name: ClassVar[str] = "keep"
    help: ClassVar[str] = "placed experts stay"


class Lru(Replacement):
    """A cache of whole experts keeps, in this order: the layer's active experts that it holds, its active
    experts that the device computes and it does not hold (most rows first), and the others by how recently
    they were used. Ties go to the smaller expert index.

    The layers share the cache evenly, or their sizes minimise the expected on-demand loads (AdapMoE, section
    4.4)."""

    name: ClassVar[str] = "lru"
    help: ClassVar[str] = "the most recently used"
    options: ClassVar[tuple[Option, ...]] = (
        Choice(
            name="sizes",
            help="a layer's share of the cache: even, or dp, by the calibration's expected loads; predicted:"
            " by those of a prefetch, also where nothing is prefetched",
            default="even",
            choices=("even", "dp", "predicted"),
        ),
    )
    fills: ClassVar[str] = "fetched"
    without: ClassVar[str] = "sizes=even"

    def __init__(self, *, sizes: str) -> None:
        self.needs_calibration = sizes != "even"
        self._imagined: Predictor | None = "raw" if sizes == "predicted" else None

    def join(self, parts: Parts) -> None:
        self._gate = parts.gate
        self._predictor = parts.prediction.predictor or self._imagined

    def room(self, view: View, tiles: int) -> Room:
        if not self.needs_calibration:
            return even_room(view.shape, tiles)
        room = whole_room(view.shape, tiles)
        # takes a second or more for a large model
        sizes = layer_sizes(view, room.experts, self._gate.limits(view), self._predictor)
        return replace(room, sizes=sizes)

    def start(self, placed: list[Expert], room: Room, view: View) -> None:
        self._sizes = room.sizes or ()
        self._orders: list[OrderedDict[Expert, None]] = [OrderedDict() for _ in self._sizes]
        for key in sorted(placed, reverse=True):  # least recently used first
            self._orders[key[0]][key] = None

    def plan(self, layer: int, active: Active, cut: IntArray, view: View) -> Moves:
        order, size = self._orders[layer], self._sizes[layer]
        used = [(layer, expert) for expert in active.experts.tolist()]
        hits = [key for key in used if key in order]
        if len(hits) < len(used):
            ranked = zip((-active.counts).tolist(), used, cut[active.experts].tolist(), strict=True)
            new = [key for _, key, on_device in sorted(ranked) if on_device and key not in order]
        else:
            new = []
        del new[size - len(hits) :]
        for key in hits:
            del order[key]
        excess = len(order) + len(hits) + len(new) - size
        out = [order.popitem(last=False)[0] for _ in range(excess)]
        for key in sorted(hits + new, reverse=True):  # the experts of one step are equally recent
            order[key] = None
        return Moves(out, new) if new else STAY


class Workload(Replacement):
    """DALI's workload-aware replacement (section 4.3, Algorithm 2): each step adds an expert's rows to its
    score; after every `window` steps of a layer the `swaps` highest-scored experts that are not held change
    places with the lowest-scored held ones, and all scores begin again at 0. As the paper has it
    (`swap=always`), that many pairs change in any case, or else (ours) only those whose score is higher."""

    name: ClassVar[str] = "workload"
    help: ClassVar[str] = "the most used over a window of steps"
    options = (
        Number(name="window", help="steps between two replacements", default=4, low=1, high=1 << 20),
        Number(
            name="swaps",
            help=f"experts replaced at once; by default 1, or 8 where a layer has more than {FEW_EXPERTS}",
            default=None,
            low=1,
            high=1024,
        ),
        Choice(
            name="swap",
            help="higher: a pair changes only where the new expert has the higher score; always: in any case",
            default="higher",
            choices=("higher", "always"),
        ),
    )
    fills: ClassVar[str] = "swapped"

    def __init__(self, *, window: int, swaps: int | None, swap: str) -> None:
        self._window = window
        self._swaps = swaps
        self._always = swap == "always"
        self.settles = SETTLED * window

    def start(self, placed: list[Expert], room: Room, view: View) -> None:
        shape = view.shape
        self._most = self._swaps or (1 if shape.experts <= FEW_EXPERTS else 8)
        self._held: list[set[int]] = [set() for _ in range(shape.layers)]
        for layer, expert in placed:
            self._held[layer].add(expert)
        self._scores = [[0] * shape.experts for _ in range(shape.layers)]
        self._steps = [0] * shape.layers

    def after(self, layer: int, active: Active, view: View) -> Moves:
        scores, held = self._scores[layer], self._held[layer]
        for expert, count in zip(active.experts.tolist(), active.counts.tolist(), strict=True):
            scores[expert] += count
        self._steps[layer] += 1
        if self._steps[layer] < self._window:
            return STAY
        self._steps[layer] = 0
        self._scores[layer] = [0] * len(scores)
        others = [e for e, score in enumerate(scores) if (score or self._always) and e not in held]
        hot = sorted(others, key=scores.__getitem__, reverse=True)[: self._most]  # stable: ties by index
        cold = sorted(sorted(held), key=scores.__getitem__)
        pairs = list(zip(cold, hot, strict=False))
        if not self._always:
            pairs = [(a, b) for a, b in pairs if scores[a] < scores[b]]
        held.difference_update(a for a, _ in pairs)
        held.update(b for _, b in pairs)
        return Moves([(layer, a) for a, _ in pairs], [(layer, b) for _, b in pairs])


class Score(Replacement):
    """HybriMoE's: in each step a layer's experts have S = 0.5 * TopP(s) + 0.5 * S, where s are the router's
    probabilities (their mean over the rows) and TopP leaves the p = 2k largest and 0 for the others. A newly
    fetched expert always enters, in the place of the held one with the smallest S that this step does not
    use, and so does a prefetched one, at once. The layers share the cache evenly."""

    name: ClassVar[str] = "score"
    help: ClassVar[str] = "the greatest decaying sum of router probabilities"
    fills: ClassVar[str] = "fetched"
    admits: ClassVar[bool] = True

    def room(self, view: View, tiles: int) -> Room:
        return even_room(view.shape, tiles)

    def start(self, placed: list[Expert], room: Room, view: View) -> None:
        shape = view.shape
        self._sizes = room.sizes or ()
        self._held: list[set[int]] = [set() for _ in range(shape.layers)]
        for layer, expert in placed:
            self._held[layer].add(expert)
        # instead of halving all scores, each step counts double the last one: `unit` is the weight of a share
        self._scores = [[0.0] * shape.experts for _ in range(shape.layers)]
        self._unit = [0.5] * shape.layers
        self._p = min(2 * shape.top_k, shape.experts)

    def observe(self, layer: int, signals: Signals, view: View) -> None:
        if signals.logits is None:
            return
        assert view.router is not None
        mean = view.router.scores(signals.logits, layer).mean(axis=0)
        scores = self._scores[layer]
        self._unit[layer] = unit = 2 * self._unit[layer]
        best = mean.argpartition(-self._p)[-self._p :]
        for expert, share in zip(best.tolist(), mean.take(best).tolist(), strict=True):
            scores[expert] += unit * share
        if unit > 2.0**500:
            self._scores[layer] = [score / unit * 0.5 for score in scores]
            self._unit[layer] = 0.5

    def plan(self, layer: int, active: Active, cut: IntArray, view: View) -> Moves:
        held, used = self._held[layer], active.experts.tolist()
        new = [expert for expert in used if expert not in held and cut[expert]]
        if not new:
            return STAY
        scores = self._scores[layer]
        new.sort(key=lambda expert: (-scores[expert], expert))
        into = new[: self._sizes[layer] - len(held)]
        cold = sorted(sorted(held.difference(used)), key=scores.__getitem__)
        out = cold[: len(new) - len(into)]
        into = new[: len(into) + len(out)]
        held.difference_update(out)
        held.update(into)
        return Moves([(layer, expert) for expert in out], [(layer, expert) for expert in into])

    def admit(self, experts: Sequence[Expert]) -> Moves:
        out: list[Expert] = []
        into: list[Expert] = []
        for layer, expert in experts:
            held = self._held[layer]
            if len(held) == self._sizes[layer]:
                others = held.difference(entered for of, entered in into if of == layer)
                if not others:
                    continue
                cold = min(sorted(others), key=self._scores[layer].__getitem__)
                held.remove(cold)
                out.append((layer, cold))
            held.add(expert)
            into.append((layer, expert))
        return Moves(out, into)


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
