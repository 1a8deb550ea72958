"""The disk cache of a quantized backbone: the next start has the same matrices, and no error fails a
start."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import msgpack
from waiting import until, wait_until

from pipeline.backbone.disk_cache import ALIGNMENT, NAME, UNFINISHED, VERSION, BackboneCache
from pipeline.config import EngineConfig
from protocol.client import Client
from protocol.program import user_folder
from shm.disk_cache import RECORD, CacheRecord, read_record

FINGERPRINT = "ab" * 32
LIMIT = 20.0
TOKENS = tuple(range(5, 45))


def matrix(seed: int, size: int = 5000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def file_of(folder: Path) -> Path:
    return folder / FINGERPRINT / NAME


def complete_file(folder: Path) -> Path:
    """Write a file with two matrices."""
    cache = BackboneCache(folder, FINGERPRINT)
    assert cache.take("a", 5000) is None
    cache.keep("a", matrix(1))
    cache.keep("b", matrix(2, 300))
    cache.finish()
    path = file_of(folder)
    assert wait_until(path.exists, LIMIT)
    return path


def test_kept_matrices_are_taken(tmp_path: Path) -> None:
    path = complete_file(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not path.with_name(UNFINISHED).exists()
    again = BackboneCache(tmp_path, FINGERPRINT)
    first, second = again.take("a", 5000), again.take("b", 300)
    np.testing.assert_array_equal(first, matrix(1))
    np.testing.assert_array_equal(second, matrix(2, 300))
    assert again.take("b", 301) is None  # another size
    assert again.take("c", 300) is None
    again.keep("c", matrix(3))  # ignored: a complete file is never changed
    before = path.read_bytes()
    again.finish()
    assert path.read_bytes() == before


@pytest.mark.parametrize("place", ["first", "index", "length", "short", "empty"])
def test_damaged_file_is_made_again(tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture) -> None:
    path = complete_file(tmp_path)
    data = bytearray(path.read_bytes())
    if place == "first":
        data[17] ^= 1
        data[5100] ^= 1
    elif place == "index":
        data[-20] ^= 0xFF
    elif place == "length":
        data[-8:] = (1 << 40).to_bytes(8, "little")
    path.write_bytes(data[: {"short": 5100, "empty": 0}.get(place, len(data))])
    found = BackboneCache(tmp_path, FINGERPRINT)
    assert found.take("a", 5000) is None
    if place == "first":
        assert found.take("b", 300) is None
    assert not path.exists()
    assert len(caplog.records) == 1
    found.finish()
    assert complete_file(tmp_path).exists()


def indexed(value: object) -> bytes:
    """A file's last bytes, with this index."""
    packed = msgpack.encode(value)
    return bytes(packed + len(packed).to_bytes(8, "little"))


def of_version(matrices: object) -> bytes:
    return indexed({"version": VERSION, "matrices": matrices})


PLACES = st.integers(-(2**63), 2**64 - 1) | st.integers(0, 400) | st.sampled_from([2**62, 2**63, 2**64 - 64])
VALUES = st.none() | PLACES | st.floats() | st.text(max_size=3) | st.binary(max_size=3) | st.just([])
MATRICES = st.dictionaries(
    st.just("a") | st.text(max_size=2),
    st.lists(VALUES, max_size=4) | st.tuples(PLACES, PLACES, PLACES) | VALUES,
)
ENDS = (
    st.binary(max_size=40)
    | st.builds(lambda index: index + len(index).to_bytes(8, "little"), st.binary(min_size=1, max_size=40))
    | st.builds(indexed, VALUES | st.lists(VALUES) | st.dictionaries(st.text(max_size=8), VALUES))
    | st.builds(of_version, MATRICES | VALUES | st.lists(VALUES))
)


@example(ending=of_version([1]), size=64)
@example(ending=of_version({"a": [2**63, 64, 0]}), size=64)
@example(ending=of_version({"a": [-64, 64, 0]}), size=64)
@example(ending=of_version({"a": [0, 64, 2**64 - 1]}), size=64)
@example(ending=of_version({"a": [1, 8, zlib.crc32(bytes(8))]}), size=8)
@example(ending=of_version({"a": [float("inf"), 64, 0]}), size=64)
@example(ending=indexed([["version", VERSION]]), size=64)
@settings(max_examples=150)
@given(ending=ENDS, size=st.sampled_from([0, 1, 64, 5000]))
def test_no_content_fails_a_start(ending: bytes, size: int) -> None:
    """What is taken nevertheless has the size, the checksum and the alignment of a matrix."""
    with tempfile.TemporaryDirectory() as name:
        path = file_of(Path(name))
        path.parent.mkdir()
        path.write_bytes(bytes(128) + ending)
        cache = BackboneCache(Path(name), FINGERPRINT)
        found = cache.take("a", size)
        cache.finish()
        assert found is None or (len(found) == size and found.ctypes.data % ALIGNMENT == 0)


@pytest.mark.parametrize("inside", [(), ("a file",)])
def test_directory_in_place_of_the_file_is_one_line(tmp_path: Path, caplog, inside: tuple[str, ...]) -> None:
    file_of(tmp_path).mkdir(parents=True)
    for name in inside:
        (file_of(tmp_path) / name).touch()
    cache = BackboneCache(tmp_path, FINGERPRINT)
    assert cache.take("a", 5000) is None
    cache.keep("a", matrix(1))
    cache.finish()
    assert wait_until(lambda: not any("backbone cache" in t.name for t in threading.enumerate()), LIMIT)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"{file_of(tmp_path)} is not used: is not a file"]


def test_each_use_is_recorded(tmp_path: Path) -> None:
    record = CacheRecord("backbone", "/models/x", "int8")
    folder = tmp_path / FINGERPRINT
    cache = BackboneCache(tmp_path, FINGERPRINT, record)
    cache.keep("a", matrix(1))
    assert read_record(folder) is None  # nothing is complete
    cache.finish()
    assert wait_until(lambda: read_record(folder) == record, LIMIT)
    os.utime(folder / RECORD, (1e9, 1e9))
    BackboneCache(tmp_path, FINGERPRINT, record).finish()
    assert (folder / RECORD).stat().st_mtime > 1e9 + 1


def test_failed_write_ends_with_one_warning_and_no_file(tmp_path: Path, monkeypatch, caplog) -> None:
    """No matrix behind the one that failed is written."""
    pwrite, begun = os.pwrite, []

    def failing(descriptor: int, data: memoryview, begin: int) -> int:
        begun.append(begin)
        if len(begun) == 2:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data, begin)

    monkeypatch.setattr(os, "pwrite", failing)
    cache = BackboneCache(tmp_path, FINGERPRINT)
    for seed in range(4):
        cache.keep(str(seed), matrix(seed))
    cache.finish()
    assert wait_until(lambda: bool(caplog.records), LIMIT)
    assert wait_until(lambda: not list(tmp_path.glob(f"{FINGERPRINT}/*")), LIMIT)
    assert len(begun) == 2
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text


def test_file_writable_by_others_is_not_used(tmp_path: Path) -> None:
    path = complete_file(tmp_path)
    path.chmod(0o666)
    assert BackboneCache(tmp_path, FINGERPRINT).take("a", 5000) is None


def test_only_one_engine_writes_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unfinished = file_of(tmp_path).with_name(UNFINISHED)
    unfinished.parent.mkdir()
    with unfinished.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        cache = BackboneCache(tmp_path, FINGERPRINT)
        cache.keep("a", matrix(1))
        cache.finish()
        assert wait_until(lambda: "another engine is writing it" in caplog.text, LIMIT)
        assert unfinished.exists()
    assert not file_of(tmp_path).exists()
    assert complete_file(tmp_path).exists()


async def scores(client: Client) -> np.ndarray:
    return np.concatenate([block.logprobs async for block in client.score(token_ids=TOKENS, full=True)])


async def test_second_start_has_the_same_backbone(start_engine, tiny_model, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # a cache without this model
    config = EngineConfig(model=tiny_model, format="int8", backbone_dtype="int8", workers=0, chunk=16)
    answers = []
    for _ in range(2):
        async with start_engine(config) as (_, client):
            answers.append(await scores(client))
            await until(lambda: list(user_folder("CACHE").glob(f"*/{NAME}")), LIMIT)
    files = list(user_folder("CACHE").glob(f"*/{NAME}"))
    np.testing.assert_array_equal(*answers)
    # A flipped bit is detected, which shows that the start reads this file.
    data = bytearray(files[0].read_bytes())
    data[100] ^= 0x40
    files[0].write_bytes(data)
    async with start_engine(config) as (_, client):
        assert np.array_equal(await scores(client), answers[0])
    assert not files[0].exists() or files[0].read_bytes() != bytes(data)
