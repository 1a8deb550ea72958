"""Two devices `cuda` of one machine, on the stand-in for a GPU (tests/fake_cuda): what a boundary between
them costs, and that nothing is read there too early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_gpu import FakeCudaDevice, fake_device
from fake_runtime import FakeRuntime
from mover_parts import mover_parts, random_store
from step_runs import through
from test_cuda_engine import LAYERS, agree, texts
from thread_engine import CONTEXT, device_memory, pool_in_threads

from pipeline.backbone.backbone import Backbone, EagerLayers
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_cache import KVCache
from pipeline.backbone.linear import Precision
from pipeline.backbone.stages import Stage, StagedBackbone, StagedLayers
from pipeline.checkpoint.open import open_model
from pipeline.engine.engine import Engine
from pipeline.engine.graphs import StepGraphs
from pipeline.engine.observer import Probing
from pipeline.models.facts import expert_shape
from pipeline.models.registry import model_spec
from shm.layout import format_named

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


@contextmanager
def two_devices(model: Path, folder: Path) -> Iterator[tuple[Engine, Engine, FakeRuntime]]:
    """An engine on one device, another one on two, and the stand-in for all."""
    source = open_model(model)
    shape = expert_shape(source.config, 32, format_named("bf16"))
    spec, layers = model_spec(source.config), range(LAYERS)
    with fake_device() as (first, runtime), random_store(shape, "two") as store, ExitStack() as stack:
        second = FakeCudaDevice(runtime)
        stack.callback(second.close)
        devices = [first, second]
        each = []
        for number, device in enumerate(devices):
            place = folder / str(number)
            place.mkdir()
            each.append(stack.enter_context(mover_parts(place, store, 10, device=device)))
        pool = stack.enter_context(pool_in_threads(folder, store, 1, "zmq"))
        precisions = [Precision("f32", device) for device in devices]
        parts = [
            Backbone(source, spec, precision, CONTEXT, layers=layers[at : at + 1])
            for at, precision in enumerate(precisions)
        ]
        alone = Engine(Backbone(source, spec, precisions[0], CONTEXT), store.layout, pool)
        both = Engine(StagedBackbone(parts), store.layout, pool)
        alone.first.memory = device_memory(each[0], alone.shape, 6)
        for stage, of in zip(both.stages, each, strict=True):
            stage.memory = device_memory(of, both.shape, 6)
        yield alone, both, runtime


def test_a_boundary_between_devices_is_no_wait(tiny_model, tmp_path) -> None:
    """But a copy of torch, and the batch's tokens and positions, which the second device needs too; the bits
    do not change."""
    tmp_path.chmod(0o700)
    with two_devices(tiny_model, tmp_path) as (alone, both, runtime):
        spent = []
        for engine in (alone, both):
            seen: list[Counter[str]] = []
            found = texts(engine, "all-host", lambda number: seen.append(runtime.calls.copy()))  # noqa: B023
            spent.append((found, seen[-1] - seen[-2]))
        (expected, one), (logits, two) = spent
        for ours, theirs in zip(logits, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert two - one == Counter({"cudaMemcpyAsync": 2})
        expected = texts(alone, "all-host")
        for preset in ("on-demand", "layerwise", "fiddler", "random"):
            agree(texts(both, preset), expected)
            for stage in both.stages:
                stage.memory.mover.wait_idle()
                stage.memory.audit()


@torch.inference_mode()
def test_graphs_of_two_devices_compute_what_one_computes_without(tiny_model, tmp_path) -> None:
    source = open_model(tiny_model)
    spec = model_spec(source.config)
    with fake_device() as (first, runtime), ExitStack() as stack:
        second = FakeCudaDevice(runtime)
        stack.callback(second.close)
        first.attention = second.attention = True
        first.prepare(0)
        second.prepare(0)
        whole = Backbone(source, spec, Precision("f32", first), CONTEXT)
        parts = [
            Backbone(source, spec, Precision("f32", device), CONTEXT, layers=range(at, at + 1))
            for at, device in enumerate((first, second))
        ]
        graphs = [StepGraphs(part, part.device, "auto") for part in parts]
        probing = [Probing(part, part.device.torch_device, None) for part in parts]
        caches = [KVCache(spec, torch.float32, torch.device("cpu"), 100) for _ in range(2)]
        one, other = (cache.allocate(40) for cache in caches)
        for step in range(12):
            before = runtime.calls.copy()
            asked = [StepInput(TokenSpan(one, [step]), "greedy")]
            stages = [
                Stage(part.device, part.layers, partial(made.layers, [asked[0].span], of))
                for part, made, of in zip(parts, graphs, probing, strict=True)
            ]
            found = through(StagedLayers(stages), whole, asked, False)
            calls = runtime.calls - before
            span = TokenSpan(other, [step])
            eager = EagerLayers(whole, [span], whole.router)
            for ours, theirs in zip(
                found, through(eager, whole, [StepInput(span, "greedy")], False), strict=True
            ):
                np.testing.assert_array_equal(ours, theirs)
            one.advance(1)
            other.advance(1)
        assert calls["graph launches"] == LAYERS + 4  # embeddings, the head, and both sides of the boundary
        assert calls["cudaStreamSynchronize"] == LAYERS + 1
