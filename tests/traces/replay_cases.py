"""Shared parts of the tests of replays: hand-made costs, presets by name, and a scripted policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from trace_files import scripted_steps

from launch.profile import PhaseProfile
from pipeline.arrays import IntArray
from pipeline.counters import Part, PhaseCounters
from pipeline.policies.costs import Costs
from pipeline.policies.presets import make_policy
from pipeline.policies.view import Ahead, Gated, Plan, Policy, PolicyRequest, Routing, Signals, Target, View
from pipeline.replay.machine import CHANNELS, Outcome, Replay
from pipeline.traces.trace import Header

# Of a tile: host 3, device 1, link 5; a round trip 0.5; a layer's other work 2.
COSTS = Costs(rows=(1,), host=(3.0,), device=(1.0,), link=5.0, round_trip=0.5, other=(2.0,))
# Presets without a calibration, some by their options.
OPTIONS = {
    "daop": {"placement": "popular", "first_layer": "1"},
    "dali": {"prediction": "next-gate"},
    "adapmoe": {"gate": "own", "sizes": "even"},
    "moepic": {"theta": "0.5"},
}


def preset(name: str, **options: str) -> Policy:
    return make_policy(PolicyRequest(name, OPTIONS.get(name, {}) | options), seed=0)


def run(
    header: Header,
    policy: Policy,
    steps: Sequence[Sequence[Sequence[int]]],
    capacity: int = 0,
    costs: Costs = COSTS,
    popularity: Sequence[Sequence[int]] | None = None,
) -> tuple[Replay, Outcome]:
    counts = None if popularity is None else np.array(popularity)
    machine = Replay(header, policy, costs, capacity, popularity=counts)
    return machine, machine.run(scripted_steps(header, steps))


def booked(phase: PhaseCounters) -> dict[str, int]:
    """The counts of moved tiles that are not 0."""
    kinds = ("fetched", "predicted", "useful", "late", "wasted", "placed")
    return {name: tiles for name in kinds if (tiles := getattr(phase, f"{name}_tiles"))}


def profile(outcome: Outcome) -> PhaseProfile:
    """The figures of decode, where no bytes are asked for."""
    return PhaseProfile(outcome.counters.snapshot()["decode"], tile_bytes=1)


def moved(phase: PhaseCounters) -> float:
    """Tiles that crossed the link, and channels in tiles."""
    return phase.fetched_tiles + phase.predicted_tiles + phase.placed_tiles + phase.channels.moved / CHANNELS


def took(phase: PhaseCounters, *parts: Part) -> float:
    """Seconds of the steps in these parts, or in all."""
    return sum(sum(phase.seconds[part]) for part in parts or phase.seconds)


def resident(machine: Replay, now: float) -> list[list[int]]:
    """The residency, once the link has run until then."""
    machine._link.now = now
    machine.mover.collect_landings()
    return machine.cache.residency.tolist()


def unused(machine: Replay) -> int:
    """Resident tiles that predictions fetched and that were not used yet."""
    return sum(len(prediction.unused) for prediction in machine.mover._predicted.values())


class Scripted(Policy):
    """A policy with decisions given by the test."""

    name = "scripted"

    def __init__(
        self,
        cut: int,
        placed: Sequence[tuple[int, int, int]] = (),
        predicts: Callable[[int, View], Sequence[Target]] = lambda layer, view: (),
        ahead: bool | None = None,  # early; None: no layer is decided early
        afterwards: Sequence[tuple[int, Target]] = (),  # the layer after which each is set
    ) -> None:
        self._cut, self._placed, self._predicts, self._early = cut, placed, predicts, ahead
        self._afterwards = afterwards
        self.residencies: list[list[int]] = []  # of each layer when it was planned

    def placement(self, view: View) -> IntArray:
        targets = np.zeros((view.shape.layers, view.shape.experts), np.int32)
        for layer, expert, tiles in self._placed:
            targets[layer, expert] = tiles
        return targets

    def _cuts(self, view: View) -> IntArray:
        return np.full(view.shape.experts, self._cut, np.int32)

    def plan(self, layer: int, routing: Routing, view: View) -> Plan:
        self.residencies.append(view.residency[layer].tolist())
        return Plan(self._cuts(view))

    def probes(self, layer: int, view: View) -> tuple[int, ...]:
        return (layer + 1,) if self._early is not None and layer + 1 < view.shape.layers else ()

    def ahead(self, layer: int, signals: Signals, view: View) -> Ahead | None:
        if self._early is None or layer + 1 == view.shape.layers:
            return None
        assert view.router is not None
        routing = view.router(signals.probes[layer + 1], layer + 1)
        return Ahead(Gated(routing, routing, predicted=True), self._cuts(view), self._early)

    def predict(self, layer: int, signals: Signals, gated: Gated, view: View) -> tuple[Target, ...]:
        return tuple(self._predicts(layer, view))

    def after(self, layer: int, routing: Routing, view: View) -> tuple[Target, ...]:
        return tuple(target for after, target in self._afterwards if after == layer)
