"""A calibration with a format that keeps up apart: quantiles of |u|, the recall of channels, and the largest
sparsity within a bound, on an engine that computes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from mover_parts import model_store
from thread_engine import CONTEXT, engine_in_threads

from pipeline.backbone.kv_cache import KVCache
from pipeline.calibration.measure import SPARSITIES, calibrate
from pipeline.calibration.observers import STEPS, up_of
from pipeline.calibration.reading import CalibrationContext, Division, Findings, lanes
from pipeline.checkpoint.open import open_model
from pipeline.models.facts import expert_shape
from pipeline.policies.calibration import MOST, Calibration
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from shm.layout import format_named

FORMAT = "floe-u8-int8"
IDS = np.random.default_rng(3).integers(3, 4000, 400).tolist()
TOKENS = 320


class Calibrated:
    """An engine, and calibrations of it."""

    def __init__(self, engine, store) -> None:
        self.engine, self.store = engine, store
        self.kv = KVCache(engine.backbone.spec, torch.float32, torch.device("cpu"), 4 * CONTEXT)

    def __call__(self, max_loss: float | None) -> tuple[Calibration, Findings]:
        parts = (self.engine, self.store, self.kv, 64, 4, CONTEXT, 0)
        context = CalibrationContext(*parts, up=up_of(self.store), max_loss=max_loss)
        return calibrate(context, IDS, TOKENS, lambda *_: None)

    def perplexity(self, calibration: Calibration | None, **options: str) -> tuple[float, float]:
        """Of the validation windows' answers under floe-host, and the share of channels left out."""
        engine = self.engine
        engine.set_policy(make_policy(PolicyRequest("floe-host", options), 0), None, calibration)
        windows = Division.of(IDS, CONTEXT, TOKENS).validation
        with lanes(engine, self.kv, windows, 64) as held:
            held.read_prompts(lambda _: None)
            before = engine.counters.snapshot()["decode"]
            loss = held.loss(lambda _: None)
        after = engine.counters.snapshot()["decode"]
        kept, of = (after[name] - before[name] for name in ("kept_channels", "masked_channels"))
        return float(np.exp(loss)), 1 - kept / max(of, 1)


@pytest.fixture(scope="module")
def calibrated(tiny_model, tmp_path_factory) -> Iterator[Calibrated]:
    model, folder = open_model(tiny_model), tmp_path_factory.mktemp("channels")
    shape = expert_shape(model.config, 32, format_named(FORMAT))
    with (
        model_store(shape, model, FORMAT) as store,
        engine_in_threads(tiny_model, folder, 4, store, staging=12) as (engine, _),
    ):
        yield Calibrated(engine, store)


def test_thresholds_of_a_calibration_leave_out_what_was_wished(calibrated: Calibrated) -> None:
    """On text that was not calibrated on."""
    found, findings = calibrated(None)
    assert found.up == calibrated.engine.up == "int8-g64"
    assert found.magnitudes is not None
    layers = calibrated.engine.shape.layers
    assert found.magnitudes.shape == (layers, STEPS)
    assert (np.diff(found.magnitudes) >= 0).all()
    assert found.sensitivity is not None
    assert (found.sensitivity > 0).all()
    assert (found.sparsity, findings.sparsities) == (None, [])
    for sparsity in (0.5, 0.8):
        _, left = calibrated.perplexity(found, sparsity=str(sparsity))
        assert left == pytest.approx(sparsity, abs=0.05)


def test_largest_sparsity_within_a_bound(calibrated: Calibrated) -> None:
    loose, findings = calibrated(1e5)
    assert loose.sparsity == MOST == 1 - 1 / SPARSITIES
    exact, _ = calibrated.perplexity(loose, sparsity="0")
    worst, _ = calibrated.perplexity(loose, sparsity=str(MOST))
    assert findings.sparsities == [[0.0, pytest.approx(exact)], [MOST, pytest.approx(worst)]]
    bound = 50 * (worst / exact - 1)  # percent, half of what the largest adds
    assert bound > 0
    found, findings = calibrated(bound)
    assert found.sparsity is not None
    assert 0 < found.sparsity < MOST
    assert found.max_loss == bound
    tried = dict(map(tuple, findings.sparsities))
    assert len(tried) > 3
    assert (
        tried[found.sparsity]
        <= exact * (1 + bound / 100)
        < min(perplexity for sparsity, perplexity in tried.items() if sparsity > found.sparsity)
    )
    alone, left = calibrated.perplexity(found, sparsity="auto")
    assert alone == pytest.approx(tried[found.sparsity])
    assert left == pytest.approx(found.sparsity, abs=0.05)
