"""What a step on the device `cuda` launches, copies and waits for, counted on a stand-in without numbers
(tests/fake_cuda/counting_gpu.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from counting_gpu import CountingDevice, counting_device
from families import ATTENDING, Case, save
from mover_parts import encoded_store
from thread_engine import CONTEXT, PROMPT, engine_in_threads

from pipeline.backbone.backbone import Backbone
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_cache import KVCache
from pipeline.backbone.linear import Precision
from pipeline.checkpoint.open import open_model
from pipeline.engine.engine import Engine
from pipeline.errors import UsageError
from pipeline.models.facts import expert_shape
from pipeline.models.registry import model_spec
from pipeline.policies.costs import Costs
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from shm.layout import format_named
from workers.kernels.native import load

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")

COSTS = Costs(rows=(1,), host=(1.0,), device=(0.1,), link=0.5, round_trip=0.1)
PRESETS = ("on-demand", "mixtral-offloading", "layerwise", "fiddler", "tandem", "random")
STEPS = 6
# Operations of torch beside the kernels of attention, a layer of a decode step of two sequences without its
# routed experts.
LAUNCHES = {"mixtral": 13, "phimoe": 13, "qwen2_moe": 21, "qwen3_moe": 16, "deepseek_v2": 26, "olmoe": 16}
LAUNCHES |= {"glm4_moe": 18, "minimax_m2": 16, "glm4_moe_lite": 26, "deepseek_v3": 26, "gpt_oss": 15}


@pytest.fixture(params=["int4", "floe-int4"])
def engine(request, tiny_model: Path, tmp_path: Path) -> Iterator[tuple[Engine, CountingDevice]]:
    """Of tiles in slots, or with up matrices on the device."""
    format = request.param
    shape = expert_shape(open_model(tiny_model).config, 64, format_named(format))
    with ExitStack() as stack:
        device, _ = stack.enter_context(counting_device())
        store = stack.enter_context(encoded_store(shape, "cuda_launches", format))
        made = engine_in_threads(tiny_model, tmp_path, store=store, device=device, staging=8)
        yield stack.enter_context(made)[0], device


def counted_steps(
    engine: Engine, device: CountingDevice, preset: str, rows: int = 2, calls: Counter[str] | None = None
) -> list[Counter[str]]:
    """What each layer of decode steps of so many sequences under a preset does, and the head. `fetched`: the
    layer's demanded tiles. `calls`: of the runtime, counted too."""
    engine.set_policy(make_policy(PolicyRequest(preset), 0), COSTS)
    kv = KVCache(engine.backbone.spec, torch.float32, device.torch_device, CONTEXT)
    sequences = [kv.allocate(64) for _ in range(rows)]
    for place, sequence in enumerate(sequences):
        engine.step([StepInput(TokenSpan(sequence, PROMPT[place:]), "last")], "prefill")
    marks: list[Counter[str]] = []

    def mark() -> None:
        fetched = engine.counters.phases["decode"].fetched_tiles
        marks.append(device.counts + Counter(fetched=fetched) + (calls or Counter()))

    engine.tick = mark
    with device.counted():
        for token in range(STEPS):
            engine.step([StepInput(TokenSpan(each, [token]), "last") for each in sequences], "decode")
            mark()
    engine.tick = lambda: None
    return [after - before for before, after in pairwise(marks)]


def test_a_layer_launches_few_kernels_and_waits_once(engine) -> None:
    """However many experts are active, and whether their tiles are resident or land. Nothing mixes tensors
    of host and device, and no copy but those through page-locked buffers is made."""
    engine, device = engine
    floe = bool(engine.layout.head_bytes)
    for preset in (*PRESETS, *["floe"] * floe):
        layers = counted_steps(engine, device, preset)
        assert sum(layer["kernels"] for layer in layers) > 0, preset
        for layer in layers:
            assert layer["blocking copies"] == 0
            assert layer["to host"] <= 1 + 2 * floe  # its read; what masks of this layer and the next keep
            assert layer["attention kernels"] <= 3  # new keys and values, chunks, their sum
            assert layer["kernels"] <= 8, preset  # with masks, too, however many experts have them
            if not floe:
                assert layer["from host"] <= 1, preset  # the step's own: tables travel with launches
                assert layer["allocations"] <= 3, preset  # of attention, and of the sum


def test_kernels_of_other_bits_than_the_hosts_are_refused(monkeypatch) -> None:
    monkeypatch.setattr("pipeline.device.cuda.best", lambda: load("portable"))
    with counting_device() as (device, _), pytest.raises(UsageError, match="no fused additions"):
        device.check_kernels()


@pytest.mark.parametrize("family", ATTENDING)
@pytest.mark.parametrize("flash", [False, True])
def test_backbones_stay_on_the_device(family: str, flash: bool, tmp_path: Path) -> None:
    """Prefill, and decode of several sequences, in every family."""
    save(Case(family, "plain"), tmp_path)
    source = open_model(tmp_path)
    spec = model_spec(source.config)
    with counting_device(flash=flash) as (device, _), torch.inference_mode():
        backbone = Backbone(source, spec, Precision("bf16", device), CONTEXT)
        kv = KVCache(spec, torch.bfloat16, device.torch_device, CONTEXT)
        spans = [TokenSpan(kv.allocate(32), PROMPT) for _ in range(2)]
        for _ in range(2):
            with device.counted() as counts:
                batch = backbone.batch(spans)
                h = backbone.embed(batch)
                for layer in range(len(spec.moe_layers)):
                    attended = backbone.attend(layer, h, batch)
                    device.to_host(attended.x, attended.logits())
                    attended.shared()
                    h = attended.h
                backbone.head(backbone.finish(h, batch))
            assert counts["blocking copies"] == 0
            assert counts["from host"] <= 4
            if len(spans[0].tokens) == 1:
                assert counts["operations"] <= LAUNCHES[family] * spec.layers
                assert counts["attention kernels"] == 3 * spec.layers
                assert counts["from host"] == 1
            for span in spans:
                span.kv.advance(len(span.tokens))
            spans = [TokenSpan(span.kv, [np.random.default_rng(1).integers(0, 9)]) for span in spans]
            counts.clear()
