"""Missing tiles that the device reads in the store: the same bits, no order, residency as planned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_gpu import fake_device
from fake_runtime import FakeRuntime
from mover_parts import random_store
from pipeline.experts.fetch_link import DEMANDED
from pipeline.experts.zero_copy import MOST_ROWS
from thread_engine import CONTEXT, engine_in_threads, recorded_orders

from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_cache import KVCache
from pipeline.calibration.cost_probe import measure_costs
from pipeline.checkpoint.open import open_model
from pipeline.counters import PhaseCounters
from pipeline.engine.cost_updates import ENOUGH, CostUpdates, Work
from pipeline.engine.engine import Engine
from pipeline.engine.learned_costs import Corrections
from pipeline.models.registry import expert_shape
from pipeline.policies.costs import Costs
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from shm.layout import format_named
from workers import cuda
from workers.kernels.cuda.experts import FEW

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")

FETCHED = Costs(rows=(1,), host=(1.0,), device=(0.1,), link=0.5, round_trip=0.1)
CHEAP = replace(FETCHED, zero_copy=0.01)
PROMPT = list(range(50, 90))  # every expert has more than MOST_ROWS rows of it
TOKENS = list(range(100, 110))
# Their plans follow from routing and costs alone.
FIXED = ("on-demand", "mixtral-offloading", "fiddler", "random")


def decoded(engine: Engine, preset: str, costs: Costs | None) -> tuple[np.ndarray, PhaseCounters]:
    """The logits of TOKENS, decoded one by one behind PROMPT, and what decode has counted."""
    engine.set_policy(make_policy(PolicyRequest(preset), 0), costs)
    engine.forget_trials()
    kv = KVCache(engine.backbone.spec, torch.float32, torch.device("cpu"), CONTEXT)
    sequence = kv.allocate(64)
    found = engine.step([StepInput(TokenSpan(sequence, PROMPT), "last")], "prefill")
    for token in TOKENS:
        found += engine.step([StepInput(TokenSpan(sequence, [token]), "last")], "decode")
    assert engine.memory.wait_idle()
    engine.memory.audit()
    return np.concatenate(found), engine.counters.phases["decode"]


@pytest.mark.parametrize("capacity", [0, 6])
def test_bits_are_those_of_fetched_tiles(tiny_model, tmp_path, capacity) -> None:
    """Also where some tiles of a layer are to stay, which are fetched. What is read so counts as moved."""
    with engine_in_threads(tiny_model, tmp_path, capacity=capacity) as (engine, _):
        for preset in (*FIXED, "tandem"):
            expected, before = decoded(engine, preset, FETCHED)
            residency = engine.memory.residency.copy()
            with pytest.MonkeyPatch.context() as patch:
                orders = recorded_orders(engine, patch)
                found, counted = decoded(engine, preset, CHEAP)
            assert before.zero_copy_tiles == 0 < counted.zero_copy_tiles, preset
            assert engine.counters.phases["prefill"].zero_copy_tiles == 0
            if preset == "tandem":  # its plans follow from what is under way, too
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
                continue
            np.testing.assert_array_equal(found, expected)
            np.testing.assert_array_equal(engine.memory.residency, residency)
            tiles = [c.fetched_tiles + c.resident_tiles for c in (counted, before)]
            assert tiles[0] == tiles[1]
            demanded = sum(urgency == DEMANDED for urgency, _ in orders)
            assert capacity or demanded == engine.counters.phases["prefill"].fetched_tiles


def test_tiles_are_read_so_while_the_prefetcher_is_down(tiny_model, tmp_path) -> None:
    with engine_in_threads(tiny_model, tmp_path, capacity=0) as (engine, prefetcher):
        expected, before = decoded(engine, "on-demand", CHEAP)
        prefetcher.exit_after(0, restarted=False)
        found, counted = decoded(engine, "on-demand", CHEAP)  # the prompt by the workers
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
        assert counted.zero_copy_tiles == before.zero_copy_tiles
        prefetcher.start()


@pytest.mark.parametrize("costs", [None, FETCHED, replace(FETCHED, zero_copy=0.9)])
def test_without_costs_or_where_fetching_is_sooner_nothing_is_read_so(tiny_model, tmp_path, costs) -> None:
    with engine_in_threads(tiny_model, tmp_path, capacity=0) as (engine, _):
        preset = "on-demand" if costs is not None else "random"
        _, counted = decoded(engine, preset, costs)
        assert counted.zero_copy_tiles == 0 < counted.fetched_tiles
        assert engine.memory.zero_copy._locks is None


@contextmanager
def limited(runtime: FakeRuntime, lockable: int) -> Iterator[None]:
    runtime.lockable = lockable
    yield


@contextmanager
def gpu_engine(model: Path, folder: Path, lockable: float = 1.1) -> Iterator[tuple[Engine, FakeRuntime]]:
    """On the stand-in, whose kernels fail where they read memory that is not registered. `lockable`: share of
    the store that can be, and of some small memory beside it."""
    shape = expert_shape(open_model(model).config, 32, format_named("bf16"))
    folder.mkdir(exist_ok=True)
    with (
        fake_device() as (device, runtime),
        random_store(shape, "zero_copy") as store,
        limited(runtime, int(store.segment.size * lockable)),
        engine_in_threads(model, folder, store=store, device=device, capacity=0) as (engine, _),
    ):
        yield engine, runtime


def test_only_tiles_of_locked_pages_are_read(tiny_model, tmp_path, monkeypatch) -> None:
    """Of a store of which a part can be locked; tiles cross from one registration into the next."""
    monkeypatch.setattr(cuda, "REGISTER_CHUNK", 4096)
    found = []
    for lockable in (1.1, 0.5, 0.0):
        with gpu_engine(tiny_model, tmp_path / str(lockable), lockable) as (engine, _):
            engine.memory.slab.locks.wait()
            found.append(decoded(engine, "on-demand", CHEAP))
    everything, half, nothing = (counted.zero_copy_tiles for _, counted in found)
    assert everything > half > nothing == 0
    for logits, _ in found[1:]:
        np.testing.assert_array_equal(logits, found[0][0])


def test_a_gpu_that_reads_by_other_addresses_fetches(tiny_model, tmp_path) -> None:
    with gpu_engine(tiny_model, tmp_path) as (engine, runtime):
        runtime.host_pointers = 0
        _, counted = decoded(engine, "on-demand", CHEAP)
        assert counted.zero_copy_tiles == 0 < counted.fetched_tiles


def test_it_is_measured_where_there_is_a_link(tiny_model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("pipeline.calibration.cost_probe.BUDGET", 0.1)
    with gpu_engine(tiny_model, tmp_path / "gpu") as (engine, runtime):
        assert measure_costs(engine).zero_copy > 0
        runtime.host_pointers = 0
        engine.memory.zero_copy._locks = None
        monkeypatch.setattr("pipeline.calibration.cost_probe.LOCK_LIMIT", 0.05)
        assert measure_costs(engine).zero_copy == 0
    with engine_in_threads(tiny_model, tmp_path) as (engine, _):
        engine.set_policy(make_policy(PolicyRequest("all-host"), 0), None)
        assert measure_costs(engine).zero_copy == 0


def test_it_pays_where_it_ends_before_the_fetches() -> None:
    costs = Costs((1,), (1.0,), (0.25,), link=0.5, round_trip=0.0, fetch=1.0, zero_copy=0.75)
    # fetching takes 1 an expert, 0.5 a tile and 0.25 for the last one
    assert costs.zero_copy_pays(1, 4)  # 3 < 3.25
    assert not costs.zero_copy_pays(1, 5)  # 3.75 = 3.75
    assert costs.zero_copy_pays(3, 12)
    assert not costs.zero_copy_pays(0, 0)
    assert not replace(costs, zero_copy=0.0).zero_copy_pays(1, 4)
    whole = Costs.from_json(costs.to_json() | {"per": "expert"})
    assert whole.for_tiles(3).zero_copy == pytest.approx(0.25)
    assert MOST_ROWS <= FEW  # with more rows another kernel computes bf16


def test_it_follows_what_runs() -> None:
    updates = CostUpdates(CHEAP)
    for _ in range(ENOUGH):
        work = {"zero_copy": Work(planned=1.0, measured=3.0, tiles=2, rows=2)}
        updates.end_step(work, {"zero_copy": True})
    assert updates.costs.zero_copy == pytest.approx(3 * CHEAP.zero_copy)
    assert (updates.costs.link, updates.costs.host) == (CHEAP.link, CHEAP.host)
    kept = Corrections(updates.factors).to_json()
    assert CostUpdates(CHEAP, Corrections.from_json(kept, 1).factors).costs == updates.costs
    del kept["factors"]["zero_copy"]  # as kept before there was zero copy
    assert CostUpdates(CHEAP, Corrections.from_json(kept, 1).factors).costs == CHEAP


def test_an_engine_learns_it(tiny_model, tmp_path) -> None:
    """By these costs a tile takes far longer than it does; the others stay as they are measured."""
    slow = replace(FETCHED, link=1e4, zero_copy=1e3)
    with engine_in_threads(tiny_model, tmp_path, capacity=0) as (engine, _):
        engine.set_policy(make_policy(PolicyRequest("on-demand"), 0), slow, follow=True)
        kv = KVCache(engine.backbone.spec, torch.float32, torch.device("cpu"), CONTEXT)
        sequence = kv.allocate(128)
        for token in range(ENOUGH + 4):
            engine.step([StepInput(TokenSpan(sequence, [token]), "last")], "decode")
        assert engine.timing.costs.zero_copy < slow.zero_copy / 2
        assert engine.counters.phases["decode"].zero_copy_tiles > 0
        assert engine.counters.phases["decode"].link_busy > 0
