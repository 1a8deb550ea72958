"""A step of the engine and its policy: what is counted, prepared, and refused."""

from __future__ import annotations

import numpy as np
import pytest
from test_engine import Notes
from thread_engine import PROMPT, Placed, decode, prefilled

from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.errors import PolicyError
from pipeline.experts.device_share import DeviceMemory
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from pipeline.text.logprobs import Greedy

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


def placed(experts: tuple[int, ...]) -> Placed:
    policy = Placed()
    policy.name, policy.experts = "placed", experts
    return policy


def test_policy_that_needs_a_slab_is_refused_and_the_previous_one_stays(parts, monkeypatch) -> None:
    engine, _, kv = parts
    new = prefilled(engine, kv)
    before, probing = engine.first.driver, engine.first.probing
    monkeypatch.setattr(engine.first, "memory", DeviceMemory(engine.shape, engine.device))
    refused = "^policy on-demand keeps experts on the device, and the engine has no slab$"
    with pytest.raises(PolicyError, match=refused):
        engine.set_policy(make_policy(PolicyRequest("on-demand"), 0), None)
    assert (engine.first.driver, engine.first.probing) == (before, probing)
    assert engine.policy.name == "all-host"
    decode(engine, new)


def test_placement_is_resident_at_once_and_the_earlier_one_evicted(parts) -> None:
    engine, _, kv = parts
    prefilled(engine, kv)
    for experts in ((0, 1), (2,), ()):
        assert engine.set_policy(placed(experts), None) == ()
        expected = [3 * (expert in experts) for expert in range(4)]
        assert (
            engine.first.memory.residency.tolist()
            == engine.first.memory.target.tolist()
            == [[0] * 4, expected]
        )


def test_step_counts_rows_active_experts_and_those_wholly_resident(parts) -> None:
    engine, _, kv = parts
    prefilled(engine, kv)
    engine.set_policy(placed((0, 1)), None)
    engine.forget_trials()
    notes = Notes()
    engine.observers.append(notes)
    sequences = [kv.allocate(8), kv.allocate(8)]
    try:
        inputs = [StepInput(TokenSpan(s, PROMPT[:n]), "none") for s, n in zip(sequences, (2, 4), strict=True)]
        engine.step(inputs, "prefill")
    finally:
        engine.observers.clear()
    counters, decoding = engine.counters.phases["prefill"], engine.counters.phases["decode"]
    active = [decision.gated.routing.active.experts.tolist() for decision in notes.seen]
    assert counters.active.tolist() == [len(experts) for experts in active]
    assert counters.hits.tolist() == [0, len({0, 1} & set(active[1]))]
    assert counters.hits[1] > 0
    assert (counters.steps, counters.rows, decoding.steps, decoding.rows) == (1, 6, 0, 0)
    assert counters.host_tiles == 3 * sum(map(len, active))
    assert notes.steps == [("prefill", (*[sequences[0].id] * 2, *[sequences[1].id] * 4))]
    assert [s.length for s in sequences] == [2, 4]
    assert counters.fidelity.weight == pytest.approx(2 * 6, rel=1e-5)
    for sequence in sequences:
        kv.release(sequence)


def test_logits_are_those_of_the_wanted_rows(parts) -> None:
    engine, _, kv = parts
    prefilled(engine, kv)
    spans = [PROMPT[:2], PROMPT[:3], PROMPT[:4], [9]]
    wanted = ["none", "all", "last", "last"]

    def step(which: list[int], kinds: list[str]) -> list[np.ndarray]:
        sequences = [kv.allocate(8) for _ in which]
        inputs = [
            StepInput(TokenSpan(s, spans[i]), kind)
            for s, i, kind in zip(sequences, which, kinds, strict=True)
        ]
        answers = engine.step(inputs, "prefill")
        for sequence in sequences:
            kv.release(sequence)
        return answers

    together = step([0, 1, 2, 3], wanted)
    vocabulary = engine.backbone.spec.vocabulary
    assert [answer.shape for answer in together] == [(n, vocabulary) for n in (0, 3, 1, 1)]
    for i, kind in list(enumerate(wanted))[1:]:
        (alone,) = step([i], [kind])
        np.testing.assert_allclose(together[i], alone, rtol=2e-4, atol=2e-5)
    (every,) = step([2], ["all"])
    np.testing.assert_allclose(together[2][0], every[3], rtol=2e-4, atol=2e-5)
    for kinds in (["greedy", "all", "none", "greedy"], ["greedy", "none", "last", "last"], ["greedy"] * 4):
        mixed = step([0, 1, 2, 3], kinds)
        plain = step([0, 1, 2, 3], [{"greedy": "last"}.get(kind, kind) for kind in kinds])
        for kind, ours, theirs in zip(kinds, mixed, plain, strict=True):
            if kind == "greedy":
                assert Greedy.read(ours[0], vocabulary).token == theirs[0].argmax()
            else:
                np.testing.assert_array_equal(ours, theirs)
    nothing = step([0, 1], ["none", "none"])
    assert [(answer.shape, answer.dtype) for answer in nothing] == [((0, vocabulary), np.float32)] * 2
