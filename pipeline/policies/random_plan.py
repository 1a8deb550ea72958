"""The preset random: seeded residencies and cuts of every kind, to test that any plan executes."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pipeline.arrays import IntArray
from pipeline.policies.options import Choice, Option, Seed
from pipeline.policies.view import Plan, Policy, Routing, Target, View

# added to the seed of each generator, so that the draws are independent of each other
_PLACEMENT, _CUT, _BEFORE, _AFTER = range(4)


class RandomPlan(Policy):
    """Every residency and every cut is drawn from 0..n, independently, so that 0 < p < r and r < p < n both
    occur. Residencies are drawn in a random order of experts until the cache is full. The draws depend on
    the seed and the model's shape alone; with `churn` some targets also change in each step, before and
    after the layer is computed, depending on the seed, the step and the layer."""

    name = "random"
    help: ClassVar[str] = "Random plans, to test that any plan executes"
    options: ClassVar[tuple[Option, ...]] = (
        Seed(),
        Choice(name="churn", help="1: residencies change at every step", default="0", choices=("0", "1")),
    )

    def __init__(self, *, seed: int, churn: str) -> None:
        self._seed = seed
        self._churn = churn == "1"
        self._cuts: IntArray | None = None  # [L, E]

    def placement(self, view: View) -> IntArray:
        shape = view.shape
        rng = np.random.default_rng((self._seed, _PLACEMENT))
        count = shape.layers * shape.experts
        order = rng.permutation(count)
        drawn = rng.integers(0, shape.tiles, size=count, endpoint=True)
        before = np.cumsum(drawn) - drawn  # tiles of the experts earlier in the order
        target = np.zeros(count, dtype=np.int32)
        target[order] = np.clip(view.capacity - before, 0, drawn)
        return target.reshape(shape.layers, shape.experts)

    def plan(self, layer: int, routing: Routing, view: View) -> Plan:
        if self._cuts is None:
            size = (view.shape.layers, view.shape.experts)
            rng = np.random.default_rng((self._seed, _CUT))
            self._cuts = rng.integers(0, view.shape.tiles, size=size, dtype=np.int32, endpoint=True)
        targets: tuple[Target, ...] = ()
        if self._churn:
            # this layer's experts: this step's own fetches may reach a larger target wholly or in part
            experts = 1 + view.shape.experts // 8
            targets = self._redraw(_BEFORE, layer, (layer, layer + 1), experts, view)
        return Plan(self._cuts[layer].copy(), targets)

    def after(self, layer: int, routing: Routing, view: View) -> tuple[Target, ...]:
        if not self._churn:
            return ()
        return self._redraw(_AFTER, layer, (0, view.shape.layers), 1, view)

    def _redraw(
        self, kind: int, layer: int, among: tuple[int, int], count: int, view: View
    ) -> tuple[Target, ...]:
        """New targets for `count` experts of the layers among[0] to among[1] - 1, each within the capacity
        that the ones before it leave."""
        rng = np.random.default_rng((self._seed, kind, view.step, layer))
        first = among[0] * view.shape.experts
        size = (among[1] - among[0]) * view.shape.experts
        free = view.capacity - int(view.target.sum())
        targets = []
        for index in first + rng.choice(size, size=min(count, size), replace=False):
            layer_of, expert = divmod(int(index), view.shape.experts)
            now = int(view.target[layer_of, expert])
            tiles = min(int(rng.integers(0, view.shape.tiles, endpoint=True)), now + free)
            free -= tiles - now
            targets.append(Target(layer_of, expert, tiles))
        return tuple(targets)
