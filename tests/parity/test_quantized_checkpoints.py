"""Quantized checkpoints equal transformers on the numbers that they mean, whatever format their experts are
kept in that has these numbers exactly."""

from __future__ import annotations

import json
from pathlib import Path

import packers
import pytest
import torch
from comparison import check_policies, exactly, within
from exact_presets import costs
from families import Case, drawn_texts, save, texts
from oracle import EXACT, Oracle
from packers import Packing
from quantized_oracle import QuantizedOracle, matrices
from safetensors.torch import load_file, save_file
from tiny_families import tiny_model

from launch.equality import rounding_bound
from pipeline.config import EngineConfig

NEW = 8  # tokens of a greedy continuation
TEXTS, SEEDS = 21, 16  # texts, and noises that show what rounding may do
POLICIES = [(name, dict[str, str]()) for name in ("all-host", "on-demand")]
EVEN = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64}  # whole words and groups
OWN = [  # of families of our own, in the layout of transformers 4
    (Case("mixtral", "awq", EVEN, shards=False), packers.awq(32, "int4-f16-g32")),
    (Case("qwen3_moe", "gptq", EVEN, shards=False), packers.gptq(32, None, act=True)),
    (Case("deepseek_v3", "fp8", EVEN, shards=False), packers.fp8((128, 128), "fp8", torch.bfloat16)),
    (Case("glm4_moe", "nvfp4", EVEN, shards=False), packers.modelopt_nvfp4()),
]


def quantize(folder: Path, packing: Packing) -> tuple[Path, Path]:
    """A folder with the checkpoint in `folder` where its experts and attention are quantized, and one with
    the numbers that this means."""
    (file,) = folder.glob("*.safetensors")
    config = json.loads((folder / "config.json").read_bytes())
    packed, meant = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    number = 0
    for name, tensor in load_file(file).items():
        meant[name] = tensor
        quantized = ".experts." in name or "_proj" in name
        if quantized and tensor.dim() == 2 and not any(size % 32 for size in tensor.shape):
            parts, meant[name] = packing.pack(name.removesuffix(".weight"), tensor.float())
            packed |= parts
            number += 1
        else:
            packed[name] = tensor
    assert number > 20
    folders = folder / "quantized", folder / "meant"
    for to, tensors, more in zip(
        folders, (packed, meant), ({"quantization_config": packing.settings}, {}), strict=True
    ):
        to.mkdir()
        (to / "config.json").write_text(json.dumps(config | more))
        save_file(tensors, to / "model.safetensors")
    return folders


async def check(folder: Path, packing: Packing, tokens: list[tuple[int, ...]], start_engine) -> None:
    quantized, meant = quantize(folder, packing)
    oracle = Oracle(meant, torch.float32)
    same, greedy = exactly([oracle.logprobs(text) for text in tokens], EXACT), oracle.greedy(tokens[0], NEW)
    config = EngineConfig(
        model=quantized,
        format="f32",
        backbone_dtype="f32",
        workers=0,
        expert_cache=0.3,
        chunk=12,
        costs=costs(quantized),
    )
    async with start_engine(config) as (_, client):
        await check_policies(client, POLICIES, tokens, same, tokens[0], greedy, 2 * EXACT, alone=1)


@pytest.mark.parametrize(
    ("case", "packing"),
    [
        pytest.param(*one, id=str(one[0]), marks=() if one in (OWN[1], OWN[3]) else pytest.mark.slow)
        for one in OWN
    ],
)
async def test_a_family_of_our_own_equals_transformers(
    case: Case, packing: Packing, start_engine, tmp_path: Path
) -> None:
    save(case, tmp_path)
    await check(tmp_path, packing, texts(case), start_engine)


@pytest.mark.slow
async def test_any_family_equals_transformers(start_engine, tmp_path: Path) -> None:
    tiny_model("dots1").save_pretrained(tmp_path, save_original_format=True)
    tokens = [tuple((i * 5 + 3) % 120 + 3 for i in range(30))]
    groups = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
    packing = packers.compressed("pack-quantized", "int4-f16-g32", **groups)
    await check(tmp_path, packing, tokens, start_engine)


async def test_experts_are_computed_as_the_file_has_them(start_engine, tmp_path: Path) -> None:
    """Nothing is said of formats: there is no second rounding."""
    case, packing = OWN[0]
    save(case, tmp_path)
    quantized, meant = quantize(tmp_path, packing)
    oracle = QuantizedOracle(meant, "int4-f16-g32", "f32")
    for module in oracle.experts:
        exact = zip(*matrices(module), strict=True)
        module.decoded[:] = [torch.stack((gate, up, down.T)) for gate, up, down in exact]
    many, prompt = drawn_texts(case, TEXTS, 50), texts(case)[0]
    expected = oracle.batch(many)
    check = within(oracle.rounding(many, expected, SEEDS), expected)
    greedy, bound = oracle.greedy(prompt, NEW), rounding_bound("int4", "f32")
    config = EngineConfig(model=quantized, backbone_dtype="f32", workers=1, expert_cache=0.5, chunk=32)
    async with start_engine(config) as (_, client):
        await check_policies(client, POLICIES, many, check, prompt, greedy, bound)
