"""Headers of GGUF files: each fault is one line that names the file and the remedy. Headers of any bytes, and
those of safetensors, are refused in a line too, without memory for what they claim."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_checkpoint
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGUFValueType as Value
from gguf_files import write_gguf

from pipeline.checkpoint.gguf_file import LONG, gguf_in, gguf_models_in, read_gguf, read_metadata, read_model
from pipeline.checkpoint.index import read_shard
from pipeline.checkpoint.open import open_model
from pipeline.errors import ModelError

FEW = 200  # mutations in the default run
MANY = 100_000

Pair = tuple[bytes, int, bytes]  # key, type, value
Claim = tuple[bytes, tuple[int, ...], int, int]  # name, sizes, type, place


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def array(kind: int, count: int, values: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + values


def file_of(
    path: Path,
    pairs: list[Pair] | None = None,
    tensors: list[Claim] | None = None,
    magic: bytes = b"GGUF\3\0\0\0",
    counts: tuple[int, int] | None = None,
    data: int = 4096,
) -> Path:
    """A file with these settings and tensors, and so many bytes behind them."""
    pairs = [(b"general.architecture", Value.STRING, text(b"llama"))] if pairs is None else pairs
    tensors = [(b"a.weight", (64, 2), Type.Q8_0, 0)] if tensors is None else tensors
    parts = [magic, struct.pack("<QQ", *(counts or (len(tensors), len(pairs))))]
    parts += [text(key) + struct.pack("<I", kind) + value for key, kind, value in pairs]
    for name, sizes, kind, place in tensors:
        parts.append(text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, place))
    header = b"".join(parts)
    path.write_bytes(header + bytes(-len(header) % 32) + bytes(data))
    return path


def refusal(read: Callable[[], object], path: Path) -> str:
    """The one line of a ModelError, which names the file."""
    with pytest.raises(ModelError) as caught:
        read()
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 500 + 2 * len(str(path))
    assert str(path) in line
    return line


AGAIN = "download it again"
Q8: Claim = (b"a.weight", (64, 2), Type.Q8_0, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"magic": b"GGUF\0\0\0\3"}, "is for big-endian machines: download the model's little-endian file"),
        ({"magic": b"GGUF\1\0\0\0"}, "has version 1 of GGUF, only 2 and 3 are read: download a newer file"),
        ({"magic": b"GGUF\4\0\0\0"}, "has version 4 of GGUF, only 2 and 3 are read: install a newer Tandem"),
        ({"magic": b"GGML\3\0\0\0"}, "is not a GGUF file: give one"),
        ({"magic": b"version "}, "is a git-lfs pointer and not the weights: run `git lfs pull` there"),
        ({"counts": (1 << 40, 1)}, AGAIN),
        ({"counts": (1, 1 << 40)}, AGAIN),
        ({"counts": (1, 60_000)}, AGAIN),
        ({"counts": (60_000, 1)}, AGAIN),
        ({"pairs": [(b"", Value.BOOL, b"\1")]}, "a key would have 0 characters"),
        ({"pairs": [(b"\xff", Value.BOOL, b"\1")]}, "a key is not UTF-8"),
        ({"pairs": [(b"a", Value.BOOL, b"\1")] * 2}, "has the key 'a' twice"),
        ({"pairs": [(b"a", 99, b"\1")]}, "'a' has the unknown type 99"),
        ({"pairs": [(b"a", Value.STRING, struct.pack("<Q", 1 << 40))]}, AGAIN),
        (
            {"pairs": [(b"a", Value.ARRAY, array(Value.UINT8, 1 << 40, b""))]},
            "a list of 1099511627776 values",
        ),
        ({"pairs": [(b"a", Value.ARRAY, array(Value.STRING, 4000, b""))]}, AGAIN),
        ({"pairs": [(b"a", Value.ARRAY, array(Value.ARRAY, 1, b""))]}, "'a' is a list of lists"),
        ({"pairs": [(b"general.alignment", Value.UINT32, b"\5\0\0\0")]}, "general.alignment is 5"),
        ({"pairs": [(b"general.alignment", Value.STRING, text(b"x"))]}, "general.alignment is x"),
        ({"tensors": [Q8, Q8]}, "has the tensor 'a.weight' twice"),
        ({"tensors": [Q8, (b"b", (64,), Type.Q8_0, 32)]}, "the tensor 'b' overlaps another one"),
        ({"tensors": [(b"a", (64,), Type.Q8_0, 33)]}, "lies at byte 33, no multiple of 32"),
        ({"tensors": [(b"a", (33,), Type.Q8_0, 0)]}, "'a' of type Q8_0 cannot have the shape [33]"),
        ({"tensors": [(b"a", (0,), Type.F32, 0)]}, "'a' of type F32 cannot have the shape [0]"),
        ({"tensors": [(b"a", (), Type.F32, 0)]}, "'a' has 0 dimensions"),
        ({"tensors": [(b"a", (1,) * 5, Type.F32, 0)]}, "'a' has 5 dimensions"),
        ({"tensors": [(b"a", (64,), 777, 0)]}, "type 777 of GGML, which is not known"),
        (
            {"tensors": [(b"a", (64, 1 << 40), Type.Q8_0, 0)]},
            "1 of 1 tensors are not wholly in it: the download",
        ),
        ({"tensors": [(b"a", (1 << 63,) * 4, Type.Q8_0, 0)]}, "the download is incomplete"),
        ({"tensors": [(b"a", (64,), Type.Q8_0, 1 << 62)]}, "the download is incomplete"),
        ({"data": 135}, "the download is incomplete, download it again"),
    ],
)
def test_a_fault_is_one_line_with_its_remedy(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = file_of(tmp_path / "model.gguf", **changes)
    tracemalloc.start()
    try:
        assert words in refusal(lambda: read_gguf(path), path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_values_of_all_lists_are_bounded_before_they_are_made(tmp_path: Path) -> None:
    """A number of one byte takes eight in a list."""
    whole = array(Value.UINT8, 1 << 20, bytes(1 << 20))
    pairs: list[Pair] = [(b"%d" % i, Value.ARRAY, whole) for i in range(12)]
    path = file_of(tmp_path / "model.gguf", pairs)
    tracemalloc.start()
    try:
        assert "all lists would have 5242880" in refusal(lambda: read_gguf(path), path)
        assert tracemalloc.get_traced_memory()[1] < 4 * path.stat().st_size
    finally:
        tracemalloc.stop()


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    assert "does not exist" in refusal(lambda: open_model(path), path)
    path.touch()
    assert AGAIN in refusal(lambda: open_model(path), path)
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "cannot be read: it is not a file" in refusal(lambda: open_model(path), path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = file_of(tmp_path / "model.gguf", data=136)
    whole = path.read_bytes()
    read_gguf(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert AGAIN in refusal(lambda: read_gguf(path), path)


def test_settings_are_as_written(tmp_path: Path) -> None:
    """As GGUFWriter writes them, and as GGUFReader reads them."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values: dict[str, tuple[Value, Any]] = {
        **{f"u{bits}": (Value[f"UINT{bits}"], (1 << bits) - 1) for bits in (8, 16, 32, 64)},
        **{f"i{bits}": (Value[f"INT{bits}"], -(1 << bits - 1)) for bits in (8, 16, 32, 64)},
        "f32": (Value.FLOAT32, 1e-6),
        "f64": (Value.FLOAT64, 0.1),
        "yes": (Value.BOOL, True),
        "text": (Value.STRING, "Ġé漢"),
    }
    for key, (kind, value) in values.items():
        writer.add_key_value(key, value, kind)
    lists: dict[str, list[Any]] = {
        "tokens": [f"t{i}" for i in range(LONG + 1)],
        "numbers": [*range(LONG)],
        "flags": [True, False],
        "scores": [0.5, -1.5],
    }
    for key, each in lists.items():
        writer.add_array(key, each)
    writer.add_tensor("a", np.ones((2, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = {"general.architecture": "llama"} | {key: value for key, (_, value) in values.items()} | lists
    assert read_metadata(path) == expected
    assert read_metadata(path, long_arrays=False) == {k: v for k, v in expected.items() if k != "tokens"}
    (theirs,), ours = gguf.GGUFReader(path).tensors, read_gguf(path).shard.tensors["a"]
    assert (ours.offset, ours.nbytes, ours.shape) == (theirs.data_offset, theirs.n_bytes, (2, 3))


# --- several files -----------------------------------------------------------------------------------------


def split(path: Path, number: int, count: int, tensor: bytes, total: int = 2) -> Path:
    pairs: list[Pair] = [
        (b"split.no", Value.UINT16, struct.pack("<H", number)),
        (b"split.count", Value.UINT16, struct.pack("<H", count)),
        (b"split.tensors.count", Value.INT32, struct.pack("<i", total)),
    ]
    return file_of(path, pairs, [(tensor, (64,), Type.Q8_0, 0)])


def test_files_of_one_model_are_found_and_checked(tmp_path: Path) -> None:
    first, second = (tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2))
    split(first, 0, 2, b"a")
    assert "lacks 1 of 2 files" in refusal(lambda: read_model(first), tmp_path)
    split(second, 1, 2, b"b")
    first.unlink()
    missing = f"has {second.name} and lacks {first.name}, the first file"
    assert missing in refusal(lambda: gguf_in(tmp_path), tmp_path)
    split(first, 0, 2, b"a")
    settings, shards = read_model(first)
    assert [*shards[0].tensors, *shards[1].tensors] == ["a", "b"]
    assert settings["split.count"] == 2
    assert gguf_in(tmp_path) == first
    assert f"is file 2 of 2 of a model: give the first, {first.name}" in refusal(
        lambda: read_model(second), second
    )
    split(second, 1, 2, b"a")
    assert "two files have the tensor 'a'" in refusal(lambda: read_model(first), first)
    split(second, 2, 2, b"b")
    assert f"is not file 2 of 2 of {first.name}" in refusal(lambda: read_model(first), second)
    split(second, 1, 2, b"b")
    split(first, 0, 2, b"a", total=3)
    assert "its files have 2 tensors, and it says 3" in refusal(lambda: read_model(first), first)
    other = split(tmp_path / "other.gguf", 0, 2, b"a")
    assert "give it its old name" in refusal(lambda: read_model(other), other)
    assert "has 2 GGUF models: name the file of one" in refusal(lambda: gguf_in(tmp_path), tmp_path)
    tiny_checkpoint.write(tmp_path)
    assert gguf_in(tmp_path) is None
    assert gguf_models_in(tmp_path) == [first.name, other.name]


# --- any bytes ---------------------------------------------------------------------------------------------


def mutated(data: bytes, header: int, seed: int) -> bytes:
    """Other bytes, lengths and numbers in the header, parts of it twice, or not."""
    chance, changed = random.Random(seed), bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(header)
        match chance.randrange(6):
            case 0:
                changed[at] = chance.randrange(256)
            case 1:
                value = chance.choice(
                    (0, 1, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1, header, len(data))
                )
                changed[at : at + 8] = value.to_bytes(8, "little")
            case 2:
                changed[at : at + 4] = chance.choice((0, 3, 8, 9, 10, 30, 39, 0xFFFFFFFF)).to_bytes(
                    4, "little"
                )
            case 3:
                del changed[at : at + chance.randint(1, 16)]
            case 4:
                changed[at:at] = changed[at : at + chance.randint(1, 64)]
            case 5:
                changed[at] ^= 1 << chance.randrange(8)
    return bytes(changed[: chance.randrange(len(changed))] if chance.random() < 0.1 else changed)


def check_mutations(path: Path, header: int, read: Callable[[Path], object], count: int) -> None:
    """Each is read or refused in a line, with memory of a few times the file's size."""
    data = path.read_bytes()
    read(path)  # what is imported and kept is no part of the measurement
    refused = 0
    tracemalloc.start()
    try:
        for seed in range(count):
            path.write_bytes(mutated(data, header, seed))
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            line = ""
            try:
                read(path)
            except ModelError as e:
                line = str(e)
            refused += bool(line)
            assert not line or (str(path) in line and "\n" not in line), seed
            assert tracemalloc.get_traced_memory()[1] - before < 200_000 + 100 * len(data), seed
    finally:
        tracemalloc.stop()
    assert count // 4 < refused < count


COUNTS = [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]


@pytest.mark.parametrize("count", COUNTS)
def test_any_header_of_gguf_is_read_or_refused(count: int, tmp_path: Path) -> None:
    pairs: list[Pair] = [
        (b"general.architecture", Value.STRING, text(b"llama")),
        (b"llama.block_count", Value.UINT32, struct.pack("<I", 2)),
        (b"tokens", Value.ARRAY, array(Value.STRING, 3, text(b"a") + text(b"bc") + text(b""))),
        (b"scores", Value.ARRAY, array(Value.FLOAT32, 3, bytes(12))),
        (b"general.alignment", Value.UINT32, struct.pack("<I", 32)),
    ]
    tensors = [(b"a.weight", (64, 2), Type.Q8_0, 0), (b"b.weight", (8, 3), Type.F32, 160)]
    path = file_of(tmp_path / "model.gguf", pairs, tensors, data=256)
    check_mutations(path, path.stat().st_size - 256, read_gguf, count)


@pytest.mark.parametrize("count", COUNTS)
def test_any_settings_of_a_model_are_read_or_refused(count: int, tmp_path: Path) -> None:
    """Those of the model as well: they are checked against its tensors."""
    path = write_gguf(tiny_checkpoint.write(tmp_path / "model"), tmp_path / "model.gguf")
    check_mutations(path, min(e.offset for e in read_gguf(path).shard.tensors.values()), open_model, count)


@pytest.mark.parametrize("count", COUNTS)
def test_any_header_of_safetensors_is_read_or_refused(count: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    entries = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "__metadata__": {"format": "pt"},
    }
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(32))
    check_mutations(path, 8 + len(header), read_shard, count)
