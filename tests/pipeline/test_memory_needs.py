"""Backbone and store have exactly the planned sizes; what has no room is refused in one line before it is
allocated."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeline.backbone.backbone import Backbone
from pipeline.backbone.linear import Linear, Precision
from pipeline.backbone.weights import UNCHANGED, RowOrder, Weights
from pipeline.checkpoint.open import open_model
from pipeline.config import (
    DEFAULT_CONTEXT,
    EXPANDED_KV_BYTES,
    GRAPH_BYTES,
    KV_CONTEXTS,
    SNAPSHOTS,
    BackboneDType,
    EngineConfig,
)
from pipeline.device import open_device
from pipeline.device.base import SLOT_ALIGNMENT
from pipeline.errors import UsageError
from pipeline.memory.needs import (
    CHUNK_MAX,
    STAGING_TILES,
    Needs,
    cache_tiles,
    choose_context,
    full_memory_in_one_line,
    kv_budget,
    needs,
)
from pipeline.memory.plan import Machine, Plan, plan_format
from pipeline.models.architecture import stacks
from pipeline.models.facts import expert_shape
from pipeline.models.registry import architecture_of, model_spec
from pipeline.models.shapes import SHAPES
from shm.layout import format_named
from shm.segment import SHM_FOLDER
from shm.store import store_name

MB = 1_000_000
HUGE = 500_000 * 10**9  # bytes

SMALLER = {
    **{"hidden_size": 128, "vocab_size": 320, "intermediate_size": 192, "moe_intermediate_size": 96},
    **{"shared_expert_intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "head_dim": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32},
    **{"qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 16, "max_position_embeddings": 64},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "fp8", "int8", "int4"])
@pytest.mark.parametrize("family", ["mixtral-8x7b", "phi-3.5-moe", "qwen1.5-moe-a2.7b", "deepseek-v2"])
def test_backbone_has_the_planned_size(family: str, dtype: BackboneDType, tied: bool, monkeypatch) -> None:
    config = SHAPES[family]
    smaller = {key: SMALLER.get(key, value) for key, value in config.items()} | {"tie_word_embeddings": tied}
    smaller |= {"q_lora_rank": 48} if config.get("q_lora_rank") else {}
    monkeypatch.setitem(SHAPES, "smaller", smaller)
    source = open_model(Path("shape:smaller"))
    device = open_device("cpu")
    try:
        backbone = Backbone(source, model_spec(source.config), Precision(dtype, device), 64)
    finally:
        device.close()
    planned = needs(source, EngineConfig(device="cpu", backbone_dtype=dtype), "bf16")
    if dtype == "fp8":  # matrices that are stacked share blocks
        assert 0 <= planned.backbone - backbone.bytes <= 0.002 * backbone.bytes
    else:
        assert planned.backbone == backbone.bytes


MIXTRAL = EngineConfig(device="cpu", chunk=16, context=2048, workers=4)
MIXTRAL_EMBEDDINGS, MIXTRAL_ROW = 4 * 32000 * 4096, 4 * (32000 + 8 * 4096)  # bytes, in float32
ROW_ON_GPU = MIXTRAL_ROW + 2 * (4 * 4096 + 2 * 14336)  # with what its two experts give


TOKENIZER, GRAPHS = 60, GRAPH_BYTES / MB
MIXTRAL_ON_CPU = 320 + 50 + TOKENIZER + MIXTRAL_EMBEDDINGS / MB
MIXTRAL_ON_GPU = 1500 + 4 * 80 + 500 + TOKENIZER + MIXTRAL_EMBEDDINGS / MB


def arena(rows: int, workers: int = 4) -> float:
    """x once, and an answer for each worker, in MB."""
    return 4 * 4096 * rows * (workers + 1) / MB


ON_GPU: dict[str, object] = {"device": "cuda"}
IN_CHUNKS = ON_GPU | {"chunk": None}


@pytest.mark.parametrize(
    ("changed", "processes", "steps"),
    [
        ({}, MIXTRAL_ON_CPU + 4 * 80 + arena(16), 0),
        ({"workers": None}, MIXTRAL_ON_CPU + 80 + arena(16, 1), 0),
        ({"workers": 0, "context": None}, MIXTRAL_ON_CPU, 0),
        # now a step's activations are larger than any weight
        (
            {"chunk": 4096, "context": None},
            690 + arena(4096) + TOKENIZER + 4096 * (MIXTRAL_ROW + 5 * 8192) / MB,
            0,
        ),
        (ON_GPU, MIXTRAL_ON_GPU + arena(16), 600 + GRAPHS + 16 * (ROW_ON_GPU + 5 * 2048) / MB),
        (
            IN_CHUNKS | {"context": 512, "graphs": "off"},
            MIXTRAL_ON_GPU + arena(512),
            600 + 512 * (ROW_ON_GPU + 5 * 512) / MB,
        ),
        (
            IN_CHUNKS | {"context": None},
            MIXTRAL_ON_GPU + arena(1024),
            600 + GRAPHS + 1024 * (ROW_ON_GPU + 5 * 8192) / MB,
        ),
    ],
)
def test_memory_of_processes_and_steps(changed, processes, steps) -> None:
    """In MB: fixed parts of the processes; the largest weight, read as float32; a step's activations."""
    needed = needs(open_model(Path("shape:mixtral-8x7b")), replace(MIXTRAL, **changed), "bf16")
    assert (needed.processes / MB, needed.steps / MB) == pytest.approx((processes, steps))


def test_memory_of_a_token_and_of_a_position() -> None:
    def needed(model: str, **changed) -> Needs:
        return needs(open_model(Path(f"shape:{model}")), replace(MIXTRAL, **changed), "int4")

    mixtral = needed("mixtral-8x7b")
    assert (mixtral.kv_token, mixtral.position) == (2 * 32 * 2 * 8 * 128, 8 * 128)
    assert needed("mixtral-8x7b", backbone_dtype="f32").kv_token == 2 * mixtral.kv_token
    assert needed("mixtral-8x7b", backbone_dtype="int4").kv_token == mixtral.kv_token
    assert needed("mixtral-8x7b", backbone_dtype="f32", kv_dtype="bf16").kv_token == mixtral.kv_token
    assert needed("mixtral-8x7b", kv_dtype="f32").kv_token == 2 * mixtral.kv_token
    assert needed("mixtral-8x7b", kv_dtype="int8").kv_token == 32 * 2 * 8 * (128 + 4)
    assert needed("deepseek-v2-lite", kv_dtype="int8").kv_token == 27 * (512 + 64 + 4 * 5)
    recurrent = needed("qwen3-next-80b-a3b")
    assert recurrent.kv_token == 2 * 12 * 2 * 2 * 256
    assert recurrent.states == (2 + SNAPSHOTS) * 4 * 36 * (32 * 128 * 128 + 3 * 8192)
    plans = [
        Plan(recurrent, slab=False, context=tokens, kv_tokens=tokens, expert_cache=0.0, staging=4)
        for tokens in (1024, 2049, 1 << 20)
    ]
    for plan, sequences in zip(plans, (1, 2, recurrent.max_sequences + 1), strict=True):
        (memory, _) = plan.pools(Machine(0, 0))
        tokens = -(-plan.kv_tokens // 64) * 64
        assert memory.parts["KV cache"] == tokens * recurrent.kv_token + sequences * recurrent.states
    latent, plain = needed("deepseek-v2-lite", device="cuda"), needed("olmoe-1b-7b", device="cuda")
    rows = []
    for facts in (latent.facts, plain.facts):
        experts = facts.top_k * (4 * facts.hidden + 2 * facts.intermediate)
        rows.append(16 * (4 * (facts.vocabulary + 8 * facts.hidden) + experts))
    assert latent.steps - rows[0] - (plain.steps - rows[1]) == 4 * EXPANDED_KV_BYTES


def test_slots_are_aligned_on_a_gpu() -> None:
    source = open_model(Path("shape:olmoe-1b-7b"))
    for name in ("bf16", "int4", "int4-g128"):
        tile = needs(source, replace(MIXTRAL, tile=128), name).slot
        slot = needs(source, replace(MIXTRAL, tile=128, device="cuda"), name).slot
        assert 0 <= slot - tile < SLOT_ALIGNMENT
        assert slot % SLOT_ALIGNMENT == 0


def test_up_matrices_are_resident_on_a_gpu_while_a_policy_keeps_experts_there() -> None:
    source, gpu = open_model(Path("shape:mixtral-8x7b")), replace(MIXTRAL, device="cuda")
    on_gpu, on_host = needs(source, gpu, "floe-int4"), needs(source, MIXTRAL, "floe-int4")
    ups = 32 * 8 * 14336 * 4096 * 5 // 16  # 2.5 bits a weight
    assert (on_gpu.heads, on_host.heads, needs(source, gpu, "int4").heads) == (ups, 0, 0)
    assert on_gpu.staging == 2 * 2 * 6 + 2  # of 16 tiles a third, of 2 experts in 2 layers
    for config, slots in ((gpu, 2 * 16 + 2), (MIXTRAL, STAGING_TILES)):
        plain = needs(source, config, "int4")
        assert (plain.staging, plain.layer_staging) == (STAGING_TILES, slots)
    assert on_gpu.layer_staging == on_gpu.staging
    assert on_gpu.slot * on_gpu.tiles == 32 * 8 * 14336 * 2 * 4096 * 9 // 16  # in slots: gate and down
    assert on_gpu.store - ups - on_gpu.slot * on_gpu.tiles < 1 << 14  # the store's head
    machine = Machine(1 << 40, 1 << 40, 24_000_000_000)
    for slab in (True, False):
        plan = plan_format(on_gpu, replace(gpu, expert_cache=0.1), machine, slab)
        assert plan is not None
        pool = plan.pools(machine)[-1]
        assert pool.parts.get("up matrices", 0) == (ups if slab else 0)
        assert pool.parts["slab"] == (plan.slab and (int(0.1 * on_gpu.tiles) + on_gpu.staging) * on_gpu.slot)
    assert plan_format(on_gpu, gpu, replace(machine, gpu=ups), slab=True) is None


def test_allocated_part_of_a_store_is_present(tiny_model: Path) -> None:
    """Of a store that is being built, and never more than the store."""
    source, config = open_model(tiny_model), EngineConfig(device="cpu", workers=1)
    before = needs(source, config, "int8")
    manifest_tile = expert_shape(source.config, None, format_named("int8")).tile
    path = Path(SHM_FOLDER + store_name(source.fingerprint("int8", manifest_tile)))
    assert before.present == 0
    try:
        path.write_bytes(bytes(8192))
        os.truncate(path, 1 << 30)
        assert needs(source, config, "int8").present == 8192
        with path.open("r+b") as file:
            file.write(bytes(before.store + (1 << 20)))
        assert needs(source, config, "int8").present == before.store
        if os.geteuid() == 0:
            os.chown(path, 12345, -1)  # another user's
            assert needs(source, config, "int8").present == 0
    finally:
        path.unlink(missing_ok=True)


async def test_store_has_the_planned_size(start_engine, tiny_model: Path) -> None:
    config = EngineConfig(model=tiny_model, device="cpu", workers=1, format="int4")
    before = needs(open_model(tiny_model), config, "int4")
    async with start_engine(config):
        during = needs(open_model(tiny_model), config, "int4")
    assert (before.present, during.present) == (0, during.store)
    assert before.store == during.store


def test_slab_or_kv_cache_beyond_the_free_memory_is_refused_with_numbers() -> None:
    device = open_device("cpu")
    device.check_memory(1000, 1000, 1000)
    with pytest.raises(UsageError, match=r"slab needs 500000\.00 GB.* free: .*--expert-cache"):
        device.check_memory(HUGE, 0, 0)
    with pytest.raises(UsageError, match=r"KV cache 500000\.00 GB.* free: .*--context"):
        device.check_memory(1000, HUGE, 0)
    with pytest.raises(UsageError, match=r"rest 500000\.50 GB.* free: "):
        device.check_memory(1000, 1000, HUGE)


def test_full_device_memory_is_one_line_for_the_user() -> None:
    text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB.\nAnd more."
    with pytest.raises(UsageError) as caught, full_memory_in_one_line():
        raise torch.OutOfMemoryError(text)
    assert str(caught.value) == (
        "CUDA out of memory. Tried to allocate 2.00 GiB: use a smaller --expert-cache, --context or --chunk"
    )


def test_share_of_the_tiles_loses_none_by_rounding() -> None:
    assert [cache_tiles(n / 100, 100) for n in range(101)] == list(range(101))
    assert cache_tiles(0.5, 3) == 1
    for tiles in (7, 1000, 28_672):  # a planned share is in thousandths, and never exceeds the plan
        assert all(0 <= n * tiles / 1000 - cache_tiles(n / 1000, tiles) < 1 for n in range(1001))


def test_context_and_kv_cache_have_limits() -> None:
    short, long, whole = (
        SimpleNamespace(max_positions=positions, whole_prompts=whole)
        for positions, whole in ((4096, False), (32768, False), (32768, True))
    )
    assert [choose_context(None, spec) for spec in (short, long)] == [4096, DEFAULT_CONTEXT]
    assert [choose_context(n, short) for n in (1, 4096)] == [1, 4096]
    with pytest.raises(UsageError, match="--context 4097 is more than the model's 4096 positions"):
        choose_context(4097, short)
    assert [choose_context(None, whole, chunk) for chunk in (None, 2048)] == [CHUNK_MAX, 2048]
    with pytest.raises(UsageError, match="give --chunk 4096 as well"):
        choose_context(4096, whole, 2048)
    assert [kv_budget(requested, 100) for requested in (None, 100, 101)] == [KV_CONTEXTS * 100, 100, 101]
    with pytest.raises(UsageError, match="--kv-tokens 99 is less than one context of 100"):
        kv_budget(99, 100)


def test_memory_plan_imports_no_torch() -> None:
    script = "import sys, pipeline.memory.needs, pipeline.memory.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


@pytest.mark.parametrize("family", ["mixtral-8x7b", "deepseek-v2-lite", "glm-4.5-air", "qwen3-next-80b-a3b"])
def test_stacked_matrices_are_those_of_the_plan(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    smaller = {key: SMALLER.get(key, value) for key, value in SHAPES[family].items()}
    monkeypatch.setitem(SHAPES, "smaller", smaller)
    source = open_model(Path("shape:smaller"))
    loaded: list[tuple[str, ...]] = []
    linear = Weights.linear

    def noted(weights: Weights, *roles: str, order: RowOrder = UNCHANGED) -> Linear:
        loaded.append(roles)
        return linear(weights, *roles, order=order)

    monkeypatch.setattr(Weights, "linear", noted)
    device, spec = open_device("cpu"), model_spec(source.config)
    try:
        Backbone(source, spec, Precision("bf16", device), 64)
    finally:
        device.close()
    architecture = architecture_of(source.config)
    layers = [architecture.layer(spec, layer, source.fused) for layer in range(spec.layers)]
    planned = [roles for layer in layers for roles in stacks(layer)]
    assert planned
    assert sorted(planned) == sorted(roles for roles in loaded if len(roles) > 1)
