"""What resident tiles are worth to the preset tandem, and which leave for others."""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray, IntArray, Phase
from pipeline.policies.view import ModelShape, Target

# A step's weight in the two averages of the router's probabilities: what a text uses now, and what it uses on
# the whole. A prompt's step has many tokens.
FRESH = {"decode": 0.2, "prefill": 0.7}
LASTING = {"decode": 0.003, "prefill": 0.05}
LASTING_WEIGHT = 0.5  # beside the fresh average; in prefill, which uses nearly all experts, it counts alone


class Worth:
    """The tiles to keep, and how much each is expected to be used. All of an expert's tiles are worth the
    same, so of the least valuable expert the last tiles leave, and a part of it stays."""

    def __init__(self, shape: ModelShape, capacity: int, counts: NDArray[np.int64]) -> None:
        """`counts` [L, E]: rows that used each expert so far, by which the first targets are set."""
        rows = counts.sum(axis=1, keepdims=True)
        share = (counts / np.maximum(rows, 1)).astype(np.float32)
        self._fresh, self._lasting = share, share.copy()
        self.value: FloatArray = share * np.float32(1 + LASTING_WEIGHT)  # [L, E]
        self.target: IntArray = np.zeros(share.shape, np.int32)
        held = min(capacity, share.size * shape.tiles)
        whole, part = divmod(held, shape.tiles)
        order = np.argsort(-share, axis=None, kind="stable")
        self.target.reshape(-1)[order[:whole]] = shape.tiles
        if part:
            self.target.reshape(-1)[order[whole]] = part
        self._free = capacity - held
        # added to `value`: infinite where nothing can leave
        self._empty = np.where(self.target > 0, np.float32(0), np.float32(inf))
        self._rank: FloatArray = self.value + self._empty

    def observe(self, layer: int, logits: FloatArray, phase: Phase) -> None:
        """Count a layer's router logits [R, E]."""
        if len(logits) == 1:
            share = np.exp(logits[0] - logits[0].max())
            share /= share.sum()
        else:
            shares = np.exp(logits - logits.max(axis=1, keepdims=True))
            shares /= shares.sum(axis=1, keepdims=True)
            share = shares.mean(axis=0)
        fresh, lasting, value = self._fresh[layer], self._lasting[layer], self.value[layer]
        for average, weight in ((fresh, FRESH[phase]), (lasting, LASTING[phase])):
            average *= 1 - weight
            average += weight * share
        np.multiply(lasting, LASTING_WEIGHT, out=value)
        if phase == "decode":
            value += fresh
        np.add(value, self._empty[layer], out=self._rank[layer])

    def protect(self, layer: int, experts: IntArray | list[int] | None = None) -> None:
        """Until `release`, no tile of these experts leaves, by default of none of the layer."""
        self._rank[layer, slice(None) if experts is None else experts] = inf

    def release(self, layer: int) -> None:
        np.add(self.value[layer], self._empty[layer], out=self._rank[layer])

    def grow(self, layer: int, expert: int, tiles: int, least: float, near: int) -> list[Target]:
        """Keep up to `tiles` more tiles of an expert, in the place of tiles worth less than `least`. They are
        of layer `near` or of the half of all layers before it, whose next use is farthest away."""
        targets: list[Target] = []
        got = min(tiles, self._free)
        self._free -= got
        while got < tiles:
            found = self._least(near, least)
            if found is None:
                break
            held = int(self.target[found])
            lost = min(held, tiles - got)
            self._keep(found, held - lost)
            targets.append(Target(*found, held - lost))
            got += lost
        if got:
            self._keep((layer, expert), int(self.target[layer, expert]) + got)
            targets.append(Target(layer, expert, int(self.target[layer, expert])))
        return targets

    def _least(self, near: int, least: float) -> tuple[int, int] | None:
        """The expert whose tiles are worth least."""
        layers, experts = self._rank.shape
        low = near - layers // 2
        found = None
        for begin, end in ((max(low, 0), near + 1), (layers + low, layers)):
            if begin < layers:
                part = self._rank[begin:end]
                index = int(part.argmin())
                value = part.item(index)
                if value < least:
                    least, found = value, (begin + index // experts, index % experts)
        return found

    def _keep(self, key: tuple[int, int], tiles: int) -> None:
        before = int(self.target[key])
        self.target[key] = tiles
        if (before == 0) != (tiles == 0):
            self._empty[key] = 0.0 if tiles else inf
            if not tiles:
                self._rank[key] = inf
