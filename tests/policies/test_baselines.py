"""AdapMoE's baselines: what each of them fetches and computes, step by step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from policy_machine import Machine, make_view, policy

from pipeline.arrays import IntArray
from pipeline.engine.driver import LayerDecision
from pipeline.policies.view import ModelShape, Target

SHAPE = ModelShape(layers=4, experts=6, tiles=2, top_k=2)


class Watched(Machine):
    """Keeps each layer's decision, and the tiles of its experts that were resident when it began."""

    def start(self) -> None:
        super().start()
        self.decisions: list[LayerDecision[str]] = []
        self.resident: list[IntArray] = []
        self.named: list[tuple[int, list[int]]] = []  # by layer that predicted: the experts, of one layer

    def begin(self, decision: LayerDecision[str]) -> None:
        self.resident.append(self.residency[decision.layer].copy())
        super().begin(decision)
        self.decisions.append(decision)

    def prefetch(self, targets: tuple[Target, ...], no_room: int) -> None:  # type: ignore[override]
        self.named.append((targets[0].layer, [target.expert for target in targets]))
        super().prefetch(targets, no_room)


def watched(name: str, whole: int, **options: str) -> Watched:
    """A preset with a cache of this many experts."""
    machine = Watched(policy(name, **options), make_view(SHAPE, 2 * whole), np.random.default_rng(0))
    machine.start()
    return machine


def test_each_layer_decides_the_next_one_which_is_fetched_meanwhile() -> None:
    """In decode; a prompt's layers, and each token's first one, decide for themselves."""
    machine = watched("pre-gated", 16)
    machine.step(5, "prefill", (0,) * 5)
    assert not any(decision.gated.predicted for decision in machine.decisions)
    machine.decisions.clear()
    machine.resident.clear()
    for _ in range(6):
        machine.step(1, "decode", (0,))
    router = machine.driver.view.router
    assert router is not None
    for place, decision in enumerate(machine.decisions):
        assert decision.gated.predicted == (decision.layer > 0)
        if decision.layer:
            assert decision.signals.logits is None
            before = machine.decisions[place - 1].signals
            expected = router(before.probes[decision.layer], decision.layer)
            assert np.array_equal(decision.gated.routing.experts, expected.experts)
            assert np.array_equal(decision.gated.routing.weights, expected.weights)
            assert (machine.resident[place][decision.gated.routing.active.experts] == 2).all(), "all arrived"
    assert machine.predicted > 6
    assert not machine.policy.exact
    assert not machine.policy.runs_all_routers
    assert policy("on-demand").runs_all_routers
    assert machine.view.target.sum() <= 2 * 16


def test_whole_layers_are_fetched_one_ahead() -> None:
    """With room for two layers beside the resident first ones; the last layer fetches the first."""
    machine = watched("whole-layer", 24)
    assert machine.view.target.sum(axis=1).tolist() == [12, 12, 0, 0]
    for _ in range(3):
        machine.step(1, "decode", (0,))
    every = list(range(6))
    assert machine.named == [(2, every), (3, every)] * 3
    assert all((resident == 2).all() for resident in machine.resident)
    none_kept = watched("whole-layer", 24, placement="empty")
    none_kept.step(1, "decode", (0,))
    none_kept.step(1, "decode", (0,))
    assert none_kept.named == [(1, every), (2, every), (3, every), (0, every)] * 2
    assert all((resident == 2).all() for resident in none_kept.resident[1:])
    assert none_kept.view.target.sum(axis=1).tolist() == [12, 0, 0, 0]
    one = replace(make_view(replace(SHAPE, layers=1), 24))
    alone = Machine(policy("whole-layer"), one, np.random.default_rng(0))
    alone.start()
    alone.step(1)
    assert alone.predicted == 0
