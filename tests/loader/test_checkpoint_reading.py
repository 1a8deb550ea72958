"""The tensor reader: it reads exactly the requested rows, within its memory bound, and survives files that
change."""

import ctypes
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint
import torch
from filled_store import filled
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from pipeline.checkpoint import encode
from pipeline.checkpoint.index import CheckpointIndex
from pipeline.checkpoint.open import Checkpoint
from pipeline.checkpoint.reader import TensorReader, to_float32
from pipeline.errors import ModelError
from pipeline.models.architecture import TensorRows


@pytest.mark.parametrize("format_name", ["bf16", "int8"])
def test_file_that_shrinks_after_its_header_was_read_is_an_error(tmp_path, format_name):
    model = Checkpoint(tiny_checkpoint.write(tmp_path))
    os.truncate(tmp_path / "model.safetensors", 60_000)
    with (
        pytest.raises(ModelError, match=r"model\.safetensors became shorter"),
        filled(model, format_name, []),
    ):
        pass


# --- rows of a tensor -------------------------------------------------------------------------------------


@st.composite
def row_ranges(draw: st.DrawFn) -> tuple[TensorRows, int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    total = int(np.prod(shape[:-1]))
    first = draw(st.integers(0, total))
    rows = draw(st.integers(0, total - first))
    lo = draw(st.integers(0, rows))
    return TensorRows("it", shape, first, rows), lo, draw(st.integers(lo, rows))


@given(asked=row_ranges(), dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
@settings(max_examples=60)
def test_rows_equal_the_slice_of_the_tensor_and_nothing_else_is_read(tmp_path_factory, asked, dtype):
    part, lo, hi = asked
    folder = tmp_path_factory.getbasetemp() / "rows"
    whole = torch.arange(int(np.prod(part.shape)), dtype=torch.float32).reshape(part.shape).to(dtype)
    tiny_checkpoint.write_exactly(folder, {"before": torch.ones(3), "it": whole, "me": torch.ones(3)})
    with TensorReader(CheckpointIndex.open(folder)) as reader:
        raw = reader.rows(part, lo, hi)
        assert reader.bytes_read == (hi - lo) * part.shape[-1] * whole.element_size()
        assert (
            reader.advise(part, os.POSIX_FADV_WILLNEED) == part.rows * part.shape[-1] * whole.element_size()
        )
    read = to_float32(raw.dtype, raw.bits)
    rows = whole.float().numpy().reshape(-1, part.shape[-1])
    np.testing.assert_array_equal(read, rows[part.first + lo : part.first + hi])
    assert read.shape == raw.shape == (hi - lo, part.shape[-1])


def test_rows_out_of_range_and_other_shapes_are_refused(tmp_path):
    tiny_checkpoint.write_exactly(tmp_path, {"it": torch.ones(4, 3)})
    with TensorReader(CheckpointIndex.open(tmp_path)) as reader:
        for lo, hi in ((-1, 1), (0, 3), (2, 1)):
            with pytest.raises(ValueError, match="no rows"):
                reader.rows(TensorRows("it", (4, 3), 1, 2), lo, hi)
        with pytest.raises(ModelError, match=r"no tensor it of shape \[3, 4\] in BF16, F16, F32"):
            reader.rows(TensorRows("it", (3, 4), 0, 1), 0, 1)


# --- memory -----------------------------------------------------------------------------------------------

# Fills a store and prints the rise of the process's private memory (without files and shared memory).
MEASURE = """
import json, sys, threading, uuid
from pathlib import Path
from pipeline.checkpoint.open import Checkpoint
from pipeline.models.facts import expert_shape
from shm.layout import format_named
from shm.store import StoreManifest
from shm.store import StoreBuilder

def own():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024

def watch():
    while not done.wait(0.001):
        peaks.append(own())

model, name = Checkpoint(Path(sys.argv[1])), sys.argv[2]
shape = expert_shape(model.config, None, format_named(name))
manifest = StoreManifest(model.fingerprint(name, shape.tile), shape, name, "")
builder = StoreBuilder.create(f"/tandem-test-layouts-{uuid.uuid4().hex[:12]}", manifest)
try:
    before, peaks, done = own(), [], threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    model.fill(builder, lambda done: None)
    done.set()
    watcher.join()
finally:
    builder.discard()
print(json.dumps(max(peaks) - before))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """240 MB of experts in two layers: fused tensors of 80 and 40 MB, a single matrix of 5 MB."""
    config = tiny_checkpoint.config() | {
        "hidden_size": 1024,
        "intermediate_size": 2560,
        "num_local_experts": 8,
        "num_hidden_layers": 2,
    }
    tensors = {}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        tensors[f"{at}.gate_up_proj"] = torch.ones(8, 5120, 1024, dtype=torch.bfloat16)
        tensors[f"{at}.down_proj"] = torch.ones(8, 1024, 2560, dtype=torch.bfloat16)
    folder = tmp_path_factory.mktemp("large")
    return tiny_checkpoint.write(folder, tensors, settings=config, fused=True)


def in_page_cache(path: Path) -> float:
    """The share of a file's pages that the page cache has."""
    with path.open("rb") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
    pages = np.zeros(-(-len(memory) // mmap.PAGESIZE), np.uint8)
    address = [ctypes.c_void_p(array.ctypes.data) for array in (memory, pages)]
    assert ctypes.CDLL(None).mincore(address[0], ctypes.c_size_t(len(memory)), address[1]) == 0
    return float((pages & 1).mean())


@pytest.mark.parametrize("format_name", ["int8", "bf16"])
def test_encoded_experts_leave_the_page_cache(large: Path, format_name: str) -> None:
    (weights,) = (path for path in large.glob("*.safetensors") if path.stat().st_size > 200_000_000)
    with weights.open("rb") as file:
        os.fsync(file.fileno())  # no page is dropped before it is on the disk
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if in_page_cache(weights) > 0.1:
        pytest.skip("this file system keeps its files in memory only")
    with TensorReader(CheckpointIndex.open(large)) as reader:
        reader.float32("model.layers.0.mlp.experts.down_proj", (8, 1024, 2560))
    assert in_page_cache(weights) > 0.1
    with filled(Checkpoint(large), format_name, []):
        assert in_page_cache(weights) < 0.1


@pytest.mark.parametrize("format_name", ["int8", "bf16"])
def test_fill_stays_within_its_memory_bound(large, format_name):
    """The bound in the docstring of encode.py, which is below the size of a fused tensor."""
    command = [sys.executable, "-c", MEASURE, str(large), format_name]
    root = Path(pipeline.__file__).parent.parent
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    grown = json.loads(ended.stdout)
    index = CheckpointIndex.open(large)
    largest = max(entry.nbytes for entry in index.tensors.values())
    cores = len(os.sched_getaffinity(0))
    assert grown < min(largest, encode.READ_AHEAD_BYTES // 3 + cores * encode.CHUNK_BYTES)


# --- whole tensors ----------------------------------------------------------------------------------------


def numbered(rows: int, columns: int, first: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(first, first + rows * columns).reshape(rows, columns).to(dtype)


@pytest.mark.parametrize("read_bytes", [7, 24, 1 << 26])
def test_tensor_is_read_in_several_parts(tmp_path, monkeypatch, read_bytes):
    monkeypatch.setattr("pipeline.checkpoint.reader.READ_BYTES", read_bytes)
    tensors = {"a": numbered(5, 3, 1, torch.float32), "b": numbered(4, 3, 50, torch.float32)}
    with TensorReader(CheckpointIndex.open(tiny_checkpoint.write_exactly(tmp_path, tensors))) as reader:
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(reader.float32(name, tuple(tensor.shape)), tensor.numpy())
        rows = reader.rows(TensorRows("b", (4, 3), 1, 3), 1, 3)
        np.testing.assert_array_equal(to_float32(rows.dtype, rows.bits), tensors["b"].numpy()[2:4])
        assert reader.bytes_read == (15 + 12 + 6) * 4


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, "BF16"), (torch.float16, "F16"), (torch.float32, "F32")]
)
def test_stacked_tensors_keep_their_order_and_bits(tmp_path, dtype, name):
    tensors = {"a": numbered(2, 3, 1, dtype), "b": numbered(4, 3, 50, dtype)}
    with TensorReader(CheckpointIndex.open(tiny_checkpoint.write_exactly(tmp_path, tensors))) as reader:
        raw = reader.stacked([("b", (4, 3)), ("a", (2, 3))])
        assert reader.stacked([("a", (2, 3))]).shape == (2, 3)
    assert (raw.dtype, raw.shape) == (name, (6, 3))
    expected = torch.cat((tensors["b"], tensors["a"]))
    assert raw.bits.tobytes() == expected.view(torch.uint8).numpy().tobytes()


def test_stacked_tensors_of_several_dtypes_are_float32(tmp_path):
    tensors = {"a": numbered(2, 3, 1, torch.bfloat16), "b": numbered(1, 3, 50, torch.float16)}
    with TensorReader(CheckpointIndex.open(tiny_checkpoint.write_exactly(tmp_path, tensors))) as reader:
        raw = reader.stacked([("b", (1, 3)), ("a", (2, 3))])
    assert (raw.dtype, raw.shape) == ("F32", (3, 3))
    np.testing.assert_array_equal(to_float32(*raw[::2]), [[50, 51, 52], [1, 2, 3], [4, 5, 6]])


def test_stacked_tensors_of_another_shape_or_name_are_refused(tmp_path):
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(1, 3, dtype=torch.bfloat16)}
    with TensorReader(CheckpointIndex.open(tiny_checkpoint.write_exactly(tmp_path, tensors))) as reader:
        for asked in ([("a", (3, 2))], *([("a", (2, 3)), (other, (2, 3))] for other in "bc")):
            with pytest.raises(ModelError, match="no tensor"):
                reader.stacked(asked)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_reader_opens_each_file_once_and_closes_it(tmp_path):
    """A shard is opened at its first read and once only."""
    tensors = {"a": numbered(2, 3, 1, torch.float32), "b": numbered(2, 3, 9, torch.float32)}
    index = CheckpointIndex.open(tiny_checkpoint.write_exactly(tmp_path, tensors, shards=2))
    before = open_files()
    with TensorReader(index) as reader:
        assert open_files() == before
        for _ in range(3):
            reader.float32("a", (2, 3))
        assert open_files() == before + 1
        reader.float32("b", (2, 3))
        assert open_files() == before + 2
    assert open_files() == before
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with TensorReader(index) as reader, pytest.raises(ModelError, match=r"00001-of-00002\S* cannot be read"):
        reader.float32("a", (2, 3))
