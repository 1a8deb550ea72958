"""A whole engine on a format that keeps up apart: the device's presets give what the host's do, with the same
masks or without any."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from mover_parts import model_store
from plain_calibration import plain_calibration
from thread_engine import engine_in_threads
from waiting import wait_until

from pipeline.arrays import FloatArray
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_cache import KVCache
from pipeline.calibration.observers import StepObserver
from pipeline.checkpoint.open import open_model
from pipeline.counters import difference
from pipeline.engine.driver import LayerDecision
from pipeline.experts.division import Share
from pipeline.models.facts import expert_shape
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import Costs
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from shm.layout import format_named
from shm.mask import DENSE, Mask

FORMAT = "floe-u8-int8"
COSTS = Costs(rows=(1,), host=(1.0,), device=(0.1,), link=0.5, round_trip=0.1)
TOKENS = range(100, 124)


class Run:
    """Tokens in prefill and decode under a preset."""

    def __init__(self, engine, prefetcher) -> None:
        self.engine, self.prefetcher = engine, prefetcher
        self.kv = KVCache(engine.backbone.spec, torch.float32, torch.device("cpu"), 1024)

    def __call__(
        self, preset: str, fault_at: int = -1, known: Calibration | None = None, **options: str
    ) -> tuple[FloatArray, dict]:
        engine = self.engine
        engine.set_policy(make_policy(PolicyRequest(preset, options), 0), COSTS, known)
        sequence = self.kv.allocate(len(TOKENS) + 8)
        before = engine.counters.snapshot()
        found = engine.step([StepInput(TokenSpan(sequence, [5, 6, 7, 8, 9]), "all")], "prefill")
        for place, token in enumerate(TOKENS):
            if place == fault_at:
                self.prefetcher.exit_after(3, restarted=True)
            found += engine.step([StepInput(TokenSpan(sequence, [token]), "last")], "decode")
        self.kv.release(sequence)
        assert wait_until(self._idle, 30)  # predicted tiles may still be under way
        engine.first.memory.audit()
        return np.concatenate(found), difference(engine.counters.snapshot(), before)["decode"]

    def _idle(self) -> bool:
        self.engine.first.memory.poll()
        return bool(self.engine.first.memory.idle)


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory) -> Iterator[Run]:
    model, folder = open_model(tiny_model), tmp_path_factory.mktemp("channels")
    shape = expert_shape(model.config, 32, format_named(FORMAT))
    with (
        model_store(shape, model, FORMAT) as store,
        engine_in_threads(tiny_model, folder, 7, store, staging=32) as (engine, prefetcher),
    ):
        yield Run(engine, prefetcher)


@pytest.mark.parametrize("preset", ["floe", "on-demand", "mixtral-offloading", "tandem", "random"])
def test_without_sparsity_the_device_computes_what_the_host_does(run: Run, preset: str) -> None:
    wanted, _ = run("all-host")
    found, counted = run(preset, sparsity="0")
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert counted["resident_tiles"] + counted["fetched_tiles"] > 0
    assert counted["channels"]["moved"] == 0


@pytest.mark.parametrize("preset", ["floe", "on-demand", "mixtral-offloading", "tandem", "random"])
def test_masks_leave_out_the_same_on_both_sides(run: Run, preset: str) -> None:
    wanted, on_host = run("floe-host", sparsity="0.5")
    dense, _ = run("all-host")
    assert np.abs(wanted - dense).max() > 0.01
    found, counted = run(preset, sparsity="0.5")
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert counted["fidelity"]["left"] == pytest.approx(on_host["fidelity"]["left"], rel=1e-4)
    assert counted["kept_channels"] == on_host["kept_channels"]
    assert counted["masked_channels"] == on_host["masked_channels"]
    if preset == "floe":
        assert 0 < counted["channels"]["moved"] < counted["kept_channels"], "some are resident"
        assert counted["fetched_tiles"] == 0


@pytest.mark.parametrize("preset", ["fiddler", "dali"])
def test_plans_go_by_kept_channels(run: Run, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they move to the device are channels, where a whole expert would take longer than its host."""
    monkeypatch.setattr(sys.modules[__name__], "COSTS", replace(COSTS, link=1.1))
    options = {"sparsity": "0.5", "placement": "popular"} | (
        {"prediction": "none"} if preset == "dali" else {}
    )
    wanted, _ = run("floe-host", sparsity="0.5")
    found, counted = run(preset, **options)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert counted["channels"]["moved"] > 0
    dense, whole = run(preset, **options | {"sparsity": "0"})
    assert whole["host_tiles"] > counted["host_tiles"]
    np.testing.assert_allclose(dense, run("all-host")[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fault_at", [2, 9])
def test_prefetcher_that_exits_while_it_gathers_changes_nothing(run: Run, fault_at: int) -> None:
    wanted, _ = run("floe", sparsity="0.5")
    found, counted = run("floe", fault_at=fault_at, sparsity="0.5")
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert counted["host_tiles"] == 0


@pytest.fixture
def named(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """The layers and experts of which channels are predicted, which have always landed when they are
    needed."""
    memory, experts = run.engine.first.memory, list[tuple[int, list[int]]]()
    order, guesses = memory.prefetch_channels, memory.mover._guesses

    def landed() -> bool:
        memory.mover.link.update(5)
        return all(one.final for one in guesses.values())

    def noted(layer: int, share: Share, x: torch.Tensor, mask: Mask) -> None:
        experts.append((layer, sorted(share.items[:, 0].tolist())))
        order(layer, share, x, mask)
        assert wait_until(landed, 30)

    monkeypatch.setattr(memory, "prefetch_channels", noted)
    return experts


def test_predicted_channels_are_used(run: Run, named: list[tuple[int, list[int]]]) -> None:
    """FloE's predictors act: predicted channels are used, and change nothing."""
    wanted, alone = run("floe", sparsity="0.5", prediction="none")
    assert not named
    found, counted = run("floe", sparsity="0.5", pause="0")
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert alone["channels"]["guessed"] == 0
    assert counted["channels"]["guessed"] >= counted["channels"]["right"] > 0
    assert named


def test_an_mlp_of_the_calibration_corrects_the_next_gate(
    run: Run, named: list[tuple[int, list[int]]]
) -> None:
    """One that names the last two experts of layer 1, whatever its input is."""
    shape, hidden = run.engine.shape, run.engine.layout.shape.hidden
    one = np.full((1, 1, hidden), 1.0, np.float32)  # hidden unit: silu of the sum of x, of either sign
    inner = np.concatenate((one, -one), axis=1)
    outer = np.zeros((1, shape.experts, 2), np.float32)
    outer[0, -2:] = 1e6
    for accuracy, corrected in ((0.0, False), (1.0, True)):
        mlps = {"mlp_inner": inner, "mlp_outer": outer, "mlp_accuracy": np.full(1, accuracy, np.float32)}
        known = plain_calibration(shape.layers, shape.experts, hidden, accuracy=0.5, **mlps)
        named.clear()
        run("floe", sparsity="0.5", pause="0", placement="empty", known=known)
        last = {shape.experts - 2, shape.experts - 1}
        assert all(set(experts) == last for layer, experts in named if layer == 1) == corrected


def test_the_trajectory_of_a_token_is_part_of_its_prediction(
    run: Run, named: list[tuple[int, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of layer 1 that expert is named that had most of the token's weight in layer 0, if the MLP says so."""
    shape, hidden = run.engine.shape, run.engine.layout.shape.hidden
    history = np.where(np.eye(shape.experts) > 0, 1e6, 0).astype(np.float32)[None]
    known = plain_calibration(
        *(shape.layers, shape.experts, hidden),
        accuracy=0.5,
        mlp_inner=np.zeros((1, 1, hidden), np.float32),
        mlp_outer=np.zeros((1, shape.experts, 1), np.float32),
        mlp_history=history,
        mlp_accuracy=np.ones(1, np.float32),
    )
    used = list[list[int]]()

    class First(StepObserver):
        def layer(self, decision: LayerDecision[object], x: FloatArray) -> None:
            if not decision.layer and decision.mask != DENSE:
                active = decision.gated.routing.active
                used.append([int(active.experts[active.weights.argmax()])])

    monkeypatch.setattr(run.engine, "observers", [First(run.engine.shape)])
    run("floe", sparsity="0.5", pause="0", placement="empty", known=known)
    assert used
    assert [experts for layer, experts in named if layer == 1] == used
