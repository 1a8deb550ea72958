"""The cached file that is written while its store is being filled: the same bytes, or nothing."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest
from small_store import SHAPE, build, file_of, fill, running, write_cache

from shm import disk_cache
from shm.disk_cache import CachedStore, CacheWriter, sweep_cache
from shm.errors import StoreInvalid
from shm.segment import unlink
from shm.store import Store, StoreBuilder, StoreManifest, store_name


@pytest.fixture
def manifest(fingerprint: str) -> StoreManifest:
    return StoreManifest(fingerprint, SHAPE, "bf16", "/models/tiny")


@pytest.fixture
def filled(manifest: StoreManifest) -> StoreBuilder:
    """A new store; all bytes are written."""
    builder = StoreBuilder.create(store_name(manifest.fingerprint), manifest)
    fill(builder)
    return builder


def test_cache_file_is_the_store_in_whatever_order_its_layers_come(filled, manifest, tmp_path) -> None:
    seen: list[int] = []
    with CacheWriter(tmp_path, manifest) as writer:
        filled.keep = writer.write
        for layer in (1, 0):
            filled.filled(layer)
        filled.finish()
        writer.finish(seen.append)
    written, segment = tmp_path / manifest.fingerprint / "store.bin", file_of(manifest.fingerprint)
    assert [path.name for path in written.parent.iterdir()] == ["store.bin"]
    assert seen[-1] == written.stat().st_size == segment.stat().st_size
    with Store.attach(store_name(manifest.fingerprint)) as store:
        data = store.all_tiles()
    assert written.read_bytes()[-data.size :] == segment.read_bytes()[-data.size :]


def test_unfinished_cache_file_is_removed(filled: StoreBuilder, manifest: StoreManifest, tmp_path) -> None:
    with pytest.raises(KeyboardInterrupt), CacheWriter(tmp_path, manifest) as writer:  # noqa: PT012
        filled.keep = writer.write
        filled.filled(0)
        assert (tmp_path / manifest.fingerprint / "store.tmp").exists()
        raise KeyboardInterrupt
    filled.discard()
    assert list(tmp_path.iterdir()) == []


def test_too_little_free_space_is_an_error_before_the_first_write(manifest, tmp_path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=200_000))
    with pytest.raises(OSError, match=r"200\.0 kB are free"):
        CacheWriter(tmp_path, manifest)
    assert list(tmp_path.iterdir()) == []


def test_pages_are_flushed_after_each_so_many_bytes_and_around_the_head(
    fingerprint, tmp_path, monkeypatch
) -> None:
    """The file is complete on the disk before its head makes it a store."""
    build(fingerprint)
    monkeypatch.setattr(disk_cache, "PIECE", 8192)
    monkeypatch.setattr(disk_cache, "FLUSH", 2 * 8192)
    calls: list[tuple[str, int]] = []
    pwrite, fsync = os.pwrite, os.fsync

    def noted_write(descriptor: int, data: memoryview, begin: int) -> int:
        calls.append(("write", begin))
        return pwrite(descriptor, data, begin)

    def noted_sync(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            calls.append(("sync", 0))
        fsync(descriptor)

    monkeypatch.setattr(os, "pwrite", noted_write)
    monkeypatch.setattr(os, "fsync", noted_sync)
    with Store.attach(store_name(fingerprint)) as store:
        write_cache(tmp_path, store, lambda done: None)
    monkeypatch.undo()
    assert calls[-3:] == [("sync", 0), ("write", 0), ("sync", 0)]
    body = [name for name, _ in calls[:-3]]
    assert len(body) > 9
    assert body == (["write", "write", "sync"] * len(body))[: len(body)]


def test_failed_write_frees_the_space_at_once_and_is_raised_at_the_end(
    filled, manifest, tmp_path, monkeypatch
) -> None:
    """No later part is written."""
    monkeypatch.setattr(disk_cache, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(disk_cache, "PIECE", 8192)
    pwrite, begun = os.pwrite, []

    def failing(descriptor: int, data: memoryview, begin: int) -> int:
        begun.append(begin)
        if len(begun) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, begin)

    file = tmp_path / manifest.fingerprint / "store.tmp"
    with CacheWriter(tmp_path, manifest) as writer:
        monkeypatch.setattr(os, "pwrite", failing)
        filled.keep = writer.write
        for layer in range(2):
            filled.filled(layer)
        filled.finish()
        with pytest.raises(OSError, match="No space left"):
            writer.finish(lambda done: None)
        assert (file.stat().st_size, len(begun)) == (0, 3)
    assert list(tmp_path.iterdir()) == []


FILLER = """
import sys, time
from pathlib import Path
sys.path.insert(0, "tests/shm")
from small_store import SHAPE, fill
from shm.disk_cache import CacheWriter
from shm.store import StoreManifest
from shm.store import StoreBuilder, store_name
fingerprint, folder = sys.argv[1], Path(sys.argv[2])
manifest = StoreManifest(fingerprint, SHAPE, "bf16", "/models/tiny")
builder = StoreBuilder.create(store_name(fingerprint), manifest)
writer = CacheWriter(folder, manifest)
builder.keep = writer.write
fill(builder)
builder.filled(0)
file = folder / fingerprint / "store.tmp"
deadline = time.monotonic() + 30
while file.stat().st_size < 8192 + builder.layout.layer_stride:
    if time.monotonic() > deadline:
        raise SystemExit("the layer is not written")
print("half", flush=True)
sys.stdin.readline()
"""


def test_file_of_a_killed_writer_is_no_store_whatever_its_name(fingerprint: str, tmp_path: Path) -> None:
    with running(FILLER, fingerprint, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        assert sweep_cache(tmp_path) == []  # it is being written
    unfinished = tmp_path / fingerprint / "store.tmp"
    assert unfinished.stat().st_size > 100_000
    assert CachedStore.open(tmp_path, fingerprint) is None
    shutil.copy(unfinished, unfinished.with_name("store.bin"))
    with pytest.raises(StoreInvalid, match="not a store"):
        CachedStore.open(tmp_path, fingerprint)
    unfinished.with_name("store.bin").unlink()
    assert sweep_cache(tmp_path) == [unfinished]
    assert list(tmp_path.iterdir()) == []
    unlink(store_name(fingerprint))
