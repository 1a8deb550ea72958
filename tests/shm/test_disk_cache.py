"""Stores on disk: the same bytes, and every way in which a file can be unusable."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_store import ROOT, build, file_of

from shm.disk_cache import CachedStore, write_cache
from shm.errors import StoreDamaged, StoreInvalid
from shm.layout import PAGE
from shm.segment import unlink
from shm.store import Store, StoreBuilder, store_name


@pytest.fixture
def cached(fingerprint, tmp_path):
    """The path of a cached store whose segment is gone."""
    build(fingerprint)
    with Store.attach(store_name(fingerprint)) as store:
        write_cache(tmp_path / "cache", store, lambda done: None)
    unlink(store_name(fingerprint))
    return tmp_path / "cache" / fingerprint / "store.bin"


def refill(path: Path, fingerprint: str) -> None:
    """Fill a new segment from the file, as the loader does."""
    source = CachedStore.open(path.parent.parent, fingerprint)
    assert source is not None
    with source:
        builder = StoreBuilder.create(store_name(fingerprint), source.manifest)
        try:
            source.fill(builder, lambda done: None)
            builder.finish()
        except BaseException:
            builder.discard()
            raise


def test_the_file_is_the_segment_and_fills_an_equal_one(cached, fingerprint):
    assert cached.stat().st_mode & 0o7777 == 0o600
    assert cached.parent.stat().st_mode & 0o7777 == 0o700
    assert cached.parent.parent.stat().st_mode & 0o7777 == 0o700
    assert [p.name for p in cached.parent.iterdir()] == ["store.bin"]
    refill(cached, fingerprint)
    assert file_of(fingerprint).read_bytes() == cached.read_bytes()
    with Store.attach(store_name(fingerprint), fingerprint) as store:
        store.verify()


def test_no_file_is_not_an_error(fingerprint, tmp_path):
    assert CachedStore.open(tmp_path, fingerprint) is None


def test_a_truncated_file_is_refused(cached, fingerprint):
    size = cached.stat().st_size
    for length in (size - 1, size // 2, PAGE + 10, 100, 0):
        os.truncate(cached, length)
        with pytest.raises(StoreInvalid, match=str(cached)):
            CachedStore.open(cached.parent.parent, fingerprint)


def test_a_foreign_file_is_refused(cached, fingerprint):
    other = cached.parent.parent / ("0" * 64)
    cached.parent.rename(other)
    with pytest.raises(StoreInvalid, match="another model"):
        CachedStore.open(cached.parent.parent, "0" * 64)


def test_a_flipped_bit_is_found_and_leaves_no_segment(cached, fingerprint):
    with cached.open("r+b") as file:
        file.seek(-5000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-5000, os.SEEK_END)
        file.write(bytes([byte[0] ^ 128]))
    with pytest.raises(StoreDamaged, match="layer 1"):
        refill(cached, fingerprint)
    assert not file_of(fingerprint).exists()


def test_a_failed_write_leaves_nothing(fingerprint, tmp_path):
    build(fingerprint)
    (tmp_path / "cache").write_text("a file where the folder should be")
    with Store.attach(store_name(fingerprint)) as store:
        with pytest.raises(OSError, match="exists"):
            write_cache(tmp_path / "cache", store, lambda done: None)

        def stop(done: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write_cache(tmp_path / "other", store, stop)
    assert list((tmp_path / "other").iterdir()) == []


def test_a_full_disk_is_an_error_that_leaves_nothing(fingerprint, tmp_path):
    build(fingerprint)
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from shm.disk_cache import write_cache\n"
        "from shm.store import Store\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"  # the kernel refuses further writes
        "try:\n"
        "    write_cache(Path(sys.argv[2]), Store.attach(sys.argv[1]), lambda done: None)\n"
        "except OSError as e:\n"
        "    print(e.strerror)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, store_name(fingerprint), str(tmp_path / "cache")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.stdout.strip() == "File too large", result.stderr
    assert list((tmp_path / "cache").iterdir()) == []
