"""Decode steps by CUDA graphs, on the stand-in for a GPU (tests/fake_cuda/fake_graphs.py): real layers,
kernels and bookkeeping, captured and replayed on the same memory."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from emulated_cuda import library
from fake_gpu import FakeCudaDevice, fake_device
from fake_graphs import Enqueued, FakeGraph, RecordedLauncher
from fake_runtime import FakeRuntime
from families import ATTENDING, Case, save
from mover_parts import encoded_store, random_store
from step_runs import compare, poison, through
from test_cuda_engine import COSTS
from thread_engine import PROMPT, engine_in_threads

from pipeline.backbone.backbone import Backbone, EagerLayers
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_cache import KVCache
from pipeline.backbone.linear import Precision
from pipeline.checkpoint.open import open_model
from pipeline.device.cuda import CudaGraphs
from pipeline.engine.engine import Engine
from pipeline.engine.graphs import Bucket, StepGraphs
from pipeline.engine.observer import Probing
from pipeline.errors import OutOfDeviceMemory
from pipeline.experts.carriers import ArenaCarrier
from pipeline.experts.division import Split
from pipeline.experts.pool import HostPool, Ticket
from pipeline.models.facts import expert_shape
from pipeline.models.registry import model_spec
from pipeline.policies.costs import Costs
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from shm.layout import format_named

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")

CONTEXT = 96
KINDS = ("mixtral", "phimoe", "qwen2_moe", "deepseek_v2", "gpt_oss", "glm4_moe")  # of layers between them
CPU = torch.device("cpu")


@pytest.fixture
def gpu() -> Iterator[tuple[FakeCudaDevice, FakeRuntime]]:
    with fake_device() as (device, runtime):
        device.attention = True
        yield device, runtime


def model(folder: Path, family: str, device: FakeCudaDevice, dtype: str = "f32") -> Backbone:
    save(Case(family, "plain"), folder)
    source = open_model(folder)
    return Backbone(source, model_spec(source.config), Precision(dtype, device), CONTEXT)


def probing_of(backbone: Backbone) -> Probing:
    return Probing(backbone, CPU, None)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in KINDS else pytest.mark.slow) for f in ATTENDING]
)
@torch.inference_mode()
def test_steps_are_those_without_graphs(family: str, tmp_path: Path, gpu) -> None:
    device, runtime = gpu
    made = compare(model(tmp_path, family, device), device, len(family))
    assert made.captured > 0
    assert runtime.calls["graph launches"] > made.captured
    assert made.status.startswith(f"on: {made.captured} captured")


def test_recurrent_models_have_none(tmp_path: Path, gpu) -> None:
    device, _ = gpu
    made = StepGraphs(model(tmp_path, "qwen3_next", device), device, "auto")
    assert made.status == "off: the model has recurrent states, which change places at each step"
    assert made.layers([], probing_of(model(tmp_path, "qwen3_next", device))) is None


@torch.inference_mode()
def test_quantized_backbones_are_captured(tmp_path: Path, gpu, monkeypatch) -> None:
    """By the kernels themselves, emulated: what they read is on the device before a capture."""
    device, _ = gpu
    monkeypatch.setattr(device, "launcher", lambda program: RecordedLauncher(library(program), device))
    made = compare(model(tmp_path, "mixtral", device, "int4"), device, 3, steps=8)
    assert made.captured > 0
    assert made.status.startswith(f"on: {made.captured} captured")


@torch.inference_mode()
def test_a_warm_layer_is_one_launch_and_one_wait(tmp_path: Path, gpu) -> None:
    device, runtime = gpu
    backbone = model(tmp_path, "mixtral", device)
    made, probing = StepGraphs(backbone, device, "auto"), probing_of(backbone)
    sequence = KVCache(backbone.spec, backbone.dtype, CPU, 100).allocate(40)
    layers_of = len(backbone.spec.moe_layers)
    for step in range(12):
        before = runtime.calls.copy()
        inputs = [StepInput(TokenSpan(sequence, [step]), "greedy")]
        layers = made.layers([inputs[0].span], probing)
        assert layers is not None
        through(layers, backbone, inputs, False)
        sequence.advance(1)
    calls = runtime.calls - before
    assert calls["graph launches"] == layers_of + 2  # and embeddings, and the head
    assert calls["cudaStreamSynchronize"] == layers_of + 1
    assert not {name for name in calls if "Malloc" in name or "Event" in name}


def broken_head(backbone: Backbone, patch: pytest.MonkeyPatch, how: str) -> None:
    """From now on the head does what a graph cannot have."""
    head = backbone.head

    def reads(h: torch.Tensor) -> torch.Tensor:
        logits = head(h)
        return logits + 0 * float(logits[0, 0].item())

    def uploads(h: torch.Tensor) -> torch.Tensor:
        backbone._precision.device.from_host(np.zeros(3, np.float32))
        return head(h)

    patch.setattr(backbone, "head", {"reads": reads, "uploads": uploads}[how])


@pytest.mark.parametrize("how", ["reads", "uploads", "replay", "memory"])
@torch.inference_mode()
def test_what_cannot_be_captured_leaves_one_line_and_right_numbers(
    how, tmp_path, gpu, monkeypatch, caplog
) -> None:
    device, _ = gpu
    backbone = model(tmp_path, "mixtral", device)
    if how in ("reads", "uploads"):
        broken_head(backbone, monkeypatch, how)
    elif how == "replay":
        replay = FakeGraph.replay

        def half(graph: FakeGraph) -> None:
            graph._tape.entries = graph._tape.entries[:-1]
            replay(graph)

        monkeypatch.setattr(FakeGraph, "replay", half)
    else:
        left = itertools.count(1 << 40, -(1 << 29))
        monkeypatch.setattr(CudaGraphs, "free_bytes", lambda graphs: next(left))
    made, probing = StepGraphs(backbone, device, "auto"), probing_of(backbone)
    sequence = KVCache(backbone.spec, backbone.dtype, CPU, 100).allocate(40)
    for step in range(6):
        inputs = [StepInput(TokenSpan(sequence, [step]), "last")]
        expected = through(EagerLayers(backbone, [inputs[0].span], probing.logits), backbone, inputs, False)
        poison([sequence])
        layers = made.layers([inputs[0].span], probing)
        if layers is not None:
            for ours, theirs in zip(through(layers, backbone, inputs, False), expected, strict=True):
                np.testing.assert_array_equal(ours, theirs)
        sequence.advance(1)
    (line,) = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    reason = {"replay": "gave other numbers", "memory": "no more are captured"}.get(
        how, "could not be captured"
    )
    assert reason in line
    assert made.status.startswith("on: 1 captured" if how == "memory" else "off: ")
    assert (layers is None) == (how != "memory")
    device.free_cached()  # as after an allocation that failed
    del made, layers
    found = torch.zeros(2)

    def adds() -> None:
        found.add_(1)

    device.graphs().capture(adds)  # another engine's
    assert found.tolist() == [1, 1]


def texts(
    engine: Engine,
    preset: str,
    each: Callable[[list[StepInput]], None] = lambda inputs: None,
    costs: Costs = COSTS,
) -> list[np.ndarray]:
    """Logits of two sequences, decoded beside each other under a preset; `each` is called before each
    step."""
    engine.set_policy(make_policy(PolicyRequest(preset), 0), costs)
    kv = KVCache(engine.backbone.spec, torch.float32, CPU, CONTEXT)
    sequences, found = [kv.allocate(30), kv.allocate(40)], []
    for sequence in sequences:
        engine.step([StepInput(TokenSpan(sequence, PROMPT), "none")], "prefill")
    for token in range(7):
        inputs = [StepInput(TokenSpan(sequence, [9 + token]), "last") for sequence in sequences]
        each(inputs)
        found += engine.step(inputs, "decode")
    return found


def test_an_engine_answers_as_without_graphs(tiny_model, tmp_path, gpu) -> None:
    """Experts that are resident, land late or are computed by the workers, between the graphs."""
    device, runtime = gpu
    shape = expert_shape(open_model(tiny_model).config, 32, format_named("bf16"))
    with (
        random_store(shape, "step_graphs") as store,
        engine_in_threads(tiny_model, tmp_path, store=store, device=device) as (engine, _),
    ):
        for preset in ("all-host", "on-demand", "mixtral-offloading", "fiddler", "tandem"):
            engine.first.graphs = StepGraphs(engine.backbone, device, "off")
            expected = texts(engine, preset)
            engine.first.graphs = StepGraphs(engine.backbone, device, "auto")
            for ours, theirs in zip(texts(engine, preset), expected, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
            assert engine.first.graphs.captured > 0, preset
        assert runtime.calls["graph launches"] > 0


def test_no_token_is_wrong_by_graphs_while_prefetchers_exit(tiny_model, tmp_path, gpu) -> None:
    """Between two tiles or in the middle of one; some are started again at once, others two steps later."""
    device, runtime = gpu
    shape, random = expert_shape(open_model(tiny_model).config, 32, format_named("bf16")), Random(0)
    with (
        random_store(shape, "graphs_and_exits") as store,
        engine_in_threads(tiny_model, tmp_path, store=store, device=device) as (
            engine,
            prefetcher,
        ),
    ):
        engine.first.graphs = StepGraphs(engine.backbone, device, "off")
        expected, steps = texts(engine, "all-host"), itertools.count()

        def exits(_: list[StepInput]) -> None:
            prefetcher.exit_after(random.randrange(4), restarted=random.random() < 0.5)
            if next(steps) % 2:
                prefetcher.start()

        for preset in ("on-demand", "mixtral-offloading", "random"):
            engine.first.graphs = StepGraphs(engine.backbone, device, "auto")
            for ours, theirs in zip(texts(engine, preset, exits), expected, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
            assert engine.first.graphs.captured > 0
            prefetcher.start()
            engine.first.memory.mover.wait_idle()
            engine.first.memory.audit()
        assert runtime.calls["graph launches"] > 0


@pytest.mark.parametrize("arena", [False, True])
def test_no_token_is_wrong_by_graphs_while_workers_exit(arena: bool, tiny_model, tmp_path, gpu) -> None:
    """Before a Work and after it, before its answer is sent; each is followed by another."""
    device, runtime = gpu
    shape, random = expert_shape(open_model(tiny_model).config, 32, format_named("bf16")), Random(0)
    chance, exits = 0.0, 0

    def dies() -> bool:
        nonlocal exits
        exits += (now := random.random() < chance)
        return now

    with (
        random_store(shape, f"graphs_and_workers_{arena}") as store,
        engine_in_threads(tiny_model, tmp_path, store=store, device=device, arena=arena, dies=dies) as (
            engine,
            _,
        ),
    ):
        engine.first.graphs = StepGraphs(engine.backbone, device, "off")
        expected = texts(engine, "all-host")
        for preset in ("all-host", "fiddler"):
            engine.first.graphs, chance = StepGraphs(engine.backbone, device, "auto"), 0.2
            for ours, theirs in zip(texts(engine, preset), expected, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
            assert engine.first.graphs.captured > 0
            chance = 0.0
        assert exits > 0
        assert runtime.calls["graph launches"] > 0


STEPS_OF_A_LAYER = (
    (Bucket, "begin"),
    (Bucket, "attend"),
    (Bucket, "read"),
    (ArenaCarrier, "_place"),
    (CudaGraphs, "wait"),
    (Bucket, "add"),
    (Bucket, "answers"),
)


def test_a_step_by_graphs_that_fails_anywhere_leaves_nothing_for_the_next(
    tiny_model, tmp_path, gpu, monkeypatch
) -> None:
    """At each step of the hand-over between the device and the workers; it fails before and after it."""
    device, _ = gpu
    shape = expert_shape(open_model(tiny_model).config, 32, format_named("bf16"))
    with (
        random_store(shape, "graphs_fail") as store,
        engine_in_threads(tiny_model, tmp_path, store=store, device=device, arena=True) as (engine, _),
    ):
        engine.first.graphs = StepGraphs(engine.backbone, device, "off")
        expected = texts(engine, "fiddler")
        engine.first.graphs = StepGraphs(engine.backbone, device, "auto")
        failures = iter([(step, done) for step in STEPS_OF_A_LAYER for done in (False, True)])

        def fails(inputs: list[StepInput]) -> None:
            for (owner, name), done in itertools.islice(failures, 2):
                works = getattr(owner, name)

                def failing(*arguments: Any, done: bool = done, works: Any = works) -> Any:
                    if done:
                        works(*arguments)
                    out_of_memory()

                with monkeypatch.context() as patch:
                    patch.setattr(owner, name, failing)
                    with pytest.raises(OutOfDeviceMemory):
                        engine.step(inputs, "decode")

        for ours, theirs in zip(texts(engine, "fiddler", fails, NO_FETCHES), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
        assert next(failures, None) is None
        assert engine.first.graphs.captured > 0


def out_of_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")


# Calls of the driver. "launches" are kernels of ours, "operations" what torch enqueues.
ENQUEUES = (
    "graph launches",
    "launches",
    "operations",
    "cudaMemcpyAsync",
    "cudaEventRecord",
    "cudaStreamWaitEvent",
)
NO_FETCHES = Costs(rows=(1,), host=(1.0,), device=(0.1,), link=99.0, round_trip=0.1)


@pytest.mark.parametrize("family", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.slow), "qwen2_moe"])
def test_a_layer_is_three_calls_and_a_wait(family: str, tmp_path: Path, gpu, monkeypatch) -> None:
    """Its graph, gate and up of resident experts, and down; shared experts are one more, so that the wait is
    not for them. Resident experts begin before the host plans its share. Nothing is allocated, and no x is
    copied on the host."""
    device, runtime = gpu
    device.experts = True
    save(Case(family, "plain"), tmp_path)
    shape = expert_shape(open_model(tmp_path).config, 64, format_named("int4"))
    with (
        encoded_store(shape, "three_calls", "int4") as store,
        engine_in_threads(tmp_path, tmp_path, store=store, device=device, arena=True) as (engine, _),
    ):
        engine.set_policy(make_policy(PolicyRequest("fiddler"), 0), NO_FETCHES)
        kv = KVCache(engine.backbone.spec, torch.float32, CPU, CONTEXT)
        found, layers, early = list[list[np.ndarray]](), list[Counter[str]](), Counter[tuple[bool, int]]()
        for mode in ("off", "auto"):
            engine.first.graphs, sequence = StepGraphs(engine.backbone, device, mode), kv.allocate(60)
            engine.step([StepInput(TokenSpan(sequence, PROMPT), "none")], "prefill")
            found.append([])
            for token in range(30):
                marks, areas, before = list[Counter[str]](), list[int | None](), engine.counters.snapshot()
                begun = list[tuple[bool, int]]()  # whether the device has a share, and how many it has begun
                engine.tick = lambda: marks.append(runtime.calls.copy())  # noqa: B023
                place, submit = ArenaCarrier._place, HostPool.submit

                def noted(carrier: ArenaCarrier, ticket: Ticket) -> int | None:
                    areas.append(place(carrier, ticket))  # noqa: B023
                    return areas[-1]  # noqa: B023

                def planned(pool: HostPool, split: Split, *arguments: Any) -> Ticket:
                    started = (runtime.calls - marks[-1])["shares begun"]  # noqa: B023
                    begun.append((len(split.device.items) > 0, started))  # noqa: B023
                    return submit(pool, split, *arguments)  # noqa: B023

                with Enqueued(runtime), monkeypatch.context() as patch:
                    patch.setattr(ArenaCarrier, "_place", noted)
                    patch.setattr(HostPool, "submit", planned)
                    inputs = [StepInput(TokenSpan(sequence, [9 + token]), "last")]
                    found[-1] += engine.step(inputs, "decode")
                if mode == "auto" and token == 9:  # a step ends with a layer's outputs told and not added
                    with monkeypatch.context() as patch:
                        patch.setattr(Bucket, "answers", out_of_memory)
                        with pytest.raises(OutOfDeviceMemory):
                            engine.step([StepInput(TokenSpan(sequence, [7]), "last")], "decode")
                if mode == "auto" and token >= 14:
                    layers += [after - first for first, after in pairwise(marks)]
                    assert set(areas) <= {3}  # x of the GPU
                    early.update(begun)
        for ours, theirs in zip(*found, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        after = engine.counters.snapshot()["decode"]
        assert all(after[name] > before["decode"][name] for name in ("resident_tiles", "host_tiles"))
    most = 3 + (family == "qwen2_moe")
    counts = [sum(layer[name] for name in ENQUEUES) for layer in layers]
    assert max(counts) == most, layers
    # When the host began to plan its own share, the device had what is resident, wherever it had any.
    assert {(True, 1)} <= early.keys() <= {(True, 1), (False, 0)}, early
    for layer in layers:
        assert layer["cudaStreamSynchronize"] == 1
        assert layer["cudaEventSynchronize"] == layer["allocations"] == 0


@pytest.mark.parametrize("case", ["predicted", "own", "wrong"])
def test_a_layer_of_kept_channels_waits_once(
    case: str, tiny_model: Path, tmp_path: Path, gpu, monkeypatch
) -> None:
    """The masks of the layer, and those by which channels of the next one are predicted, come with the
    routers' logits. Where nothing is copied a layer is its graph, the gates and the rows of down of all kept
    channels, and at most a fence of slots. Experts that the device has not guessed
    have the same numbers, and are waited for."""
    device, runtime = gpu
    if case == "wrong":
        topk = torch.Tensor.topk
        monkeypatch.setattr(torch.Tensor, "topk", lambda logits, number: topk(-logits, number))
    device.experts = True
    shape = expert_shape(open_model(tiny_model).config, 64, format_named("floe-int4"))
    with (
        encoded_store(shape, "kept_calls", "floe-int4") as store,
        engine_in_threads(tiny_model, tmp_path, 10, store=store, device=device, staging=8, arena=True) as (
            engine,
            _,
        ),
    ):
        kv = KVCache(engine.backbone.spec, torch.float32, CPU, 2 * CONTEXT)
        found, layers = list[list[np.ndarray]](), list[Counter[str]]()
        for mode in ("off", "auto"):
            engine.first.graphs, sequence = StepGraphs(engine.backbone, device, mode), kv.allocate(60)
            predicts = {"prediction": "none"} if case == "own" else {"pause": "0"}
            policy = PolicyRequest("floe", {"sparsity": "0.5"} | predicts)
            engine.set_policy(make_policy(policy, 0), NO_FETCHES)
            engine.step([StepInput(TokenSpan(sequence, PROMPT), "none")], "prefill")
            found.append([])
            for token in range(12):
                marks = list[Counter[str]]()
                engine.tick = lambda: marks.append(runtime.calls.copy())  # noqa: B023
                with Enqueued(runtime):
                    found[-1] += engine.step([StepInput(TokenSpan(sequence, [9 + token]), "last")], "decode")
                if mode == "auto" and token >= 7:
                    layers += [after - first for first, after in pairwise(marks)]
        for ours, theirs in zip(*found, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert engine.counters.snapshot()["decode"]["channels"]["moved"] > 0
    waits = [layer["cudaStreamSynchronize"] for layer in layers]
    if case == "wrong":
        assert 1 < max(waits) <= 3
        return
    for layer in layers:
        assert layer["cudaStreamSynchronize"] == layer["graph launches"] == 1
        assert layer["allocations"] == layer["operations"] == 0
        assert layer["launches"] <= 2 * (1 + 2)  # for what is resident, and each group that lands
    alone = [layer for layer in layers if layer["launches"] == 2 and not layer["cudaStreamWaitEvent"]]
    assert alone
    assert case != "own" or max(sum(layer[name] for name in ENQUEUES) for layer in alone) <= 4
