"""Checkpoints of any family and layout give each expert and each parameter bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_families import family_names, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.checkpoint.converted import (
    ConvertedExperts,
    ConvertedTensors,
    check_headers,
    conversion_of,
)
from pipeline.checkpoint.index import CheckpointIndex
from pipeline.checkpoint.reader import RawTensor, TensorReader
from pipeline.errors import ModelError
from pipeline.generic.describe import decoder_of, without_memory
from pipeline.generic.skeleton import MATRICES, experts_of
from pipeline.models.facts import Headers

# Fused, each for itself, joined, transposed, interleaved; with biases; ungated; beside other parts.
SAMPLE = (
    *("aria", "deepseek_v3", "ernie4_5_vl_moe", "gpt_oss"),
    *("granitemoe", "minimax_m2", "nemotron_h", "qwen3_next"),
)
# These have no model of text whose experts can be computed outside it.
NO_MODEL = {"diffusion_gemma", "muse_spark", "openai_privacy_filter", "qwen3_omni_moe"}
EVERY = [pytest.param(f, marks=pytest.mark.slow) for f in family_names() if f not in {*SAMPLE, *NO_MODEL}]


def saved(model: PreTrainedModel, folder: Path, original: bool = False) -> Path:
    model.save_pretrained(folder, save_original_format=original)
    return folder


def headers_of(index: CheckpointIndex) -> Headers:
    return {name: (entry.dtype, entry.shape) for name, entry in index.tensors.items()}


def check_folder(folder: Path) -> str:
    """As the child process that checks a checkpoint's headers."""
    index = CheckpointIndex.open(folder)
    return check_headers(without_memory(*decoder_of(index.config)), headers_of(index))


def read_all(folder: Path) -> tuple[dict[str, Tensor], list[list[list[np.ndarray]]]]:
    """The parameters by name, and the matrices and biases of each layer's experts, float32."""
    index = CheckpointIndex.open(folder)
    headers = headers_of(index)
    conversion = conversion_of(index.config, [*headers])
    with TensorReader(index) as reader:
        tensors = ConvertedTensors(conversion, reader, headers)
        parameters = {name: tensors[name] for name in tensors}
        with ConvertedExperts(conversion, reader, headers) as experts:
            places = [
                [experts.locate(layer, e) for e in range(conversion.count)]
                for layer in range(len(conversion.modules))
            ]
            numbers = [
                [[numbers_of(experts.rows(part, 0, part.rows)) for part in expert] for expert in layer]
                for layer in places
            ]
    return parameters, numbers


def numbers_of(raw: RawTensor) -> np.ndarray:
    if raw.dtype == "F32":
        return raw.bits.view(np.float32)
    return (raw.bits.astype(np.uint32) << 16).view(np.float32)


def expected_expert(module: Any, e: int) -> list[np.ndarray]:
    """Gate, up, down and biases, by the definition of each layout."""
    wide = (module.gate_up_proj if module.has_gate else module.up_proj)[e]
    down = module.down_proj[e]
    if module.is_transposed:
        wide, down = wide.T, down.T
    parts = [wide]
    if module.has_bias:
        parts.append((module.gate_up_proj_bias if module.has_gate else module.up_proj_bias)[e][None].T)
    found = []
    for part in parts:
        if not module.has_gate:
            halves = [part]
        elif module.is_concatenated:
            halves = [*part.chunk(2)]
        else:
            halves = [part[0::2], part[1::2]]
        found.append(halves)
    matrices = [*found[0], down] + [bias.T for biases in found[1:] for bias in biases]
    return [matrix.detach().float().numpy() for matrix in matrices]


def check_equal(model: PreTrainedModel, folder: Path) -> None:
    parameters, numbers = read_all(folder)
    decoder = model.get_decoder()
    modules = [module for name, module in experts_of(decoder) if "vision" not in name]
    assert len(numbers) == len(modules)
    for module, experts in zip(modules, numbers, strict=True):
        for e, matrices in enumerate(experts):
            for found, expected in zip(matrices, expected_expert(module, e), strict=True):
                np.testing.assert_array_equal(found, expected)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    names = {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items()}
    routed = {id(module): module for module in modules}
    compared = 0
    for part in (decoder, model.get_output_embeddings()):
        for owner in () if part is None else part.modules():
            own = {**owner._parameters, **owner._buffers}
            for key, tensor in own.items():
                name = names.get(id(tensor))
                if name is None or name in tied or (id(owner) in routed and key in MATRICES):
                    continue
                assert torch.equal(parameters[name].to(tensor.dtype), tensor), name
                compared += 1
    assert compared > 10


@pytest.mark.parametrize("original", [False, True], ids=["fused", "original"])
@pytest.mark.parametrize("family", [*SAMPLE, *EVERY])
def test_every_expert_and_parameter_is_the_models(family: str, original: bool, tmp_path: Path) -> None:
    model = tiny_model(family)
    check_equal(model, saved(model, tmp_path, original))
    check_folder(tmp_path)
