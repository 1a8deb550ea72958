"""Replacement parts: they decide which experts stay resident. These keep whole experts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from pipeline.arrays import FloatArray, IntArray
from pipeline.policies.options import Choice, Whole
from pipeline.policies.parts import STAY, Expert, Moves, Parts, Replacement
from pipeline.policies.predictions import FEW_EXPERTS
from pipeline.policies.room import Room, evenly, layer_sizes, whole_room
from pipeline.policies.view import Active, ModelShape, Signals, View

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
    they were used. Ties go to the smaller expert index, and between layers to the earlier one.

    The layers share the cache evenly, or their sizes minimise the expected on-demand loads (AdapMoE, section
    4.4)."""

    name: ClassVar[str] = "lru"
    help: ClassVar[str] = "the most recently used"
    options = (
        Choice(
            name="scope",
            help="one cache for each layer, or one cache over all layers",
            default="layer",
            choices=("layer", "global"),
        ),
        Choice(
            name="sizes",
            help="a layer's share of the cache: even, or dp, by the calibration's expected loads",
            default="even",
            choices=("even", "dp"),
        ),
    )
    fills: ClassVar[str] = "fetched"
    without: ClassVar[str] = "sizes=even"

    def __init__(self, *, scope: str, sizes: str) -> None:
        self._per_layer = scope == "layer"
        self.needs_calibration = sizes == "dp"
        self._orders: list[OrderedDict[Expert, None]] = []  # least recently used first
        self._sizes: list[int] = []

    def contradiction(self) -> str:
        if self._per_layer or not self.needs_calibration:
            return ""
        return "sizes=dp divides the cache by layer, and scope=global does not (sizes=even, or scope=layer)"

    def join(self, parts: Parts) -> None:
        self._gate = parts.gate
        self._predictor = parts.prediction.predictor

    def room(self, view: View, tiles: int) -> Room:
        room = whole_room(view.shape, tiles)
        if not self._per_layer:
            return room
        if not self.needs_calibration:
            return even_room(view.shape, tiles)
        # takes a second or more for a large model
        sizes = layer_sizes(view, room.experts, self._gate.limits(view), self._predictor)
        return replace(room, sizes=sizes)

    def start(self, placed: list[Expert], room: Room, view: View) -> None:
        self._sizes = [room.experts] if room.sizes is None else list(room.sizes)
        self._orders = [OrderedDict() for _ in self._sizes]
        for layer, expert in sorted(placed, reverse=True):
            self._orders[layer if self._per_layer else 0][layer, expert] = None

    def plan(self, layer: int, active: Active, cut: IntArray, view: View) -> Moves:
        index = layer if self._per_layer else 0
        order, size = self._orders[index], self._sizes[index]
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
    """DALI's workload-aware replacement (section 4.3): each step adds an expert's rows to its score; after
    every `window` steps of a layer the `swaps` highest-scored experts that are not held change places with
    the lowest-scored held ones, a pair only where its score is higher, and all scores begin again at 0."""

    name: ClassVar[str] = "workload"
    help: ClassVar[str] = "the most used over a window of steps"
    options = (
        Whole(name="window", help="steps between two replacements", default=4, low=1, high=1 << 20),
        Whole(
            name="swaps",
            help=f"experts replaced at once; by default 1, or 8 where a layer has more than {FEW_EXPERTS}",
            default=None,
            low=1,
            high=1024,
        ),
    )
    fills: ClassVar[str] = "swapped"

    def __init__(self, *, window: int, swaps: int | None) -> None:
        self._window = window
        self._swaps = swaps
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
        others = [expert for expert, score in enumerate(scores) if score and expert not in held]
        hot = sorted(others, key=scores.__getitem__, reverse=True)[: self._most]  # stable: ties by index
        cold = sorted(sorted(held), key=scores.__getitem__)
        pairs = [(a, b) for a, b in zip(cold, hot, strict=False) if scores[a] < scores[b]]
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
        mean = _probabilities(signals.logits)
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
                others = sorted(e for e in held if (layer, e) not in into)
                if not others:
                    continue
                cold = min(others, key=self._scores[layer].__getitem__)
                held.remove(cold)
                out.append((layer, cold))
            held.add(expert)
            into.append((layer, expert))
        return Moves(out, into)


def _probabilities(logits: FloatArray) -> FloatArray:
    """The mean over the rows of the probabilities of router logits [R, E], float32 [E]."""
    if len(logits) == 1:
        row = logits[0]
        shares: FloatArray = np.exp(row - row.max())
        shares /= shares.sum()
        return shares
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    mean: FloatArray = shares.mean(axis=0)
    return mean
