"""Policies that only a replay has: the bound of every cache, and parts of other systems.

A name of `PARTS` behind a preset exchanges the part of its role: `on-demand+belady`. They are made for one
text, of which `belady` knows what comes, and `sequences` what was before the measured steps.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import IntArray
from pipeline.policies.composed import Composed
from pipeline.policies.parts import STAY, ApplyGate, Assignment, Expert, Moves, Part, Replacement, Room
from pipeline.policies.predictions import NextGate
from pipeline.policies.presets import make_policy
from pipeline.policies.view import Active, Policy, PolicyRequest, Routing, Signals, View
from pipeline.replay.machine import DividedText
from pipeline.replay.steps import counts_of

AHEAD = 3  # layers for which `sequences` names experts


class Belady(Replacement):
    """The most hits of any cache that is filled by what was used: of all layers' experts the one leaves that
    is used again last, and one that is used again later than all others does not enter (Belady 1966)."""

    name: ClassVar[str] = "belady"
    help: ClassVar[str] = "the experts that are used again soonest"
    fills: ClassVar[str] = "fetched"

    def __init__(self, text: DividedText) -> None:
        self._uses: dict[Expert, list[float]] = defaultdict(list)
        layers = len(text.steps[0].layers)
        for number, step in enumerate(text.steps):
            for layer, traced in enumerate(step.layers):
                for expert in traced.router_routing.active.experts.tolist():
                    self._uses[layer, expert].append(number * layers + layer)

    def start(self, placed: list[Expert], room: Room, view: View) -> None:
        self._room, self._held = room.experts, dict[Expert, float]()  # with their next use
        self._last: list[tuple[float, Expert]] = []  # a heap of these, the latest first; some out of date
        for key in placed:
            self._hold(key, -1)

    def _hold(self, key: Expert, now: float) -> None:
        self._held[key] = after = self._next(key, now)
        heapq.heappush(self._last, (-after, key))

    def _next(self, key: Expert, now: float) -> float:
        uses = self._uses[key]
        place = bisect_right(uses, now)
        return uses[place] if place < len(uses) else inf

    def plan(self, layer: int, active: Active, cut: IntArray, view: View) -> Moves:
        return self._enter(layer, active, cut, view, fetched=True)

    def after(self, layer: int, active: Active, view: View) -> Moves:
        if not self._computed:
            return STAY
        return self._enter(layer, active, self._cut, view, fetched=False)

    def _enter(self, layer: int, active: Active, cut: IntArray, view: View, fetched: bool) -> Moves:
        """What was fetched enters at once; what the host computed is copied behind its layer."""
        self._cut, self._computed = cut, False
        now = view.step * view.shape.layers + layer
        out, into, used = [], [], [(layer, expert) for expert in active.experts.tolist()]
        for key in used:
            if key in self._held:
                self._hold(key, now)
            elif bool(cut[key[1]]) != fetched:
                self._computed = True
            elif len(self._held) < self._room:
                into.append(key)
            elif self._room and (victim := self._latest(used)) and self._next(key, now) < self._held[victim]:
                del self._held[victim]
                out.append(victim)
                into.append(key)
            if into and into[-1] == key:
                self._hold(key, now)
        return Moves(out, into) if into else STAY

    def _latest(self, used: list[Expert]) -> Expert | None:
        """Returns the held expert that is used again last, of those that this layer does not use."""
        kept, found = [], None
        while self._last and found is None:
            after, key = heapq.heappop(self._last)
            if self._held.get(key) == -after:
                kept.append((after, key))
                found = None if key in used else key
        for one in kept:
            heapq.heappush(self._last, one)
        return found


class LeastStale(Replacement):
    """Layer-sequential eviction by staleness (SpecMD, arXiv 2602.03921, as far as its abstract says how): of
    all layers' experts first those leave that their layer's latest pass did not use, the longest unused
    first; then those of the layer that comes again last. What is fetched always enters."""

    name: ClassVar[str] = "least-stale"
    help: ClassVar[str] = "the experts that their layer's latest pass used"
    fills: ClassVar[str] = "fetched"

    def __init__(self, text: DividedText) -> None:
        del text

    def start(self, placed: list[Expert], room: Room, view: View) -> None:
        self._room, self._held = room.experts, dict.fromkeys(placed, -1)  # with the step of their latest use

    def plan(self, layer: int, active: Active, cut: IntArray, view: View) -> Moves:
        step, layers, held = view.step, view.shape.layers, self._held
        used = {(layer, expert): step for expert in active.experts.tolist()}
        new = [key for key in used if key not in held and cut[key[1]]][: self._room]
        held.update({key: step for key in used if key in held})

        def leaves_first(key: Expert) -> tuple[bool, int, int]:
            fresh = held[key] == step - (key[0] > layer)
            return fresh, 0 if fresh else held[key], -((key[0] - layer - 1) % layers)

        short = max(0, len(held) + len(new) - self._room)
        out = heapq.nsmallest(short, held.keys() - used.keys(), leaves_first)
        into = new[: self._room - len(held) + len(out)]
        for key in out:
            del held[key]
        held.update(dict.fromkeys(into, step))
        return Moves(out, into) if into else STAY


class RandomNext(NextGate):
    """As many experts of the next layer as a token has, drawn at random."""

    name: ClassVar[str] = "random-next"
    help: ClassVar[str] = "experts of the next layer at random"

    def __init__(self, text: DividedText) -> None:
        super().__init__(pause="0")
        self._rng = np.random.default_rng(len(text.steps))

    def probes(self, layer: int, view: View) -> tuple[int, ...]:
        return ()

    def experts(self, layer: int, signals: Signals, view: View, apply_gate: ApplyGate) -> list[Expert]:
        if layer + 1 == view.shape.layers:
            return []
        drawn = self._rng.permutation(view.shape.experts)[: view.shape.top_k].tolist()
        return [(layer + 1, e) for e in drawn if view.target[layer + 1, e] < view.shape.tiles]


class Sequences(RandomNext):
    """MoE-Infinity's (arXiv 2401.14361): each earlier sequence left a matrix [L, E] of how often it used each
    expert. The one whose direction is nearest to the present sequence's so far says which experts the next
    layers need; a layer further away counts less."""

    name: ClassVar[str] = "sequences"
    help: ClassVar[str] = "experts that the most similar earlier sequence used"

    def __init__(self, text: DividedText) -> None:
        super().__init__(text)
        steps = defaultdict(list)
        for step in text.steps[: text.begin]:
            for sequence in set(step.sequences):
                steps[sequence].append(step)
        shape = text.counts.shape
        every = np.array([counts_of(of, *shape) for of in steps.values()] or [text.counts], np.float64)
        self._known = every / np.linalg.norm(every, axis=(1, 2), keepdims=True)
        self._now: NDArray[np.float64] = np.zeros(shape)
        self._of: frozenset[int] = frozenset()

    def reserve(self, view: View) -> int:
        return (1 + AHEAD) * view.shape.top_k

    def experts(self, layer: int, signals: Signals, view: View, apply_gate: ApplyGate) -> list[Expert]:
        assert view.router is not None
        assert signals.logits is not None
        if self._of != (of := frozenset(view.sequences)):
            self._of, self._now = of, np.zeros_like(self._now)
        self._now[layer] += view.router(signals.logits, layer).workload(view.shape.experts)
        nearest = self._known[np.tensordot(self._known, self._now, 2).argmax()]
        layers, named = view.shape.layers, []
        for later in range(layer + 1, min(layer + 1 + AHEAD, layers)):
            chances = nearest[later] / nearest[later].sum() * (1 - (later - layer) / (layers + 1))
            best = np.argsort(-chances, kind="stable")[: view.shape.top_k].tolist()
            named += [
                (-float(chances[e]), (later, e)) for e in best if view.target[later, e] < view.shape.tiles
            ]
        return [key for _, key in sorted(named)]


class EdgeMoe(RandomNext):
    """EdgeMoE's (arXiv 2308.14352, as others describe it): the experts of the next layer that earlier texts
    used most often behind the present layer's. Its bits by expert are not here."""

    name: ClassVar[str] = "edge-moe"
    help: ClassVar[str] = "experts that earlier texts used behind the present layer's"

    def __init__(self, text: DividedText) -> None:
        super().__init__(text)
        layers, experts = text.counts.shape
        self._behind: NDArray[np.float64] = np.zeros((layers - 1, experts, experts))
        for step in text.steps[: text.begin]:
            routed = [layer.router_routing.experts for layer in step.layers]
            for before, now, then in zip(self._behind, routed, routed[1:], strict=False):
                np.add.at(before, (now[:, :, None], then[:, None, :]), 1)

    def experts(self, layer: int, signals: Signals, view: View, apply_gate: ApplyGate) -> list[Expert]:
        if layer + 1 == view.shape.layers:
            return []
        assert view.router is not None
        assert signals.logits is not None
        behind = self._behind[layer] / np.maximum(self._behind[layer].sum(axis=1, keepdims=True), 1)
        chances = view.router(signals.logits, layer).workload(view.shape.experts) @ behind
        best = np.argsort(-chances, kind="stable")[: view.shape.top_k].tolist()
        return [(layer + 1, e) for e in best if view.target[layer + 1, e] < view.shape.tiles]


class Lightning(Assignment):
    """MoE-Lightning's plan (as DALI describes it: searched before inference with a model of performance): one
    share of the missing experts for all layers of a phase, computed on the host and the rest streamed, the
    share with which a layer of the mean workload ends soonest. Its micro-batches need several batches."""

    name: ClassVar[str] = "lightning"
    help: ClassVar[str] = "a fixed share of the missing experts on the host, by a model of performance"
    needs_costs = True

    def __init__(self, text: DividedText) -> None:
        del text
        self._shares: dict[tuple[str, int], float] = {}  # by phase and rows, which are known before inference

    def cut(self, layer: int, routing: Routing, view: View) -> IntArray:
        active, tiles = routing.active, view.shape.tiles
        cut = np.full(view.shape.experts, tiles, np.int32)
        missing = [e for e in active.experts.tolist() if view.residency[layer, e] < tiles]
        key = view.phase, len(routing.experts)
        if key not in self._shares:
            self._shares[key] = self._planned(len(routing.experts), view)
        # the lightest go to the host, as nothing else is known of them
        rows = dict(zip(active.experts.tolist(), active.counts.tolist(), strict=True))
        on_host = sorted(missing, key=rows.__getitem__)[: round(self._shares[key] * len(missing))]
        cut[on_host] = 0
        return cut

    def _planned(self, rows: int, view: View) -> float:
        """The share of the host in a layer in which every expert is as likely."""
        costs, shape = view.costs, view.shape
        assert costs is not None
        used = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** rows)
        each = max(1, round(rows * shape.top_k / used))
        missing = used * (1 - min(1.0, view.capacity / (shape.layers * shape.experts * shape.tiles)))
        link = costs.fetch + costs.link * shape.tiles
        device, host = (side[each] * shape.tiles for side in (costs.device_at, costs.host_at))

        def seconds(share: float) -> float:
            there, here = missing * (1 - share), missing * share
            computed = costs.launch + device * (used - here)
            return max(link * there, computed, (costs.round_trip + host * here) * (here > 0))

        return min([percent / 100 for percent in range(101)], key=seconds)


PARTS: dict[str, tuple[str, Callable[[DividedText], Part]]] = {
    part.name: (role, part)
    for role, part in (
        ("replacement", Belady),
        ("replacement", LeastStale),
        ("prediction", RandomNext),
        ("prediction", Sequences),
        ("prediction", EdgeMoe),
        ("assignment", Lightning),
    )
}


def policy_of(words: str, text: DividedText) -> Policy:
    """Returns a new policy: a preset, parts of `PARTS` and options, as in `dali+random-next:window=8`. Raises
    PolicyError."""
    names, *options = words.split(":")
    name, *others = names.split("+")
    policy = make_policy(PolicyRequest(name, dict(option.split("=") for option in options)), 0)
    if others:
        assert isinstance(policy, Composed)
        parts: dict[str, Any] = {role: part(text) for role, part in (PARTS[other] for other in others)}
        policy = Composed(names, replace(policy.parts, **parts))
    return policy
