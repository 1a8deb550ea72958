"""Replays against the same sums computed in another way, for every preset; and refused replays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_cases import COSTS, Scripted, moved, preset, run, took, unused
from trace_files import drawn_steps, make_header, scripted_steps

from pipeline.errors import PlanError, TraceError
from pipeline.policies.presets import PRESETS
from pipeline.policies.view import ModelShape, Routing, Target, View
from pipeline.replay.machine import Replay


@settings(max_examples=60)
@given(
    name=st.sampled_from([name for name in PRESETS if not name.startswith("floe")]),
    layers=st.integers(1, 4),
    experts=st.integers(2, 9),
    tiles=st.integers(1, 5),
    cache=st.floats(0, 1),
    link=st.floats(0.01, 9),
    data=st.data(),
)
def test_every_moved_byte_is_counted(name, layers, experts, tiles, cache, link, data) -> None:
    """Prefetched tiles are useful, wasted or still resident; the link's busy time is exactly that of the
    moved tiles; and no resource is busy for longer than the replay."""
    header = make_header(ModelShape(layers, experts, tiles, data.draw(st.integers(1, min(3, experts)))))
    capacity = int(cache * layers * experts * tiles)
    machine = Replay(header, preset(name), replace(COSTS, link=link), capacity)
    before = 0.0
    for step in drawn_steps(header, 7, 25):
        machine.step(step)
        assert machine.now > before
        before = machine.now
        residency, target = machine.cache.residency, machine.cache.target
        machine.cache.audit()
        assert (residency <= target).all()
        assert residency.min() >= 0
        assert target.sum() <= capacity
    phases = machine.outcome.counters.phases.values()
    used_or_wasted = sum(p.useful_tiles + p.wasted_tiles for p in phases)
    assert sum(p.predicted_tiles for p in phases) == used_or_wasted + unused(machine)
    tiles_moved, busy = sum(moved(p) for p in phases), sum(p.link_busy for p in phases)
    under_way = busy / link - tiles_moved
    assert under_way == pytest.approx(0, abs=1e-6) or under_way == pytest.approx(1, abs=1e-6)
    assert machine.now == pytest.approx(sum(took(p) for p in phases))
    for phase in phases:
        assert phase.useful_tiles + phase.wasted_tiles <= phase.predicted_tiles
        assert (phase.hits <= phase.active).all()
        assert (phase.hits * tiles <= phase.hit_tiles).all()
        assert (phase.hit_tiles <= phase.active_tiles).all()
        assert (phase.active_tiles == phase.active * tiles).all()
        assert (phase.active >= phase.steps).all()


def test_useless_prefetching_pauses_with_a_note() -> None:
    """The wrong expert of the next layer in every step: prefetching pauses after 64 steps, for 256, and after
    64 more."""
    header = make_header(ModelShape(layers=2, experts=4, tiles=1, top_k=1))

    def predicts(layer: int, view: View) -> list[Target]:
        if layer == 1 or not view.prefetching:
            return []
        wrong = 1 + view.step % 3
        gone = [Target(1, expert, 0) for expert in range(1, 4) if expert != wrong]
        return [*gone, Target(1, wrong, 1)]

    policy = Scripted(1, placed=[(0, 0, 1), (1, 0, 1)], predicts=predicts)
    _, outcome = run(header, policy, [[[0], [0]]] * 400, capacity=3, costs=replace(COSTS, link=0.5))
    (note,) = outcome.notes
    assert "prefetching paused in 272 of 400 decode steps" in note
    assert outcome.decode.predicted_tiles == pytest.approx(2 * 64, abs=4)
    assert outcome.decode.useful_tiles == 0


def test_exact_policy_computes_the_recorded_routing() -> None:
    """Also where rounded logits would exchange two experts: these two differ by less than float16 shows."""
    header = make_header(ModelShape(layers=1, experts=3, tiles=1, top_k=1))
    step = scripted_steps(header, [[[0]]])[0]
    logits = np.array([[1.0, 1.0, 0.0]], np.float16)  # in truth expert 1 had 1.0001
    own = Routing(np.array([[1]], np.int32), np.ones((1, 1), np.float32))
    layer = replace(step.layers[0], router_routing=own, logits=logits)
    machine = Replay(header, preset("on-demand"), COSTS, 1)
    machine.run([replace(step, layers=(layer,))])
    assert machine.cache.residency[0].tolist() == [0, 1, 0]


def test_prediction_beyond_the_recorded_depth_is_refused() -> None:
    header = make_header(ModelShape(layers=3, experts=4, tiles=1, top_k=1), depth=0)
    with pytest.raises(TraceError, match="mixtral-offloading asks at layer 0 for a prediction of layer 1"):
        run(header, preset("mixtral-offloading"), [[[0], [1], [2]]], capacity=6)


def test_decisions_that_break_the_contract_are_refused() -> None:
    header = make_header(ModelShape(layers=1, experts=2, tiles=2, top_k=1))
    for policy in (
        Scripted(3),
        Scripted(-1),
        Scripted(2, placed=[(0, 0, 2), (0, 1, 2)]),
        Scripted(2, predicts=lambda layer, view: [Target(0, 1, 3)]),
        Scripted(2, predicts=lambda layer, view: [Target(1, 1, 1)]),
    ):
        with pytest.raises(PlanError):
            run(header, policy, [[[0]]], capacity=3)
