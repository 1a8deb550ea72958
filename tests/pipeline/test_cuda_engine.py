"""The engine on the device `cuda`, on a stand-in for the GPU (`tests/fake_cuda`): what it computes while
copies land late and prefetchers exit, and what it does not do for every expert."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_gpu import cuda_device, fake_device, fake_runtime
from fake_runtime import FakeRuntime
from mover_parts import random_store
from thread_engine import CONTEXT, PROMPT, engine_in_threads

from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_cache import KVCache
from pipeline.calibration import cost_probe
from pipeline.checkpoint.open import open_model
from pipeline.device import open_device
from pipeline.device.cuda import CudaDevice
from pipeline.engine.engine import Engine
from pipeline.errors import DeviceFailed, OutOfDeviceMemory, UsageError
from pipeline.models.facts import expert_shape
from pipeline.policies.costs import Costs
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from shm.layout import format_named
from workers.cuda import CudaError

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")

COSTS = Costs(rows=(1,), host=(1.0,), device=(0.1,), link=0.5, round_trip=0.1)
TOKENS = list(range(100, 112))
LAYERS, TOP_K = 2, 2


@contextmanager
def cuda_engine(model: Path, folder: Path, seed: int = 0) -> Iterator[tuple[Engine, Any, FakeRuntime]]:
    """The engine, its prefetcher's generations, and the stand-in."""
    shape = expert_shape(open_model(model).config, 32, format_named("bf16"))
    with (
        fake_device(seed) as (device, runtime),
        random_store(shape, "cuda_engine") as store,
        engine_in_threads(model, folder, store=store, device=device) as (engine, prefetcher),
    ):
        yield engine, prefetcher, runtime


def texts(engine: Engine, preset: str, each: Any = lambda number: None, **options: str) -> list[np.ndarray]:
    """The logits of TOKENS, decoded after a prompt under a preset; `each` is called before each step."""
    engine.set_policy(make_policy(PolicyRequest(preset, options), 0), COSTS)
    kv = KVCache(engine.backbone.facts, torch.float32, torch.device("cpu"), CONTEXT)
    sequence = kv.allocate(64)
    found = engine.step([StepInput(TokenSpan(sequence, PROMPT), "last")], "prefill")
    for number, token in enumerate(TOKENS):
        each(number)
        found += engine.step([StepInput(TokenSpan(sequence, [token]), "last")], "decode")
    return found


def agree(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("seed", [0, 1])
def test_no_token_is_wrong_while_copies_land_late_and_prefetchers_exit(tiny_model, tmp_path, seed) -> None:
    """Slots are poisoned until their tiles have landed, and kernels read them late: a tile that is computed
    too early, or whose slot is filled again too early, changes the logits."""
    with cuda_engine(tiny_model, tmp_path, seed) as (engine, prefetcher, _):
        expected = texts(engine, "all-host")
        for preset in ("on-demand", "mixtral-offloading", "layerwise", "fiddler", "hybrimoe", "random"):
            agree(texts(engine, preset), expected)
            engine.first.memory.mover.wait_idle()
        random = np.random.default_rng(seed)

        def exits(number: int) -> None:
            prefetcher.exit_after(int(random.integers(0, 6)), restarted=bool(random.random() < 0.7))
            if number % 3 == 2:
                prefetcher.start()

        agree(texts(engine, "on-demand", exits), expected)
        prefetcher.start()
        engine.first.memory.mover.wait_idle()
        engine.first.memory.audit()


def test_a_step_waits_once_a_layer_and_allocates_nothing(tiny_model, tmp_path) -> None:
    with cuda_engine(tiny_model, tmp_path) as (engine, _, runtime):
        for preset, every in (("on-demand", True), ("all-host", False)):
            seen = []
            texts(engine, preset, lambda number: seen.append(runtime.calls.copy()))  # noqa: B023
            warm = len(TOKENS) // 2  # buffers, events and the link's pace are known by then
            steps = len(seen) - 1 - warm
            calls = seen[-1] - seen[warm]
            assert calls["cudaStreamSynchronize"] == steps * (LAYERS + 1)  # a layer's read, and the logits
            assert not {name for name in calls if "Malloc" in name or "Free" in name or "Create" in name}
            assert calls["cudaDeviceSynchronize"] == calls["cudaMemGetInfo"] == 0
            fetched = engine.counters.phases["decode"].fetched_tiles
            assert (fetched > 0) == every or preset == "all-host"


def test_partial_sums_are_read_where_the_worker_has_written_them(tiny_model, tmp_path, monkeypatch) -> None:
    """The bits are those of sums on the host."""
    shape = expert_shape(open_model(tiny_model).config, 32, format_named("bf16"))
    found = []
    for arena in (False, True):
        folder = tmp_path / str(arena)
        folder.mkdir()
        with fake_device() as (device, runtime), random_store(shape, "partial_sums") as store:
            read_there, places = Counter[bool](), device.places

            def noted(*given: Any) -> list[int]:
                made = places(*given)  # noqa: B023
                read_there.update(runtime.is_registered(address, 4) for address in made)  # noqa: B023
                return made

            monkeypatch.setattr(device, "places", noted)
            made = engine_in_threads(tiny_model, folder, store=store, device=device, arena=arena)
            with made as (engine, _):
                found.append([texts(engine, preset) for preset in ("all-host", "layerwise", "random")])
            assert set(read_there) == {arena}
            assert read_there[arena] >= len(TOKENS) * LAYERS
    for ours, expected in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_a_gpu_for_which_no_kernels_can_be_compiled_is_refused_in_one_line(monkeypatch) -> None:
    """The stand-in is one, by its compute capability."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with fake_runtime() as runtime, cuda_device(CudaDevice, runtime):
        for name in ("cuda", "auto"):
            with pytest.raises(UsageError, match=r"capability 8\.0 or newer; use --device cpu") as refused:
                open_device(name)
            assert "\n" not in str(refused.value)


def test_step_without_memory_for_it_fails_alone(tiny_model, tmp_path, monkeypatch) -> None:
    """Wherever in a step the device's memory is full, the sequence is as it was, and the next step right."""
    with cuda_engine(tiny_model, tmp_path) as (engine, _, _runtime):
        expected = texts(engine, "on-demand")
        places = (
            (engine.device, "from_host"),
            (engine.first.memory.kernel, "begin"),
            (engine.backbone, "head"),
        )
        places += ((engine.device, "to_host"), (engine.backbone, "embed"), (engine.backbone, "attend"))
        for owner, name in places:
            preset = "all-host" if name == "from_host" else "on-demand"
            engine.set_policy(make_policy(PolicyRequest(preset), 0), COSTS)
            kv = KVCache(engine.backbone.facts, torch.float32, torch.device("cpu"), CONTEXT)
            sequence = kv.allocate(64)

            def full(*_: Any, **__: Any) -> Any:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB. GPU 0 has. More")

            for _ in range(2):
                prompt = StepInput(TokenSpan(sequence, PROMPT), "last")
                with monkeypatch.context() as patch:
                    patch.setattr(owner, name, full)
                    with pytest.raises(OutOfDeviceMemory, match="1 GiB: use a"):
                        engine.step([prompt], "prefill")
                assert sequence.length == 0, name
            agree(engine.step([StepInput(TokenSpan(sequence, PROMPT), "last")], "prefill"), expected[:1])
            engine.first.memory.mover.wait_idle()
            engine.first.memory.audit()


def test_a_call_that_fails_ends_one_step_and_a_lost_context_the_engine(
    tiny_model, tmp_path, monkeypatch
) -> None:
    """The engine's error is one line, with which the coordinator ends and is started again."""
    with cuda_engine(tiny_model, tmp_path) as (engine, _, runtime):
        expected = texts(engine, "on-demand")
        kv = KVCache(engine.backbone.facts, torch.float32, torch.device("cpu"), CONTEXT)
        sequence = kv.allocate(64)
        prompt = StepInput(TokenSpan(sequence, PROMPT), "last")
        errors = CudaError("cuLaunchKernel: error 1"), torch.AcceleratorError("CUDA error: 1\nCompile with")
        for error, sticky in itertools.product(errors, (False, True)):

            def fails(*_: Any, error: Exception = error) -> Any:
                raise error

            with monkeypatch.context() as patch:
                patch.setattr(engine.first.memory.kernel, "begin", fails)
                if sticky:
                    patch.setitem(runtime.failures, "cudaDeviceSynchronize", 0)
                with pytest.raises(CudaError if sticky else DeviceFailed, match="error") as raised:
                    engine.step([prompt], "prefill")
            assert "\n" not in str(raised.value)
            assert ("computes nothing any more" in str(raised.value)) == sticky
            assert sequence.length == 0
        agree(engine.step([prompt], "prefill"), expected[:1])
        engine.first.memory.mover.wait_idle()
        engine.first.memory.audit()


def test_costs_are_measured(tiny_model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cost_probe, "BUDGET", 0.05)
    with cuda_engine(tiny_model, tmp_path) as (engine, _, _runtime):
        for _ in range(2):
            costs = cost_probe.measure_costs(engine)
            assert 0 < costs.link < 1
            engine.first.memory.mover.wait_idle()
            engine.first.memory.audit()
