"""Quantized matrices mean bit by bit what their packers say, and native formats keep their codes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import packers
import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pipeline.checkpoint.headers import DTYPE_BYTES, TensorEntry, read_shard
from pipeline.checkpoint.index import CheckpointIndex
from pipeline.checkpoint.quantized import find_packed
from pipeline.checkpoint.reader import TensorReader, numbers_of
from pipeline.errors import ModelError
from pipeline.models.architecture import TensorRows
from shm.codes import Codes

INT4 = {"num_bits": 4, "type": "int"}
INT8 = {"num_bits": 8, "type": "int"}
FP8 = {"num_bits": 8, "type": "float"}
PACK, INTS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"
CHANNEL = {"strategy": "channel"}
G32, G64, G128 = "int4-f16-g32", "int4-f16", "int4-f16-g128"


def grouped(size: int) -> dict[str, Any]:
    return {"strategy": "group", "group_size": size}


PACKINGS = {
    **{f"awq-{g}": packers.awq(g, native) for g, native in ((32, G32), (64, G64), (128, G128), (-1, G128))},
    "awq-16": packers.awq(16, None),
    "awq-256": packers.awq(256, G128),
    **{f"gptq-{g}": packers.gptq(g, native, sym=False) for g, native in ((32, G32), (128, G128), (-1, G128))},
    "gptq-sym": packers.gptq(64, G64),
    "gptq-v2": packers.gptq(128, G128, version="gptq_v2", sym=False),
    "gptq-8": packers.gptq(32, "q8_0", bits=8),
    "gptq-8-asym": packers.gptq(32, None, bits=8, sym=False),
    "gptq-act": packers.gptq(32, None, act=True),
    "int4-32": packers.compressed(PACK, G32, **INT4, **grouped(32)),
    "int4-128": packers.compressed(PACK, G128, torch.float16, **INT4, **grouped(128)),
    "int4-asym": packers.compressed(PACK, G64, **INT4, **grouped(64), symmetric=False),
    "int4-channel": packers.compressed(PACK, G128, **INT4, **CHANNEL),
    "int4-f32": packers.compressed(PACK, None, torch.float32, **INT4, **grouped(32)),
    "int8-packed": packers.compressed(PACK, "q8_0", **INT8, **CHANNEL),
    "int8-128": packers.compressed(PACK, "q8_0", **INT8, **grouped(128)),
    "int8": packers.compressed(INTS, "q8_0", **INT8, **CHANNEL),
    "int8-tensor": packers.compressed(INTS, "q8_0", **INT8, strategy="tensor"),
    "int8-asym": packers.compressed(INTS, None, **INT8, **CHANNEL, symmetric=False),
    "fp8-tensor": packers.compressed(FLOATS, "fp8", **FP8, strategy="tensor"),
    "fp8-channel": packers.compressed(FLOATS, None, **FP8, **CHANNEL),
    "fp8-block": packers.compressed(FLOATS, "fp8", **FP8, strategy="block", block_structure=[128, 128]),
    "mxfp8": packers.compressed("mxfp8-quantized", None, **FP8, **grouped(32), scale_dtype=torch.uint8),
    "nvfp4": packers.compressed(
        "nvfp4-pack-quantized", "nvfp4", num_bits=4, type="float", strategy="tensor_group", group_size=16
    ),
    "mxfp4": packers.compressed("mxfp4-pack-quantized", "mxfp4", num_bits=4, type="float", **grouped(32)),
    "modelopt": packers.modelopt_nvfp4(),
    "blocks": packers.fp8((128, 128), "fp8"),
    "blocks-bf16": packers.fp8((128, 128), "fp8", torch.bfloat16),
    "blocks-64": packers.fp8((64, 64), None),
    "one-block": packers.fp8(None, "fp8"),
}
SHAPE = 200, 384  # no multiple of 128 rows


def written(folder: Path, settings: dict[str, Any], tensors: packers.Tensors) -> CheckpointIndex:
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    save_file(tensors, folder / "model.safetensors")
    return CheckpointIndex.open(folder)


@pytest.mark.parametrize("name", PACKINGS)
def test_a_matrix_means_what_its_packer_says(name: str, tmp_path: Path) -> None:
    packing = PACKINGS[name]
    numbers = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)) / 8
    tensors, meant = packing.pack("a.b", numbers)
    assert 0.0005 < (meant - numbers).std() < 0.12  # the packer does what it should
    index = written(tmp_path, packing.settings, tensors | {"a.norm.weight": torch.ones(3)})
    assert index.headers == {"a.b.weight": ("F32", SHAPE), "a.norm.weight": ("F32", (3,))}
    assert index.packed["a.b.weight"].format == packing.format
    part = TensorRows("a.b.weight", SHAPE, 0, SHAPE[0])
    with TensorReader(index) as reader:
        for lo, hi in ((0, 200), (0, 16), (16, 144), (133, 134), (200, 200)):
            rows = reader.rows(part, lo, hi)
            if hi - lo == SHAPE[0]:
                assert (rows.format if isinstance(rows, Codes) else None) == packing.format
            tolerance = (
                1e-6 if name == "nvfp4" else 0
            )  # there a quotient is rounded, which native tiles have not
            np.testing.assert_allclose(numbers_of(rows), meant[lo:hi].numpy(), rtol=tolerance)
        stacked = reader.stacked([("a.b.weight", SHAPE)] * 2)
        assert isinstance(stacked, Codes) == (packing.format is not None)
        np.testing.assert_array_equal(numbers_of(stacked), np.concatenate([numbers_of(stacked)[:200]] * 2))


# --- against transformers' own operations -----------------------------------------------------------------


def test_blocks_mean_what_transformers_dequantizes(tmp_path: Path) -> None:
    tensors, _ = PACKINGS["blocks"].pack("a", torch.randn(256, 384))
    stored, scales = tensors["a.weight"], tensors["a.weight_scale_inv"]
    expected = Fp8Dequantize(None)._dequantize_one(stored, scales, torch.float32)
    with TensorReader(written(tmp_path, PACKINGS["blocks"].settings, tensors)) as reader:
        np.testing.assert_array_equal(reader.float32("a.weight", (256, 384)), expected.numpy())


def test_experts_in_mxfp4_mean_what_transformers_dequantizes(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    blocks = torch.randint(256, (3, 40, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 40, 2), generator=generator, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).mT  # [3, 40, 64]
    tensors = {"a.up_blocks": blocks, "a.up_scales": scales}
    index = written(tmp_path, {"quant_method": "mxfp4"}, tensors)
    assert index.headers == {"a.up": ("F32", (3, 64, 40))}
    with TensorReader(index) as reader:
        for expert in range(3):
            rows = reader.packed_rows("a.up", 8, 40, expert)
            assert isinstance(rows, Codes)
            assert rows.format == "mxfp4"
            np.testing.assert_array_equal(rows.values(), expected[expert, 8:].numpy())


def test_matrices_of_several_kinds_in_one_checkpoint(tmp_path: Path) -> None:
    """Which scheme a matrix has follows from its tensors."""
    names = ("int4-32", "int8-packed", "fp8-channel")
    groups = {name: PACKINGS[name].settings["config_groups"]["group_0"] for name in names}
    settings = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    tensors: packers.Tensors = {"plain.weight": torch.ones(4, 4), "a.k_scale": torch.ones(1)}
    meant = {}
    for name in names:
        packed, meant[name] = PACKINGS[name].pack(name, torch.randn(64, 128))
        tensors |= packed
    with TensorReader(written(tmp_path, settings | {"ignore": ["plain"]}, tensors)) as reader:
        for name in names:
            found = reader.float32(f"{name}.weight", (64, 128))
            np.testing.assert_array_equal(found, meant[name].numpy())
        assert (reader.float32("plain.weight", (4, 4)) == 1).all()


def test_settings_of_modelopt_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    tensors, meant = PACKINGS["modelopt"].pack("a", torch.randn(32, 64))
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    with TensorReader(written(tmp_path, {}, tensors)) as reader:
        np.testing.assert_array_equal(reader.float32("a.weight", (32, 64)), meant.numpy())


# --- what is not read -------------------------------------------------------------------------------------

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
CT = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def schemes(**weights: Any) -> dict[str, Any]:
    return CT | {"config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        *(
            ({"quant_method": m}, f"quantized by {m}")
            for m in ("bitsandbytes", "hqq", "quanto", "eetq", "aqlm")
        ),
        ({"quant_method": None, "bits": 4}, "quantized by an unknown method"),
        ({"load_in_4bit": True}, "quantized by an unknown method"),
        (AWQ | {"version": "gemv"}, "awq with layout 'gemv'"),
        (AWQ | {"bits": 8}, "awq with bits 8"),
        (AWQ | {"group_size": 0}, "awq with group_size 0"),
        (AWQ | {"group_size": 1 << 40}, "awq with group_size"),
        (AWQ | {"group_size": True}, "awq with group_size"),
        *((GPTQ | {"bits": bits}, f"gptq with bits {bits}") for bits in (2, 3)),
        (GPTQ | {"checkpoint_format": "marlin"}, "gptq with layout 'marlin'"),
        (schemes(num_bits=3), "with num_bits 3"),
        (schemes(num_bits=4, group_size=-5), "with group_size -5"),
        (CT | {"format": "marlin-24"}, "with format 'marlin-24'"),
        (CT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "with sparsity_config"),
        (CT | {"transform_config": {"config_groups": {"u": {}}}}, "with transform_config"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "modelopt with quant_algo 'W4A8_AWQ'"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "fp8 with weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "fp8 with weight_block_size"),
        ("awq", "is not a JSON object"),
    ],
)
def test_other_quantizations_are_refused(settings: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as failure:
        written(tmp_path, settings, {"a.weight": torch.ones(8, 8)})
    assert words in str(failure.value)
    assert "\n" not in str(failure.value)


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def fp8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("packing", "changes", "words"),
    [
        ("awq-32", {"a.scales": None}, "lacks the tensor a.scales"),
        ("awq-32", {"a.qzeros": None}, "lacks the tensor a.qzeros"),
        ("awq-32", {"a.scales": torch.ones(4, 8)}, "a.scales is F32 [4, 8], not F16 or BF16 or F32 [2, 32]"),
        ("awq-32", {"a.qweight": int32(65, 4)}, "a.qzeros is I32 [2, 4], not I32 [3, 4]"),
        ("awq-32", {"a.qweight": int32(2, 2, 2)}, "not I32 2 dimensions"),
        ("awq-32", {"a.qweight": int32(0, 4)}, "a.qweight is I32 [0, 4]"),
        ("awq-32", {"a.weight": torch.ones(2)}, "a.weight is there twice"),
        ("gptq-32", {"a.g_idx": torch.zeros(48, dtype=torch.int32)}, "has 5.33 bits a weight"),
        ("gptq-32", {"a.g_idx": torch.zeros(128, dtype=torch.int32)}, "has 2 bits a weight"),
        ("int4-32", {"a.weight_scale": None}, "lacks the tensor a.weight_scale"),
        ("int4-32", {"a.weight_scale": torch.ones(32, 5)}, "fits 0 of the config_groups"),
        ("int4-32", {"a.weight_scale": torch.ones(16, 2)}, "a.weight_scale does not fit 32 x 64 weights"),
        ("int4-32", {"a.weight_g_idx": torch.ones(64)}, "gives inputs another order"),
        ("int4-asym", {"a.weight_zero_point": int32(3, 1)}, "a.weight_zero_point is I32 [3, 1]"),
        ("int8", {"a.weight_scale": torch.ones(31, 1)}, "does not fit 32 x 64 weights"),
        ("blocks", {"a.weight_scale_inv": None}, "lacks the tensor a.weight_scale_inv"),
        ("blocks", {"a.weight_scale_inv": torch.ones(3, 1)}, "[3, 1], which does not fit [32, 64] weights"),
        ("blocks", {"a.weight": fp8(2, 32, 64)}, "is F8_E4M3 [2, 32, 64], not F8_E4M3 2 dimensions"),
        ("nvfp4", {"a.weight_global_scale": None}, "lacks the tensor a.weight_global_scale"),
        ("nvfp4", {"a.weight_global_scale": torch.ones(2)}, "has the shape [2], not one number"),
        ("modelopt", {"a.weight_scale": torch.ones(32, 4)}, "is F32 [32, 4], not U8 or F8_E8M0 or F8_E4M3"),
        ("mxfp4", {"a.weight_scale": torch.ones(32, 3, dtype=torch.uint8)}, "is U8 [32, 3]"),
    ],
)
def test_tensors_that_do_not_fit_are_one_line(
    packing: str, changes: dict, words: str, tmp_path: Path
) -> None:
    tensors, _ = PACKINGS[packing].pack("a", torch.randn(32, 64))
    tensors = {name: t for name, t in (tensors | changes).items() if t is not None}
    with pytest.raises(ModelError) as failure:
        written(tmp_path, PACKINGS[packing].settings, tensors)
    assert words in str(failure.value)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("factor", [0.0, float("nan"), float("inf"), -1.0])
def test_a_factor_without_sense_is_refused(factor: float, tmp_path: Path) -> None:
    tensors, _ = PACKINGS["modelopt"].pack("a", torch.randn(32, 64))
    tensors["a.weight_scale_2"] = torch.tensor(factor)
    index = written(tmp_path, PACKINGS["modelopt"].settings, tensors)
    with TensorReader(index) as reader, pytest.raises(ModelError, match="the scale of a whole matrix is"):
        reader.float32("a.weight", (32, 64))


def test_an_order_beyond_the_groups_is_refused(tmp_path: Path) -> None:
    tensors, _ = PACKINGS["gptq-act"].pack("a", torch.randn(32, 64))
    tensors["a.g_idx"][3] = 2
    index = written(tmp_path, PACKINGS["gptq-act"].settings, tensors)
    with TensorReader(index) as reader, pytest.raises(ModelError, match="a g_idx is not one of 2 groups"):
        reader.float32("a.weight", (32, 64))


DTYPES = ("U8", "I8", "I32", "I64", "F16", "BF16", "F32", "F8_E4M3", "F8_E8M0", "F64")


def entry_of(dtype: str, shape: list[int]) -> TensorEntry:
    return TensorEntry(Path("a"), dtype, tuple(shape), 0, DTYPE_BYTES[dtype] * math.prod(shape))


@pytest.mark.parametrize("times", [3000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_mutated_headers_are_refused_or_read(times: int, tmp_path: Path) -> None:
    """Whatever names, dtypes and shapes say: a ModelError, or matrices no larger than their files allow."""
    random = Random(3)
    headers = {}
    for packing in PACKINGS:
        (tmp_path / packing).mkdir()
        tensors, _ = PACKINGS[packing].pack("a", torch.randn(32, 256))
        save_file(tensors, tmp_path / packing / "a.safetensors")
        headers[packing] = read_shard(tmp_path / packing / "a.safetensors").tensors
    refused = 0
    for number in range(times):
        packing = random.choice([*PACKINGS])
        entries = dict(headers[packing])
        for name in random.sample([*entries], random.randint(1, len(entries))):
            entry = entries.pop(name)
            shape = [random.choice((size, size, size + 1, 2 * size, 0, 1, 1 << 40)) for size in entry.shape]
            shape = random.choice((shape, shape, shape[1:], [*shape, 4]))
            name = random.choice((name, name, name, f"{name}_scale", name.replace("weight", "other")))
            entries[name] = entry_of(random.choice((entry.dtype, random.choice(DTYPES))), shape)
        try:
            packed, _ = find_packed(PACKINGS[packing].settings, entries)
        except ModelError:
            refused += 1
            continue
        stored = sum(entry.nbytes for entry in entries.values())
        for matrix in packed.values():
            assert math.prod(matrix.shape) <= 8 * stored, number
    assert 0.3 * times < refused < 0.997 * times
