"""Measured costs are plausible, and measuring leaves the engine as it was. No time is asserted."""

from __future__ import annotations

import numpy as np
import pytest
from thread_engine import engine_in_threads

from pipeline.calibration.cost_probe import ROWS, measure_costs
from pipeline.engine.engine import Engine
from pipeline.errors import PolicyError
from pipeline.policies.view import Target


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_measured_costs(tiny_model, tmp_path, monkeypatch) -> None:
    with engine_in_threads(tiny_model, tmp_path) as (engine, _):
        memory = engine.memory
        memory.mover.retarget([Target(0, 1, 3), Target(1, 0, 1)])
        memory.mover.wait_idle()
        slots = {key: list(memory.mover.cache.slots_of(*key)) for key in ((0, 1), (1, 0))}
        costs = measure_costs(engine)
        monkeypatch.setattr("pipeline.calibration.cost_probe.BUDGET", 0.1)
        assert min(measure_costs(engine, context=10).other) > 0  # shorter than the grid's largest chunk
        memory.mover.wait_idle()
        assert {key: memory.mover.cache.slots_of(*key) for key in slots} == slots
        assert memory.mover.cache.residency.sum() == 4
        assert memory.mover.demanded > 0
        without = Engine(engine.backbone, engine.layout, engine.device, engine.pool)
        with pytest.raises(PolicyError, match="--expert-cache"):
            measure_costs(without)
    assert costs.rows == ROWS
    numbers = np.array([*costs.host, *costs.device, *costs.other, costs.link, costs.round_trip])
    assert np.isfinite(numbers).all()
    assert (numbers > 0).all()
    assert (numbers < 10).all()


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_prefetcher_exit_while_costs_are_measured_is_an_error(tiny_model, tmp_path, monkeypatch) -> None:
    """A link without landings must not look like a fast one."""
    monkeypatch.setattr("pipeline.calibration.cost_probe.BUDGET", 0.1)
    with engine_in_threads(tiny_model, tmp_path) as (engine, prefetcher):
        for tiles in (1, 3):
            prefetcher.exit_after(tiles, restarted=False)
            with pytest.raises(PolicyError, match="exited while costs were measured"):
                measure_costs(engine)
            prefetcher.start()
            engine.memory.mover.retarget([Target(0, 1, tiles)])
            assert engine.memory.mover.wait_idle()
        assert min(measure_costs(engine).host) > 0
