"""The worth of resident tiles to the preset tandem: which of them leave for others."""

from __future__ import annotations

from math import inf
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import PHASES, FloatArray, IntArray, Phase
from pipeline.policies.division import move
from pipeline.policies.view import ModelShape, Router, Target

# A step's weight in the two averages of the router's probabilities: what a text uses now, and what it uses on
# the whole. A prompt's step has many tokens.
FRESH = {"decode": 0.2, "prefill": 0.7}
LASTING = {"decode": 0.003, "prefill": 0.05}
LASTING_WEIGHT = 0.5  # beside the fresh average; in prefill, which uses nearly all experts, it counts alone

# as arrays, which are multiplied sooner than plain numbers: what stays of the averages, and what is added
_WEIGHTS = {
    phase: (
        np.array([[1 - FRESH[phase]], [1 - LASTING[phase]]], np.float32),
        np.array([[FRESH[phase]], [LASTING[phase]]], np.float32),
    )
    for phase in PHASES
}
_LASTING_WEIGHT = np.float32(LASTING_WEIGHT)


class Worth:
    """The tiles to keep, and how much each is expected to be used. All of an expert's tiles are worth the
    same, so of the least valuable expert the last tiles leave, and a part of it stays."""

    def __init__(self, shape: ModelShape, capacity: int, counts: NDArray[np.int64], router: Router) -> None:
        """`counts` [L, E]: rows that used each expert so far, by which the first targets are set."""
        self._scores = router.scores
        rows = counts.sum(axis=1, keepdims=True)
        share = (counts / np.maximum(rows, 1)).astype(np.float32)
        self._averages: FloatArray = np.stack((share, share), axis=1)  # [L, 2, E], fresh and lasting
        self.value: FloatArray = share * np.float32(1 + LASTING_WEIGHT)  # [L, E]
        self._tiles, self._capacity = shape.tiles, capacity
        self.target: IntArray = self._filled(share)
        self._free = capacity - int(self.target.sum())
        # added to `value`: infinite where nothing can leave
        self._empty = np.where(self.target > 0, np.float32(0), np.float32(inf))
        self._rank: FloatArray = self.value + self._empty
        self._noted = np.zeros(share.shape, np.float32)  # [L, E]: logits of one row, or shares of several
        self._layers = np.arange(len(share))
        self._waiting = [False] * len(share)  # by layer: noted, and not counted yet
        self._phase: Phase = "decode"  # of what was noted
        self._single = True  # whether it was one row
        # by layer, as parts are taken from arrays more slowly than from lists
        self._rows = list(zip(self.value, self._empty, self._rank, strict=True))
        every = range(len(share))
        self._places = [[self._before(near, within) for near in every] for within in (False, True)]
        # the same memory, of which Python reads single numbers sooner, and the part of each layer
        self._kept = self.target.data
        self.kept = [part.data for part in self.target]

    def _filled(self, value: FloatArray) -> IntArray:
        """Targets [L, E]: the tiles of the most valuable experts, until the cache is full."""
        target = np.zeros(value.shape, np.int32)
        experts, part = divmod(min(self._capacity, target.size * self._tiles), self._tiles)
        order = np.argsort(-value, axis=None, kind="stable")
        target.reshape(-1)[order[:experts]] = self._tiles
        if part:
            target.reshape(-1)[order[experts]] = part
        return target

    def note(self, layer: int, logits: FloatArray, phase: Phase) -> None:
        """Take note of a layer's router logits [R, E]. They count from `observe` on, at the latest from the
        next step on, when all layers together take little longer than one."""
        single = len(logits) == 1
        if not layer or single != self._single or phase != self._phase:
            self._observe_all()
            self._phase, self._single = phase, single
        # one row's scores are computed with those of the other layers
        if single:
            self._noted[layer] = logits[0]
        else:
            np.add.reduce(self._scores(logits, layer), axis=0, out=self._noted[layer])
            self._noted[layer] *= np.float32(1 / len(logits))
        self._waiting[layer] = True

    def observe(self, layer: int) -> None:
        """Count what was noted of the layer."""
        if self._waiting[layer]:
            self._observe(slice(layer, layer + 1))  # quicker than a list of one

    def _observe_all(self) -> None:
        if any(self._waiting):
            self._observe(np.flatnonzero(self._waiting))

    def _observe(self, part: slice | NDArray[np.int64]) -> None:
        share, layers = self._noted[part], self._layers[part]
        if self._single:
            share = self._scores(share, layers)
        kept, weights = _WEIGHTS[self._phase]
        averages = self._averages[part]
        averages *= kept
        averages += weights * share[:, None]
        value = averages[:, 1] * _LASTING_WEIGHT
        if self._phase == "decode":
            value += averages[:, 0]
        self._averages[part] = averages
        self.value[part] = value
        self._rank[part] = value + self._empty[part]
        for layer in layers.tolist():
            self._waiting[layer] = False

    def moved(self, layer: int, experts: list[int], cuts: list[int], more: int, out: IntArray) -> list[int]:
        """The cuts of experts with equally many rows, changed by `more` tiles in all: beyond the residency
        the most valuable come first; short of it the least valuable go to the host. Also into `out` [E]."""
        cuts = cuts.copy()
        values = [self.value.item(layer, expert) for expert in experts]
        move(cuts, more, list(range(len(cuts))), self._tiles, values)
        out[experts] = cuts
        return cuts

    def fetch(self, layer: int, experts: list[int], more: list[int]) -> list[Target]:
        """Keep so many more tiles of these experts of a layer, as long as others are worth less, the most
        valuable first. No tile of theirs leaves for another."""
        value, empty, rank = self._rows[layer]
        rank.put(experts, inf)
        pairs = zip(experts, more, strict=True)
        wanted = [(value.item(expert), expert, count) for expert, count in pairs if count > 0]
        targets: list[Target] = []
        for worth, expert, count in sorted(wanted, key=itemgetter(0), reverse=True):
            grown = self.grow(layer, expert, count, worth, layer)
            if not grown:
                break
            targets += grown
        np.add(value, empty, out=rank)
        return targets

    def grow(
        self, layer: int, expert: int, tiles: int, least: float, near: int, within: bool = True
    ) -> list[Target]:
        """Keep up to `tiles` more tiles of an expert, in the place of tiles worth less than `least`. They are
        of layer `near`, if it is `within`, or of the half of all layers before it, whose next use is farthest
        away."""
        targets: list[Target] = []
        got = min(tiles, self._free)
        self._free -= got
        while got < tiles:
            victim = self._least(self._places[within][near], least)
            if victim is None:
                break
            held = self._kept[victim]
            lost = min(held, tiles - got)
            self._keep(victim, held - lost)
            targets.append(Target(*victim, held - lost))
            got += lost
        if got:
            held = self._kept[layer, expert] + got
            self._keep((layer, expert), held)
            targets.append(Target(layer, expert, held))
        return targets

    def _least(self, places: list[tuple[int, FloatArray]], least: float) -> tuple[int, int] | None:
        """The expert whose tiles are worth least."""
        experts = self._rank.shape[1]
        victim = None
        for first, part in places:
            index = int(part.argmin())
            value = part.item(index)
            if value < least:
                least, victim = value, (first + index // experts, index % experts)
        return victim

    def ahead(self, layer: int, experts: list[int], left: int, near: int) -> tuple[list[Target], int]:
        """Keep the missing tiles of these experts in their order, `left` in all, at any cost, while layer
        `near` is computed. What changes, and how many of the experts found no room."""
        targets: list[Target] = []
        no_room, kept = 0, self.kept[layer]
        for expert in experts:
            if not left:
                break
            if more := min(self._tiles - kept[expert], left):
                grown = self.grow(layer, expert, more, inf, near, within=False)
                targets += grown
                no_room += not grown
                left -= more
        return targets, no_room

    def _before(self, near: int, within: bool) -> list[tuple[int, FloatArray]]:
        """The ranks of the layers that `grow` takes tiles from, flat, each part with its first layer. The
        layer after `near` is none of them: a prediction would take from itself."""
        layers = len(self._rank)
        low = near - min(layers // 2, max(layers - 2, 0))
        parts = (max(low, 0), near + within), (layers + low, layers)
        return [(begin, self._rank[begin:end].ravel()) for begin, end in parts if begin < end]

    def _keep(self, key: tuple[int, int], tiles: int) -> None:
        before = self._kept[key]
        self._kept[key] = tiles
        if (before == 0) != (tiles == 0):
            self._empty[key] = 0.0 if tiles else inf
            if not tiles:
                self._rank[key] = inf
