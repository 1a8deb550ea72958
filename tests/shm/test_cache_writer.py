"""The cached file that is written while its store is being filled: the same bytes, or nothing."""

from __future__ import annotations

import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from small_store import SHAPE, file_of, fill, running

import shm.store
from shm.disk_cache import CachedStore, CacheWriter, sweep_cache, write_cache
from shm.errors import StoreInvalid
from shm.layout import PAGE
from shm.manifest import StoreManifest
from shm.segment import unlink
from shm.store import Store, StoreBuilder, store_name


@pytest.fixture
def manifest(fingerprint: str) -> StoreManifest:
    return StoreManifest(fingerprint, SHAPE, "bf16", "/models/tiny")


@pytest.fixture
def filled(manifest: StoreManifest, monkeypatch: pytest.MonkeyPatch) -> StoreBuilder:
    """A new store with several parts an expert; all bytes are written."""
    monkeypatch.setattr(shm.store, "PART_BYTES", 2 * PAGE)
    builder = StoreBuilder.create(store_name(manifest.fingerprint), manifest)
    fill(builder)
    return builder


def test_cache_file_equals_that_of_the_finished_store_in_any_order(filled, manifest, tmp_path) -> None:
    parts = [
        part for layer in range(2) for expert in range(3) for part in filled.checksum_tasks(layer, expert)
    ]
    assert len(parts) > 6
    random.Random(1).shuffle(parts)
    seen: list[int] = []
    with CacheWriter(tmp_path / "filling", manifest) as writer:
        filled.keep = writer.write
        with ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(part) for part in parts[:-2]]:  # the builder does the last two itself
                done.result()
        writer.finish(filled.finish(), seen.append)
    with Store.attach(store_name(manifest.fingerprint), manifest.fingerprint) as store:
        store.verify()
        write_cache(tmp_path / "finished", store, seen.append)
    written, copied = (tmp_path / name / manifest.fingerprint for name in ("filling", "finished"))
    assert [path.name for path in written.iterdir()] == ["store.bin"]
    assert (written / "store.bin").read_bytes() == (copied / "store.bin").read_bytes()
    assert (written / "store.bin").read_bytes() == file_of(manifest.fingerprint).read_bytes()
    assert seen[-1] == file_of(manifest.fingerprint).stat().st_size
    assert (written / "store.bin").stat().st_mode & 0o7777 == 0o600


def test_unfinished_cache_file_is_removed(filled: StoreBuilder, manifest: StoreManifest, tmp_path) -> None:
    with pytest.raises(KeyboardInterrupt), CacheWriter(tmp_path, manifest) as writer:  # noqa: PT012
        filled.keep = writer.write
        for part in filled.checksum_tasks(0, 0):
            part()
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


FILLER = """
import sys, time
from pathlib import Path
sys.path.insert(0, "tests/shm")
from small_store import SHAPE, fill
from shm.disk_cache import CacheWriter
from shm.manifest import StoreManifest
from shm.store import StoreBuilder, store_name
fingerprint, folder = sys.argv[1], Path(sys.argv[2])
manifest = StoreManifest(fingerprint, SHAPE, "bf16", "/models/tiny")
builder = StoreBuilder.create(store_name(fingerprint), manifest)
writer = CacheWriter(folder, manifest)
builder.keep = writer.write
fill(builder)
builder.checksum(0)
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
