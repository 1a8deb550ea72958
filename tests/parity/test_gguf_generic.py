"""GGUF files of families without a backbone of our own equal the models that they were converted from, or
models of the numbers that their blocks mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_files import FLOATS, rewritten, write_gguf
from oracle import EXACT
from tiny_families import described, tiny_model
from torch import nn
from transformers import PreTrainedModel

from pipeline.checkpoint.converted import conversion_of
from pipeline.checkpoint.converted_experts import ConvertedExperts
from pipeline.checkpoint.decoder import decoder_of
from pipeline.checkpoint.open import ConvertedCheckpoint, open_model
from pipeline.checkpoint.reader import TensorReader, numbers_of
from pipeline.config import EngineConfig
from pipeline.errors import ModelError
from pipeline.models import facts
from shm.codes import Codes

TOKENS = [(i * 5 + 3) % 120 + 3 for i in range(20)]
SHARED_VALUES = {
    "attention_k_eq_v": True,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 20.0,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gemma4", {"global_head_dim": 32}),
    ("gemma4", SHARED_VALUES),
    ("dots1", {"routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 1}),
    ("ernie4_5_moe", {"moe_layer_interval": 2}),
    ("hunyuan_v1_moe", {}),
    ("lfm2_moe", {}),
]
BLOCKS = {"moe_intermediate_size": 64, "global_head_dim": 32}  # whole ones


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_ask", described)


def saved(family: str, changes: dict[str, Any], folder: Path) -> PreTrainedModel:
    """A model in which no norm is one, and no bias zero, and its checkpoint."""
    model = tiny_model(family, **changes)
    vectors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in vectors:
        if (tensor.dim() == 1 and name in model.state_dict()) or name.endswith("correction_bias"):
            nn.init.uniform_(tensor, 0.5, 1.5)
    model.save_pretrained(folder, save_original_format=True)
    return model


def kind(name: str, shape: tuple[int, ...]) -> Type:
    """Q4_0 for experts, Q8_0 for attention and the table of layers' inputs, F32 for the others."""
    if "_exps.weight" in name:
        return Type.Q4_0
    rounded = "attn_" in name or "per_layer_token" in name
    return Type.Q8_0 if rounded and len(shape) == 2 else FLOATS(name, shape)


@torch.no_grad()
def round_as_kind(model: PreTrainedModel) -> None:
    """Rows are quantized alone, so where they lie does not matter."""
    for name, tensor in model.named_parameters():
        experts = ".experts." in name
        rounded = ".self_attn." in name or "embed_tokens_per_layer" in name
        if experts or (rounded and tensor.dim() == 2):
            type_ = Type.Q4_0 if experts else Type.Q8_0
            data = gguf.quants.quantize(tensor.numpy(), type_)
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(data, type_)).reshape(tensor.shape))


@torch.no_grad()
def model_of(source: ConvertedCheckpoint) -> tuple[PreTrainedModel, set[str]]:
    """The model of transformers with what is read, and the formats of the experts' codes."""
    kind, config = decoder_of(source.config)
    model = kind._from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with source.tensors() as tensors:
        unread, _ = model.load_state_dict({name: tensors[name] for name in tensors}, strict=False)
    assert all(".experts." in name or name == "lm_head.weight" for name in unread)
    headers, formats = source._index.headers, set[str]()
    conversion = conversion_of(source.config, [*headers])
    with TensorReader(source._index) as reader, ConvertedExperts(conversion, reader, headers) as experts:
        for layer, name in enumerate(conversion.names):
            module = model.get_submodule(name)
            for expert in range(conversion.count):
                parts = [experts.rows(part, 0, part.rows) for part in experts.locate(layer, expert)]
                gate, up, down = (torch.from_numpy(numbers_of(part)) for part in parts)
                module.gate_up_proj[expert] = torch.cat([gate, up])
                module.down_proj[expert] = down
                formats |= {part.format for part in parts if isinstance(part, Codes)}
    return model, formats


@torch.no_grad()
def logprobs(model: PreTrainedModel) -> np.ndarray:
    logits = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    return torch.log_softmax(logits, -1).numpy()


@pytest.mark.parametrize(("family", "changes"), CASES, ids=[family for family, _ in CASES])
def test_a_file_equals_its_checkpoint(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = saved(family, changes, tmp_path / "checkpoint")
    source = open_model(write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf"))
    assert isinstance(source, ConvertedCheckpoint)
    assert (source.own_format, source.own_matrices, source.note) == (None, {}, "")
    assert source.name == str(tmp_path / "model.gguf")
    assert np.abs(logprobs(model_of(source)[0]) - logprobs(model)).max() < EXACT


@pytest.mark.parametrize("family", ["gemma4", "lfm2_moe"])
def test_blocks_are_read_as_codes(family: str, tmp_path: Path) -> None:
    changes = BLOCKS if family == "gemma4" else {"moe_intermediate_size": 64}
    model = saved(family, changes, tmp_path / "checkpoint")
    source = open_model(write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", kind))
    assert isinstance(source, ConvertedCheckpoint)
    assert (source.own_format, source.quantized) == ("q4_0", "Q4_0")
    assert {matrix.format for matrix in source.own_matrices.values()} == {"q8_0"}
    assert not any("embed_tokens_per_layer" in name for name in source.own_matrices)  # its table is on disk
    round_as_kind(model)
    read, formats = model_of(source)
    assert formats == {"q4_0"}
    assert np.abs(logprobs(read) - logprobs(model)).max() < EXACT


async def test_an_engine_computes_from_a_file(start_engine, tmp_path: Path) -> None:
    model = saved("gemma4", BLOCKS, tmp_path / "checkpoint")
    path = write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", kind)
    round_as_kind(model)
    expected = logprobs(model)
    config = EngineConfig(model=path, format="f32", backbone_dtype="f32", workers=1, chunk=16)
    async with start_engine(config) as (_, client):
        rows = [block.logprobs async for block in client.score(token_ids=TOKENS, full=True)]
    assert np.abs(np.concatenate(rows) - expected).max() < EXACT


@pytest.mark.parametrize(
    ("changes", "tensors", "words"),
    [
        ({}, {"rope_freqs.weight": None}, "it lacks the tensor rope_freqs.weight: download it again"),
        ({}, {"rope_freqs.weight": (16,)}, "rope_freqs.weight stretches the rotary embedding"),
        ({}, {"blk.1.attn_q.weight": None}, "no tensor gives the parameter model.layers.1.self_attn.q_proj"),
        ({}, {"blk.1.attn_q.weight": (8, 8)}, "self_attn.q_proj.weight would get the shape [8, 8]"),
        ({}, {"blk.1.ffn_gate_exps.weight": (8, 8, 8)}, "blk.1.ffn_gate_exps.weight is not one of this"),
        ({"gemma4.attention.head_count_kv": [1]}, {}, "head_count_kv must be a number for each of 6 layers"),
    ],
)
def test_a_file_that_is_no_such_model_is_refused(
    changes: dict[str, Any], tensors: dict[str, tuple[int, ...] | None], words: str, tmp_path: Path
) -> None:
    saved("gemma4", {"global_head_dim": 32}, tmp_path / "checkpoint")
    path = rewritten(write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf"), changes, tensors)
    with pytest.raises(ModelError) as caught:
        open_model(path)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
