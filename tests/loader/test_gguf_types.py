"""Each type of GGML is read as the gguf package reads it, bit for bit, whole, by rows, and as codes."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES
from gguf_files import SCALES, encoded

from pipeline.checkpoint.gguf_file import read_gguf
from pipeline.checkpoint.gguf_names import Source
from pipeline.checkpoint.gguf_reader import CODED, TYPES, GgufReader
from pipeline.checkpoint.index import BITS, CheckpointIndex
from pipeline.checkpoint.reader import RawTensor, numbers_of
from pipeline.models.architecture import TensorRows
from shm.codes import Codes

EXPERTS, OUTPUTS, INPUTS = 3, 5, 512
# What the package could dequantize and is not read: NVFP4 has factors in other tensors.
NOT_READ = {"NVFP4"}


@pytest.fixture
def numbers() -> np.ndarray:
    drawn = np.random.default_rng(5).standard_normal((EXPERTS, OUTPUTS, INPUTS)).astype(np.float32)
    drawn[0, 0] = 0  # scales of 0
    drawn[1, 1] *= 1e-6  # scales below the normal numbers of binary16
    return drawn


def written(path: Path, numbers: np.ndarray, kind: Type, data: np.ndarray | None = None) -> np.ndarray:
    """Write one tensor `x` of this type; its bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    data = encoded("x", numbers, kind) if data is None else data
    writer.add_tensor("x", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return data


def reader_of(path: Path, source: Source | None = None) -> GgufReader:
    shard = read_gguf(path).shard
    (entry,) = shard.tensors.values()
    flat = vars(entry) | {"shape": (int(np.prod(entry.shape[:-1])), entry.shape[-1])}
    index = CheckpointIndex(path.parent, {}, (shard,), {"x": type(entry)(**flat)})
    return GgufReader(index, lambda name, shape: source or Source((("x", shape),)))


def test_every_type_that_the_package_knows_is_read() -> None:
    known = set()
    for kind, (block, size) in GGML_QUANT_SIZES.items():
        try:
            gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        known.add(kind.name)
        assert block > 1 or kind.name in BITS
    assert known - NOT_READ == set(TYPES)


@pytest.mark.parametrize("name", TYPES)
def test_numbers_are_the_packages(name: str, numbers: np.ndarray, tmp_path: Path) -> None:
    kind = Type[name]
    data = written(tmp_path / "model.gguf", numbers, kind)
    with np.errstate(all="ignore"):  # IQ1_M has random scales
        expected = gguf.quants.dequantize(data, kind).reshape(numbers.shape)
    with reader_of(tmp_path / "model.gguf") as reader:
        found = reader.float32("x", numbers.shape)
        part = TensorRows("x", numbers.shape, OUTPUTS, OUTPUTS)  # the second expert
        rows = reader.rows(part, 1, 4)
        none = reader.rows(part, 2, 2)
        assert reader.advise(part, 3) == data[1].nbytes
    assert isinstance(rows, RawTensor if name not in CODED else Codes)
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.array_equal(numbers_of(rows), expected[1, 1:4], equal_nan=True)
    assert numbers_of(none).shape == (0, INPUTS)


@pytest.mark.parametrize("name", BITS)
def test_bits_of_floats_are_unchanged(name: str, tmp_path: Path) -> None:
    """Of numbers that are infinite, and not a number, too."""
    kind, size = Type[name], GGML_QUANT_SIZES[Type[name]][1]
    bits = np.random.default_rng(1).integers(0, 256, (64, 32 * size), np.uint8)
    written(tmp_path / "model.gguf", bits, kind, bits)
    with reader_of(tmp_path / "model.gguf") as reader:
        raw = reader.stacked([("x", (64, 32))])
    assert isinstance(raw, RawTensor)
    assert (raw.dtype, raw.shape) == (name, (64, 32))
    assert np.array_equal(raw.bits.view(np.uint8), bits)


@pytest.mark.parametrize("name", CODED)
def test_codes_are_the_files(name: str, tmp_path: Path) -> None:
    """Of any bytes: each code and each scale, but those that are infinite or no number. In the package the
    negative zero of MXFP4 is a positive one."""
    kind, (block, size) = Type[name], GGML_QUANT_SIZES[Type[name]]
    data = np.random.default_rng(2).integers(0, 256, (64, 16 * size), np.uint8)
    blocks = data.reshape(64, 16, size)
    if name == "MXFP4":
        blocks[..., 0] = np.minimum(blocks[..., 0], 252)
    else:
        blocks[..., 1] &= 0xBF  # no largest exponent
    written(tmp_path / "model.gguf", data, kind, data)
    with reader_of(tmp_path / "model.gguf") as reader:
        codes = reader.stacked([("x", (64, 16 * block))])
    assert isinstance(codes, Codes)
    assert codes.format == {"Q5_0": "q8_0", "IQ4_NL": "q8_0"}.get(name, name.lower())
    assert np.array_equal(codes.values(), gguf.quants.dequantize(data, kind))


@pytest.mark.parametrize("name", ["F32", "BF16", "Q4_0", "Q5_0", "Q8_0", "MXFP4", "Q6_K"])
def test_rows_and_columns_in_another_order(name: str, tmp_path: Path) -> None:
    """Whole groups of columns keep their codes; other orders give numbers."""
    kind, chance = Type[name], np.random.default_rng(3)
    drawn = chance.standard_normal((6, 512)).astype(np.float32)
    data = written(tmp_path / "model.gguf", drawn, kind)
    expected = gguf.quants.dequantize(data, kind).reshape(drawn.shape)
    rows, groups = chance.permutation(6), chance.permutation(16)
    of_groups = (groups[:, None] * 32 + np.arange(32)).reshape(-1)
    for columns in (None, of_groups, chance.permutation(512)):
        source = Source((("x", drawn.shape),), rows, columns)
        with reader_of(tmp_path / "model.gguf", source) as reader:
            found = reader.stacked([("x", drawn.shape), ("x", drawn.shape)])
        kept = name in CODED and (columns is None or columns is of_groups)
        assert isinstance(found, Codes) == kept
        once = expected[rows] if columns is None else expected[rows][:, columns]
        assert np.array_equal(numbers_of(found), np.concatenate([once, once]))


def test_scales_of_random_blocks_are_where_they_are_drawn() -> None:
    """The tests' blocks are numbers of a usual size."""
    for kind in SCALES.keys() - {Type.IQ1_M}:
        made = gguf.quants.dequantize(encoded("x", np.zeros((4, 512), np.float32), kind), kind)
        assert 0.001 < np.abs(made).mean() < 3
