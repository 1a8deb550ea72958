"""Valid checkpoints are read exactly; hostile headers raise one clear line and cause no allocation."""

import contextlib
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from pipeline.checkpoint.headers import TensorEntry, read_shard
from pipeline.checkpoint.index import CheckpointIndex, fingerprint
from pipeline.checkpoint.reader import TensorReader
from pipeline.errors import ModelError


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_tensor_reads_exactly(tmp_path, shards, dtype):
    tensors = tiny_checkpoint.expert_tensors(dtype)
    index = CheckpointIndex.open(tiny_checkpoint.write_exactly(tmp_path, tensors, shards))
    assert set(index.tensors) == set(tensors)
    assert index.config["hidden_size"] == tiny_checkpoint.HIDDEN
    assert len(index.shards) == shards
    with TensorReader(index) as reader:
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(reader.float32(name, tensor.shape), tensor.float().numpy())
        assert reader.bytes_read == sum(t.nbytes for t in tensors.values())


def test_special_values_and_odd_shapes(tmp_path):
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-40, 6e-8, 65504.0])
    tensors = {f"{d}".split(".")[1]: special.to(d) for d in (torch.bfloat16, torch.float16, torch.float32)}
    tensors |= {"empty": torch.zeros(0, 4)}
    with TensorReader(CheckpointIndex.open(tiny_checkpoint.write_exactly(tmp_path, tensors))) as reader:
        for name, tensor in tensors.items():
            read = reader.float32(name, tuple(tensor.shape))
            assert read.tobytes() == tensor.float().numpy().tobytes()


def test_unreadable_tensors_are_named(tmp_path):
    tensors = {"counts": torch.zeros(3, dtype=torch.int64), "half": torch.zeros(3, dtype=torch.float16)}
    index = CheckpointIndex.open(tiny_checkpoint.write_exactly(tmp_path, tensors))
    with TensorReader(index) as reader:
        for name, shape in (("absent", (3,)), ("counts", (3,)), ("half", (4,))):
            with pytest.raises(ModelError, match=rf"no tensor {name} of shape \[\d\] in BF16, F16, F32$"):
                reader.float32(name, shape)
        os.truncate(tmp_path / "model.safetensors", 100)
        with pytest.raises(ModelError, match="shorter"):
            reader.float32("half", (3,))


def test_fingerprint_changes_with_every_input_of_the_store(tmp_path):
    folder = tiny_checkpoint.write(tmp_path)
    index = CheckpointIndex.open(folder)
    first = fingerprint(index, "bf16", 32)
    assert len(first) == 64
    assert first == fingerprint(CheckpointIndex.open(folder), "bf16", 32)
    others = {first, fingerprint(index, "f32", 32), fingerprint(index, "bf16", 64)}
    os.utime(folder / "model.safetensors", ns=(0, 1))
    others.add(fingerprint(CheckpointIndex.open(folder), "bf16", 32))
    config = tiny_checkpoint.config() | {"rms_norm_eps": 1e-6}
    (folder / "config.json").write_text(json.dumps(config))
    others.add(fingerprint(CheckpointIndex.open(folder), "bf16", 32))
    assert len(others) == 5


def test_fingerprint_is_of_headers_sizes_and_names_and_not_of_the_order_of_keys(tmp_path):
    folder = tiny_checkpoint.write_exactly(tmp_path, {"a": torch.zeros(4), "b": torch.ones(4)})
    path = folder / "model.safetensors"

    def found() -> str:
        os.utime(path, ns=(0, 5))
        return fingerprint(CheckpointIndex.open(folder), "bf16", 32)

    first = found()
    config = tiny_checkpoint.config()
    (folder / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=2))
    assert found() == first
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"?")  # of the weights themselves nothing is read
    assert found() == first
    path.write_bytes(data.replace(b'"a"', b'"c"'))
    assert found() != first
    path.unlink()
    tiny_checkpoint.write_exactly(tmp_path, {"a": torch.zeros(4), "b": torch.ones(5)})
    assert found() != first


def test_shard_says_where_its_tensors_are(tmp_path):
    header = {"one": entry(0, 8, [2]), "two": entry(8, 14, [3, 1], "BF16"), "__metadata__": {"format": "pt"}}
    path = with_header(tmp_path, header, bytes(14))
    shard = read_shard(path)
    status = path.stat()
    assert (shard.path, shard.size, shard.mtime_ns) == (path, status.st_size, status.st_mtime_ns)
    begin = status.st_size - 14
    assert shard.tensors == {
        "one": TensorEntry(path, "F32", (2,), begin, 8),
        "two": TensorEntry(path, "BF16", (3, 1), begin + 8, 6),
    }


BYTES = {
    1: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0",
    2: "U16 I16 F16 BF16",
    4: "U32 I32 F32",
    8: "U64 I64 F64 C64",
}


@pytest.mark.parametrize(("size", "name"), [(size, name) for size in BYTES for name in BYTES[size].split()])
def test_size_of_each_dtype(tmp_path, size, name):
    shard = read_shard(with_header(tmp_path, {"a": entry(0, 3 * size, [3], name)}, bytes(3 * size)))
    assert shard.tensors["a"].nbytes == 3 * size
    with pytest.raises(ModelError, match="not its shape's and dtype's size"):
        read_shard(with_header(tmp_path, {"a": entry(0, 3 * size + 1, [3], name)}, bytes(3 * size + 1)))


# --- hostile headers ----------------------------------------------------------------------------------


def with_header(folder: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    packed = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(packed) if length is None else length) + packed + data)
    return path


def entry(begin: int, end: int, shape: object, dtype: object = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE = {
    "length beyond the file": (({}, b"", 1 << 62), "cut short"),
    "not JSON": ((b"\x00\xff",), "not valid JSON"),
    "deep nesting": ((b"[" * 200_000,), "not a JSON object"),
    "a list": (([],), "not a JSON object"),
    "the same name twice": ((b'{"a":{},"a":{}}',), "required field"),
    "an entry that is no map": (({"a": 3},), "Expected `object`, got `int`"),
    "no dtype": (({"a": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4)), "field `dtype`"),
    "an unhashable dtype": (({"a": entry(0, 4, [1], ["F32"])}, bytes(4)), "$.dtype`"),
    "an unknown dtype": (({"a": entry(0, 4, [1], "F31")}, bytes(4)), "unknown dtype 'F31'"),
    "a negative size": (({"a": entry(0, 4, [-1])}, bytes(4)), "$.shape"),
    "a fraction": (({"a": entry(0, 4, [1.0])}, bytes(4)), "$.shape"),
    "a bool": (({"a": entry(0, 4, [True])}, bytes(4)), "$.shape"),
    "many dimensions": (({"a": entry(0, 4, [1] * 40)}, bytes(4)), "$.shape"),
    "negative offsets": (({"a": entry(-4, 0, [1])}, bytes(4)), "$.data_offsets"),
    "offsets backwards": (({"a": entry(4, 0, [1])}, bytes(4)), "claims -4 bytes"),
    "a huge shape": (({"a": entry(0, 4, [1 << 62, 1 << 62])}, bytes(4)), "claims 4 bytes"),
    "a product of zero": (({"a": entry(0, 4, [1 << 62, 0])}, bytes(4)), "claims 4 bytes"),
    "an overlap": (({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12)), "overlap"),
    "the same bytes twice": (({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, bytes(4)), "overlap"),
    "a hole": (({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, bytes(12)), "hole"),
    "bytes at the end": (({"a": entry(0, 4, [1])}, bytes(5)), "1 bytes follow"),
    "bytes beyond the end": (({"a": entry(0, 1 << 40, [1 << 38])}, bytes(4)), "incomplete"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header_is_refused(tmp_path, case):
    arguments, message = HOSTILE[case]
    path = with_header(tmp_path, *arguments)
    with pytest.raises(ModelError) as caught:
        read_shard(path)
    text = str(caught.value)
    assert message in text
    assert str(path) in text
    assert "\n" not in text
    assert len(text) < 400


def test_empty_tensors_take_no_place_wherever_the_header_lists_them(tmp_path):
    header = {"full": entry(0, 4, [1]), "none": entry(0, 0, [0]), "last": entry(4, 4, [2, 0])}
    shard = read_shard(with_header(tmp_path, header, bytes(4)))
    assert {name: found.nbytes for name, found in shard.tensors.items()} == {"full": 4, "none": 0, "last": 0}


def test_header_over_the_limit_is_refused_unread(tmp_path):
    path = with_header(tmp_path, {}, length=200_000_000)
    os.truncate(path, 300_000_000)  # sparse
    with pytest.raises(ModelError, match="would have 200000000 bytes"):
        read_shard(path)


def test_missing_file_and_folder_are_refused_as_shards(tmp_path):
    with pytest.raises(ModelError, match="is missing"):
        read_shard(tmp_path / "absent.safetensors")
    with pytest.raises(ModelError, match="is not a file"):
        read_shard(tmp_path)


@given(place=st.integers(0, 600), change=st.integers(1, 255))
@settings(max_examples=150)
def test_changed_byte_raises_model_error_or_nothing(tmp_path_factory, place, change):
    folder = tmp_path_factory.getbasetemp() / "changed"
    folder.mkdir(exist_ok=True)
    path = folder / "x.safetensors"
    save_file({"a": torch.zeros(3, 4), "bb": torch.ones(5, dtype=torch.bfloat16)}, path)
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= change
    path.write_bytes(data)
    with contextlib.suppress(ModelError):
        shard = read_shard(path)
        size = path.stat().st_size
        assert all(0 <= t.offset <= t.offset + t.nbytes <= size for t in shard.tensors.values())
