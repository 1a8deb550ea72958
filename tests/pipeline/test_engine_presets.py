"""Each preset's approximate and predictive part acts in a running engine: its effect is in the counters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_calibration import plain_calibration
from thread_engine import engine_in_threads, recorded_orders

from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_cache import KVCache
from pipeline.counters import difference
from pipeline.engine.engine import Engine
from pipeline.experts.fetch_link import PREDICTED
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import Costs
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest

LAYERS, EXPERTS, TOP_K = 2, 4, 2
COSTS = Costs(rows=(1,), host=(1.0,), device=(0.1,), link=0.5, round_trip=0.1)
TOKENS = range(100, 140)


def calibration(favoured: tuple[int, ...] = (), sensitivity: float = 1.0) -> Calibration:
    """`favoured`: experts of layer 1 that the mean residual makes by far the most probable ones."""
    residual = np.zeros((LAYERS - 1, EXPERTS), np.float32)
    residual[0, list(favoured)] = 100
    fields = {"residual_logits": residual, "sensitivity": np.full(LAYERS, sensitivity, np.float32)}
    return plain_calibration(LAYERS, EXPERTS, 64, **fields)


class PresetEngine:
    """An engine in which predicted tiles have always landed when the next layer is planned."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.kv = KVCache(engine.backbone.spec, torch.float32, torch.device("cpu"), 1024)
        self._ordered = recorded_orders(engine, patch)

    @property
    def predicted(self) -> set[tuple[int, int]]:
        """Layer and expert of the last decode's predicted tiles."""
        return {tile[:2] for urgency, tile in self._ordered if urgency == PREDICTED}

    def decode(self, preset: str, known: Calibration | None = None, **options: str) -> dict[str, Any]:
        """The decode counters of TOKENS under a preset."""
        self._ordered.clear()
        engine = self.engine
        engine.set_policy(make_policy(PolicyRequest(preset, options), 0), COSTS, known)
        sequence = self.kv.allocate(len(TOKENS) + 2)
        engine.step([StepInput(TokenSpan(sequence, [5, 6]), "none")], "prefill")
        before = engine.counters.snapshot()
        for token in TOKENS:
            engine.step([StepInput(TokenSpan(sequence, [token]), "none")], "decode")
        self.kv.release(sequence)
        decode: dict[str, Any] = difference(engine.counters.snapshot(), before)["decode"]
        return decode


@pytest.fixture(scope="module")
def presets(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PresetEngine]:
    with (
        engine_in_threads(tiny_model, tmp_path_factory.mktemp("presets"), capacity=12) as (engine, _),
        pytest.MonkeyPatch.context() as patched,
    ):
        mover = engine.memory.mover

        def wait() -> None:
            while not mover.idle:
                mover.update()

        patched.setattr(engine.memory, "collect_landings", wait)
        yield PresetEngine(engine, patched)


def test_daop_dispatches_early_and_degrades(presets: PresetEngine) -> None:
    counted = presets.decode("daop", placement="popular", first_layer="1")["fidelity"]
    assert counted["predicted"] == pytest.approx(len(TOKENS), rel=1e-4), "the second layer of each token"
    assert 0 < counted["stale"] < counted["predicted"]
    assert 0 < counted["substituted"] < counted["predicted"]
    on_time = presets.decode("daop", placement="popular", first_layer="1", early="0")["fidelity"]
    assert on_time["stale"] == 0
    assert on_time["substituted"] > 0


def test_adapmoe_skips_experts_where_the_layer_is_not_sensitive(presets: PresetEngine) -> None:
    options = {"placement": "empty", "sizes": "even"}
    skipping = presets.decode("adapmoe", calibration(sensitivity=0.0), **options)
    assert skipping["fidelity"]["skipped"] > 0
    assert sum(skipping["layers"]["active"]) == LAYERS * len(TOKENS), "one expert a token is left"
    assert skipping["predicted_tiles"] > 0
    kept = presets.decode("adapmoe", calibration(sensitivity=1e6), **options)
    assert kept["fidelity"]["skipped"] == 0
    assert sum(kept["layers"]["active"]) == TOP_K * LAYERS * len(TOKENS)


@pytest.mark.parametrize("favoured", [(2, 3), (0, 3)])
def test_dali_prefetches_by_the_mean_residual(presets: PresetEngine, favoured: tuple[int, ...]) -> None:
    counted = presets.decode("dali", calibration(favoured), placement="first-layers", prefetch="2")
    assert presets.predicted == {(1, expert) for expert in favoured}
    assert counted["predicted_tiles"] > 0
    assert counted["useful_tiles"] > 0


@pytest.mark.parametrize("preset", ["mixtral-offloading", "hybrimoe"])
def test_next_gate_prefetch_is_used(presets: PresetEngine, preset: str) -> None:
    counted = presets.decode(preset)
    assert {layer for layer, _ in presets.predicted} == {1}
    assert counted["predicted_tiles"] >= counted["useful_tiles"] > 0
    assert counted["late_tiles"] == 0
    assert counted["issued_experts"] > 0.95 * counted["wanted_experts"] > 0


def test_pre_gated_layers_are_decided_and_fetched_one_layer_early(presets: PresetEngine) -> None:
    counted = presets.decode("pre-gated")
    assert counted["fidelity"]["predicted"] == pytest.approx(len(TOKENS), rel=1e-4), "each second layer"
    assert counted["fidelity"]["stale"] == 0
    assert {layer for layer, _ in presets.predicted} == {1}
    assert counted["useful_tiles"] > 0
    assert counted["wasted_tiles"] == 0, "what was decided is computed"


def test_whole_layers_are_prefetched(presets: PresetEngine) -> None:
    counted = presets.decode("whole-layer", placement="empty")
    assert 1 in {layer for layer, _ in presets.predicted}
    assert counted["predicted_tiles"] > counted["useful_tiles"] > 0
    assert counted["fidelity"]["predicted"] == 0
