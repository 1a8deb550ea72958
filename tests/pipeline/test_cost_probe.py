"""Measured costs are plausible, and measuring leaves the engine as it was. No time is asserted."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from descriptor_parts import parts_of
from thread_engine import engine_in_threads

from pipeline.calibration import cost_probe
from pipeline.calibration.cost_probe import ROWS, measure_costs
from pipeline.engine.engine import Engine
from pipeline.errors import PolicyError
from pipeline.experts.division import Divided
from pipeline.policies.costs import Costs
from pipeline.policies.view import Target


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_measured_costs(tiny_model, tmp_path, monkeypatch) -> None:
    with engine_in_threads(tiny_model, tmp_path) as (engine, _):
        memory = engine.first.memory
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
        without = Engine(engine.backbone, engine.layout, engine.pool)
        with pytest.raises(PolicyError, match="--expert-cache"):
            measure_costs(without)
    assert costs.rows == ROWS
    numbers = np.array([*costs.host, *costs.device, *costs.other, costs.link, costs.round_trip, costs.fetch])
    assert np.isfinite(numbers).all()
    assert (numbers > 0).all()
    assert 0 <= costs.launch < 10
    assert (numbers < 10).all()


class Ticks:
    """A clock that goes on by a second at each reading."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_seconds_are_of_one_tile_one_layer_and_one_round_trip(tiny_model, tmp_path, monkeypatch) -> None:
    """Each timed call takes a second by this clock, the workers say that they computed for six, and the
    prefetcher that it copied each tile in an eighth. An expert has three tiles, a token uses two experts, and
    the slab has ten slots, of which eight are computed in a call."""
    monkeypatch.setattr("pipeline.calibration.cost_probe.time", Ticks())
    monkeypatch.setattr("pipeline.calibration.cost_probe.BUDGET", 0.0)
    monkeypatch.setattr(cost_probe, "ROUND_TRIPS", 3)
    with engine_in_threads(tiny_model, tmp_path) as (engine, _):
        assert (engine.shape.tiles, engine.first.memory.slab.memory.slots) == (3, 10)
        submitted = []
        submit = engine.pool.submit_parts

        def six_seconds(divided: Divided, x: np.ndarray, waits: bool) -> SimpleNamespace:
            ticket = submit(divided, x, waits)
            submitted.append((len(x), sum(len(parts_of(part).items) for _, part in divided.parts)))
            return SimpleNamespace(result=ticket.result, busy=6.0)

        monkeypatch.setattr(engine.pool, "submit_parts", six_seconds)
        mover = engine.first.memory.mover
        monkeypatch.setattr(engine.first.memory, "copied", lambda: (mover.demanded, mover.demanded / 8))
        costs = measure_costs(engine)
        demanded = engine.first.memory.mover.demanded
    launch, fetch = 1 - 2 / 8, (1 - 6 / 8) / 2
    assert costs == Costs(ROWS, (2.0,) * 4, (1 / 8,) * 4, 1 / 8, 1.0, (1.0,) * 4, launch, fetch)
    one, many = submitted[:1], submitted[-3:]
    assert one == [(1, 1)], "the pool is run once before it is timed"
    assert [(rows, experts) for rows, experts in many] == [(1, 0)] * 3, "empty Works"
    assert {rows for rows, _ in submitted} == set(ROWS)
    timed_fetches = 3 * len(ROWS) + 3 * 2  # the last of two experts each
    assert demanded == engine.shape.tiles * (1 + timed_fetches)
