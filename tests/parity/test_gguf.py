"""GGUF files equal the checkpoints that they were converted from: floats the checkpoint itself, other types a
checkpoint of the numbers that they mean."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from comparison import check_policies, within
from decoding import decode
from families import Case, Options, drawn_texts, save, texts
from family_cases import TIED, WHOLE_GROUPS, partly, scaled, yarn
from gguf import GGMLQuantizationType as Type
from gguf_files import Kind, plain, read_checkpoint, rewritten, rounded, write_gguf
from in_process import InProcess
from oracle import EXACT, Oracle
from quantized_oracle import QuantizedOracle

from pipeline.checkpoint.gguf_model import GgufCheckpoint
from pipeline.checkpoint.open import open_model
from pipeline.checkpoint.reader import numbers_of
from pipeline.config import EngineConfig
from pipeline.errors import ModelError
from pipeline.memory.needs import needs
from shm.codes import Codes
from shm.layout import ExpertShape, format_named
from shm.segment import unlink
from shm.store import StoreBuilder, StoreManifest

NORMED: Options = {"norm_topk_prob": True}
HALF, SHORT = {"dtype": torch.float16}, {"dtype": torch.bfloat16}
CASES = [
    Case("mixtral", "heads", {"head_dim": 10}),
    Case("mixtral", "tied", TIED | scaled("linear"), **HALF),
    Case("qwen2_moe", "one-key", {"num_key_value_heads": 1}),
    Case("qwen3_moe", "yarn", NORMED | {"head_dim": 16} | yarn(beta_fast=3.0, beta_slow=0.4), **SHORT),
    Case("qwen3_moe", "biases", NORMED | {"attention_bias": True, "num_experts_per_tok": 1}),
    Case("olmoe", "clipped", {"clip_qkv": 0.5}, **HALF),
    Case("qwen3_next", "three", NORMED | {"linear_num_value_heads": 6} | partly(0.5)),
    Case("qwen3_next", "alone", NORMED | {"linear_num_value_heads": 2}, **SHORT),
    Case("qwen3_5_moe_text", "three", {"linear_num_value_heads": 6}),
    Case("qwen3_5_moe_text", "alone", {"linear_num_value_heads": 2} | partly(0.5), **HALF),
    Case("gpt_oss", "yarn", yarn(beta_fast=3.0, beta_slow=0.4, truncate=False)),
    Case("gpt_oss", "no-stretch", partly(1.0), fused=True, **SHORT),
    Case("glm4_moe", "plain", NORMED | partly(0.5) | {"routed_scaling_factor": 1.8}),
    Case(
        "glm4_moe",
        "more",
        {"use_qk_norm": True, "attention_bias": True, "norm_topk_prob": False, "first_k_dense_replace": 2},
        **HALF,
    ),
    Case("minimax_m2", "partly", partly(0.5)),
    Case("minimax_m2", "whole", {"head_dim": 16}, **SHORT),
    Case(
        "deepseek_v2",
        "groups",
        {"topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0, "first_k_dense_replace": 1}
        | yarn(mscale=0.7, mscale_all_dim=0.7),
    ),
    Case("deepseek_v2", "lite", {"topk_method": "greedy", "n_group": 1, "topk_group": 1}, **HALF),
    Case(
        "deepseek_v3",
        "queries",
        NORMED
        | {"q_lora_rank": 16, "routed_scaling_factor": 2.827, "n_shared_experts": 2}
        | yarn(mscale=1.0, mscale_all_dim=1.0),
    ),
    Case("deepseek_v3", "plain", {"norm_topk_prob": False, "n_group": 1, "topk_group": 1}, **SHORT),
    Case("glm4_moe_lite", "plain", NORMED),
]
TYPES = {torch.float32: Type.F32, torch.float16: Type.F16, torch.bfloat16: Type.BF16}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_file_equals_its_checkpoint(case: Case, tmp_path: Path) -> None:
    save(case, tmp_path / "checkpoint")
    path = write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", plain(TYPES[case.dtype]))
    oracle, tokens = Oracle(tmp_path / "checkpoint", torch.float32), texts(case)[1]
    with InProcess(path, compiled=True) as ours:
        error = np.abs(ours.logprobs(tokens, [15, *[1] * 5, 40]) - oracle.logprobs(tokens)).max()
    assert error < EXACT


def of_experts(kind: Type, others: Type) -> Kind:
    """Experts in one type, other matrices in another, and the expansions of latents in F16, since llama.cpp
    has one of them transposed."""

    def of(name: str, shape: tuple[int, ...]) -> Type:
        if "attn_k_b" in name or "attn_v_b" in name or "attn_kv_b" in name:
            return Type.F16
        return plain(kind if "_exps" in name else others)(name, shape)

    return of


WIDE: Options = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 32}
BLOCKS = [
    ({"family": "mixtral", "options": WIDE}, Type.Q4_0, Type.Q8_0),
    ({"family": "gpt_oss", "options": WIDE}, Type.MXFP4, Type.Q8_0),
    ({"family": "qwen3_moe", "options": NORMED | WIDE | {"moe_intermediate_size": 32}}, Type.Q5_1, Type.Q4_1),
    (
        {
            "family": "qwen3_5_moe_text",
            "options": WIDE
            | {"moe_intermediate_size": 32, "linear_num_value_heads": 6, "linear_value_head_dim": 32},
        },
        Type.Q8_0,
        Type.Q4_0,
    ),
    (
        {"family": "deepseek_v3", "options": NORMED | {"hidden_size": 128, "moe_intermediate_size": 64}},
        Type.Q5_0,
        Type.Q8_0,
    ),
]


@pytest.mark.parametrize(("made", "experts", "others"), BLOCKS, ids=[made["family"] for made, *_ in BLOCKS])
def test_blocks_equal_a_checkpoint_of_their_numbers(
    made: dict[str, Options], experts: Type, others: Type, tmp_path: Path
) -> None:
    """Also in several files, and with all codes permuted, as their rows and columns are."""
    case, kind = Case(**made, name="blocks"), of_experts(experts, others)
    save(case, tmp_path / "checkpoint")
    path = write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", kind, split_tensors=20)
    assert path.name.startswith("model-00001-of-")
    rounded(tmp_path / "checkpoint", tmp_path / "rounded", kind)
    oracle, tokens = Oracle(tmp_path / "rounded", torch.float32), texts(case)[1]
    with InProcess(path, compiled=True) as ours:
        error = np.abs(ours.logprobs(tokens, [15, *[1] * 5, 40]) - oracle.logprobs(tokens)).max()
    assert error < EXACT
    own = {Type.Q4_0: "q4_0", Type.Q5_0: "q8_0", Type.Q8_0: "q8_0", Type.MXFP4: "mxfp4"}.get(experts)
    source = GgufCheckpoint(path)
    assert source.own_format == own
    assert source.quantized == experts.name


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q8_0, Type.MXFP4], ids=lambda kind: kind.name)
async def test_an_engine_keeps_the_files_codes(kind: Type, start_engine, tmp_path: Path) -> None:
    """By the rule of rounding.py: the same weights, activations rounded alike."""
    case = WHOLE_GROUPS
    save(case, tmp_path / "checkpoint")
    path = write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", of_experts(kind, Type.F32))
    rounded(tmp_path / "checkpoint", tmp_path / "rounded", of_experts(kind, Type.F32))
    format_name = kind.name.lower()
    oracle = QuantizedOracle(tmp_path / "rounded", format_name, "f32")
    many, prompt = drawn_texts(case, 10, 30), texts(case)[0]
    exact = oracle.batch(many)
    check = within(oracle.rounding(many, exact, 8), exact)
    config = EngineConfig(model=path, format=format_name, backbone_dtype="f32", workers=2, tile=64, chunk=32)
    async with start_engine(config) as (_, client):
        await check_policies(client, [("all-host", {})], many, check, prompt, oracle.greedy(prompt, 10), 1e-2)


def test_types_that_one_format_keeps_are_kept_without_loss(tmp_path: Path) -> None:
    """Of experts, and of matrices that are stacked: q8_0 has the codes of Q4_0."""
    save(WHOLE_GROUPS, tmp_path / "checkpoint")

    def kind(name: str, shape: tuple[int, ...]) -> Type:
        mixed = "blk.1.ffn_down_exps" in name or "attn_k" in name
        return of_experts(Type.Q8_0, Type.Q8_0)(name, shape) if mixed else plain(Type.Q4_0)(name, shape)

    path = write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", kind)
    rounded(tmp_path / "checkpoint", tmp_path / "rounded", kind)
    source, (config, meant) = GgufCheckpoint(path), read_checkpoint(tmp_path / "rounded")
    assert source.own_format == "q8_0"
    shape = ExpertShape(2, config["num_local_experts"], 256, 256, 64)
    name = f"/tandem-test-{uuid.uuid4().hex[:12]}"
    builder = StoreBuilder.create(name, StoreManifest("0" * 64, shape, "q8_0", "m"))
    try:
        source.fill(builder, lambda done: None)
        for layer, expert in np.ndindex(2, shape.experts):
            tiles = builder.expert(layer, expert)[: 4 * builder.layout.tile_bytes].reshape(4, -1)
            found = np.concatenate([decode(format_named("q8_0"), tile, 256, 64) for tile in tiles], 1)
            place = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
            gate, up, down = (meant[f"{place}.{w}.weight"].numpy() for w in ("w1", "w3", "w2"))
            assert np.array_equal(found, np.stack((gate, up, down.T)))
        builder.finish()
    finally:
        unlink(name)
    names = [f"model.layers.0.self_attn.{role}_proj.weight" for role in "qkv"]
    with source.tensors() as tensors:
        stacked = tensors.stacked([(name, tuple(meant[name].shape)) for name in names])
    assert isinstance(stacked, Codes)
    assert stacked.format == "q8_0"
    assert np.array_equal(stacked.values(), torch.cat([meant[name] for name in names]).numpy())
    planned = needs(source, EngineConfig(device="cpu"), "q8_0")
    assert (planned.rounded, planned.rest_rounded) == ("", (("Q4_0", "bf16"),))  # the embedding's rows


@pytest.mark.parametrize("gguf_file", [False, True])
def test_a_plan_names_halves_that_become_bf16(gguf_file: bool, tmp_path: Path) -> None:
    case = Case("mixtral", "half", {"head_dim": 10}, **HALF)
    save(case, tmp_path)
    path = write_gguf(tmp_path, tmp_path / "model.gguf", plain(Type.F16)) if gguf_file else tmp_path
    source = open_model(path)
    halves = (("F16", "bf16"),)  # also with int8: the rows of the embedding
    for dtype, experts, rest in (("bf16", "F16", halves), ("f32", "", ()), ("int8", "", halves)):
        planned = needs(source, EngineConfig(device="cpu", backbone_dtype=dtype), dtype)
        assert (planned.rounded, planned.rest_rounded) == (experts, rest)


async def test_an_engine_computes_from_a_file(start_engine, tmp_path: Path) -> None:
    """Q6_K of blocks that no checkpoint had: the numbers are the package's."""
    case = WHOLE_GROUPS
    save(case, tmp_path / "checkpoint")
    kind = of_experts(Type.Q6_K, Type.Q4_K)
    path = write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", kind)
    source = GgufCheckpoint(path)
    with source.tensors() as tensors:
        part = source.locate(1, 2)[0]
        found = tensors.rows(part, 0, part.rows)
    theirs = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_gate_exps.weight")
    numbers = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
    assert np.array_equal(found.bits.view(np.float32), numbers[2])
    tokens = texts(case)[0]
    with InProcess(path, compiled=True) as ours:
        expected = ours.logprobs(tokens, [15, 15])
    # `own`: matrices of Q4_K in int8, whose rounding is far less than what a wrong matrix would do.
    for backbone, bound in (("f32", EXACT), ("own", float(expected.std()) / 20)):
        config = EngineConfig(model=path, format="f32", backbone_dtype=backbone, workers=1, tile=64, chunk=32)
        async with start_engine(config) as (_, client):
            rows = [block.logprobs async for block in client.score(token_ids=tokens, full=True)]
        assert np.abs(np.concatenate(rows) - expected).mean() < bound


# --- files that are no such model ----------------------------------------------------------------------


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        GgufCheckpoint(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "tensors", "words"),
    [
        ({"general.architecture": "bert"}, {}, "the GGUF architecture 'bert' is not supported (only llama,"),
        ({"llama.expert_count": 0}, {}, "no layer has experts"),
        ({"llama.expert_count": None}, {}, "no layer has experts"),
        ({"llama.block_count": None}, {}, "llama.block_count must be a number, it is None"),
        ({"llama.block_count": 1 << 30}, {}, "tensors, and claims 1073741824 layers"),
        ({"llama.block_count": 0}, {}, "it claims 0 layers"),
        ({"llama.attention.head_count": 1 << 20}, {}, "attn_q.weight has the shape"),
        ({"llama.embedding_length": "x"}, {}, "llama.embedding_length must be a number, it is 'x'"),
        ({"llama.attention.head_count": 0}, {}, "num_attention_heads must be a positive int, it is 0"),
        ({"llama.rope.scaling.type": "longrope"}, {}, "RoPE of type 'longrope' is not supported in GGUF"),
        (
            {"llama.rope.dimension_count": 2},
            {},
            "llama.rope.dimension_count is 2 of heads of ",
        ),
        (
            {"llama.rope.scaling.factor": 2, "llama.rope.scaling.attn_factor": 3},
            {},
            "llama.rope.scaling.attn_factor is not supported",
        ),
        ({}, {"token_embd.weight": None}, "it lacks the tensor token_embd.weight"),
        ({}, {"blk.1.attn_q.weight": None}, "it lacks the tensor blk.1.attn_q.weight: download it again"),
        ({}, {"blk.1.attn_q.weight": (8, 8)}, "blk.1.attn_q.weight has the shape [8, 8]; the settings give"),
        (
            {},
            {"blk.0.ffn_up_exps.weight": (5, 8, 8)},
            "blk.0.ffn_up_exps.weight has the shape [5, 8, 8]; the",
        ),
        ({}, {"blk.0.attn_q.bias": (8,)}, "the tensor blk.0.attn_q.bias is not one of this architecture"),
        ({}, {"rope_freqs.weight": (4,)}, "the tensor rope_freqs.weight is not one of this architecture"),
    ],
)
def test_a_file_that_is_no_such_model_is_refused(
    changes: Options, tensors: dict[str, tuple[int, ...] | None], words: str, tmp_path: Path
) -> None:
    save(Case("mixtral", "refused"), tmp_path / "checkpoint")
    path = write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf")
    assert words in refusal(rewritten(path, changes, tensors))


def test_layers_that_predict_further_tokens_are_left_aside(tmp_path: Path) -> None:
    case = Case("glm4_moe", "more", NORMED)
    save(case, tmp_path / "checkpoint")
    path = write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf")
    more = {"blk.3.nextn.eh_proj.weight": (8, 8), "blk.3.attn_q.weight": (8, 8)}
    counts: Options = {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    assert GgufCheckpoint(rewritten(path, counts, more)).config["num_hidden_layers"] == 3


@pytest.mark.parametrize("key", ["scaling.factor", "scale_linear"])
def test_a_factor_of_positions_without_a_type_is_linear(key: str, tmp_path: Path) -> None:
    """As in llama.cpp; older files have the second key."""
    save(Case("mixtral", "scaled"), tmp_path / "checkpoint")
    path = write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf")
    changed = GgufCheckpoint(rewritten(path, {f"llama.rope.{key}": 4}, {}))
    assert changed.config["rope_scaling"] == {"rope_type": "linear", "factor": 4}


def each_alone(name: str, experts: np.ndarray) -> dict[str, np.ndarray]:
    """blk.N.ffn_gate.E.weight, as of 2023."""
    return {name.replace("_exps", f".{number}"): expert for number, expert in enumerate(experts)}


def gates_above(name: str, experts: np.ndarray) -> dict[str, np.ndarray]:
    """blk.N.ffn_gate_up_exps.weight, of which these are gates and zeros."""
    if "ffn_up" in name:
        return {}
    both = np.concatenate([experts, np.zeros_like(experts)], axis=1)
    return {name.replace("gate", "gate_up"): both} if "gate" in name else {name: experts}


@pytest.mark.parametrize("form", [each_alone, gates_above])
def test_experts_in_other_tensors(form: Callable[..., dict[str, np.ndarray]], tmp_path: Path) -> None:
    save(Case("mixtral", "other"), tmp_path / "checkpoint")
    path = write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf")
    _, tensors = read_checkpoint(tmp_path / "checkpoint")
    reader, other = gguf.GGUFReader(path), tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(other, "llama")
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        for name, part in (
            form(tensor.name, data) if "_exps" in tensor.name else {tensor.name: data}
        ).items():
            writer.add_tensor(name, part)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GgufCheckpoint(other)
    with source.tensors() as opened:
        gate, up, down = (numbers_of(opened.rows(part, 0, part.rows)) for part in source.locate(2, 4))
    w1, w3, w2 = (
        tensors[f"model.layers.2.block_sparse_moe.experts.4.{name}.weight"].numpy()
        for name in ("w1", "w3", "w2")
    )
    assert np.array_equal(gate, w1)
    assert np.array_equal(up, w3 if form is each_alone else np.zeros_like(w3))
    assert np.array_equal(down, w2)
