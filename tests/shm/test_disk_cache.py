"""Stores on disk: the same bytes, and every kind of unusable file."""

import os
import struct
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from small_store import build, file_of, flip, run, running, write_cache

from shm.disk_cache import CachedStore, sweep_cache
from shm.errors import StoreDamaged, StoreInvalid
from shm.huge import map_shared
from shm.layout import PAGE
from shm.segment import unlink
from shm.store import Store, StoreBuilder, store_name


@pytest.fixture
def cached(fingerprint, tmp_path):
    """The path of a cached store without a segment."""
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
    with Store.attach(store_name(fingerprint), fingerprint) as store:
        data = store.all_tiles()
        assert cached.read_bytes()[-len(data) :] == data.tobytes()
        assert open_cached(cached, fingerprint).manifest.checksums == tuple(
            zlib.crc32(layer.data) for layer in data.reshape(2, -1)
        )


def test_memory_that_cannot_be_had_is_one_clear_line(cached, fingerprint):
    source, end = CachedStore.open(cached.parent.parent, fingerprint), os.memfd_create("ends")
    os.ftruncate(end, PAGE)
    pages = map_shared(end, PAGE, writable=True)
    os.truncate(end, 0)  # a page without memory, as in a full /dev/shm
    os.close(end)
    assert source is not None
    with source, pytest.raises(StoreDamaged, match=r"cannot be read: there is no memory for it: /dev/shm"):
        source.read_pages(pages, 0)


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


@pytest.mark.parametrize(("place", "layer"), [(-5000, 1), (-100_000, 0)])
def test_a_flipped_bit_is_found_and_leaves_no_segment(cached, fingerprint, place, layer):
    flip(cached, place)
    with pytest.raises(StoreDamaged, match=f"layer {layer}"):
        refill(cached, fingerprint)
    assert not file_of(fingerprint).exists()


def test_a_file_that_shrinks_while_it_is_read_is_an_error(cached, fingerprint):
    with open_cached(cached, fingerprint) as store:
        os.truncate(cached, cached.stat().st_size - 100)
        builder = StoreBuilder.create(store_name(fingerprint), store.manifest)
        with pytest.raises(StoreDamaged, match="became shorter"):
            store.fill(builder, lambda done: None)
        builder.discard()


def open_cached(path: Path, fingerprint: str) -> CachedStore:
    store = CachedStore.open(path.parent.parent, fingerprint)
    assert store is not None
    return store


def make_other_version(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", 77))


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "something").write_text("in it")


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def make_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def make_unreadable(path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)  # root can read it, but must not use it
    else:
        path.chmod(0)


BAD_FILES = {
    "version 77": make_other_version,
    "not a file": make_folder,
    "is not a file": make_pipe,
    "symbolic links": make_loop,
    "belongs to user 12345|Permission denied": make_unreadable,
    "is open to other users .mode 0620": lambda path: path.chmod(0o620),
    "shorter than a store's header": lambda path: path.write_bytes(b""),
    "not a store": lambda path: path.write_bytes(b"\x7fELF" + path.read_bytes()[4:]),
}


@pytest.mark.parametrize("reason", BAD_FILES)
def test_unusable_file_is_refused_in_one_line_and_replaced(cached, fingerprint, reason):
    build(fingerprint)
    good = cached.read_bytes()
    BAD_FILES[reason](cached)
    with pytest.raises(StoreInvalid, match=f"{cached}.*({reason})") as refusal:
        CachedStore.open(cached.parent.parent, fingerprint)
    assert "\n" not in str(refusal.value)
    with Store.attach(store_name(fingerprint)) as store:
        write_cache(cached.parent.parent, store, lambda done: None)
    assert cached.read_bytes() == good
    assert cached.stat().st_mode & 0o7777 == 0o600


def test_folders_become_private_whatever_their_modes_and_the_umask(fingerprint, tmp_path):
    build(fingerprint)
    old = os.umask(0)
    try:
        (tmp_path / "open" / fingerprint).mkdir(parents=True)
        with Store.attach(store_name(fingerprint)) as store:
            write_cache(tmp_path / "open", store, lambda done: None)
            write_cache(tmp_path / "new" / "newer" / "newest", store, lambda done: None)
    finally:
        os.umask(old)
    made = [*(tmp_path / "open").rglob("*"), tmp_path / "open", *(tmp_path / "new").rglob("*")]
    assert len(made) == 7
    assert [path for path in [*made, tmp_path / "new"] if path.stat().st_mode & 0o077] == []


# --- what killed loaders leave ------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, "tests/shm")
from small_store import write_cache
from shm.store import Store
def halfway(done):
    print("writing", flush=True)
    sys.stdin.readline()
write_cache(Path(sys.argv[2]), Store.attach(sys.argv[1]), halfway)
"""


@contextmanager
def writer(fingerprint: str, folder: Path) -> Iterator[subprocess.Popen]:
    """A process that is writing the cached store."""
    with running(WRITER, store_name(fingerprint), folder) as process:
        assert process.stdout.readline() == "writing\n"
        yield process


def test_sweep_removes_unfinished_files_unless_they_are_being_written(fingerprint, tmp_path):
    build(fingerprint)
    unfinished = tmp_path / fingerprint / "store.tmp"
    with writer(fingerprint, tmp_path) as process:
        assert sweep_cache(tmp_path) == []
        with (
            Store.attach(store_name(fingerprint)) as store,
            pytest.raises(OSError, match="another program is writing it"),
        ):
            write_cache(tmp_path, store, lambda done: None)
        process.communicate("go on\n", timeout=30)
        assert process.returncode == 0
    assert (tmp_path / fingerprint / "store.bin").exists()
    with writer(fingerprint, tmp_path) as process:
        process.kill()
        process.wait(30)
    assert unfinished.exists()
    assert sweep_cache(tmp_path) == [unfinished]
    assert [path.name for path in (tmp_path / fingerprint).iterdir()] == ["store.bin"]


def test_sweep_removes_empty_folders_and_no_foreign_files(tmp_path):
    for name in ("0" * 64, "1" * 64, "notes", "0" * 63):
        (tmp_path / name).mkdir()
    (tmp_path / ("1" * 64) / "store.bin").write_text("a store")
    (tmp_path / "notes" / "store.tmp").write_text("not ours")
    assert sweep_cache(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["1" * 64, "notes", "0" * 63])
    assert (tmp_path / "notes" / "store.tmp").exists()
    assert sweep_cache(tmp_path / "nowhere") == []


def test_a_sweep_and_many_writes_at_once_lose_nothing(fingerprint, tmp_path):
    """An empty folder may be swept just when a writer has made it."""
    build(fingerprint)
    code = (
        "import sys; from pathlib import Path; from shm.disk_cache import sweep_cache\n"
        "print('up', flush=True)\n"
        "while True: sweep_cache(Path(sys.argv[1]))\n"
    )
    with running(code, tmp_path) as sweeper, Store.attach(store_name(fingerprint)) as store:
        assert sweeper.stdout.readline() == "up\n"
        for _ in range(30):
            write_cache(tmp_path, store, lambda done: None)
            (tmp_path / fingerprint / "store.bin").unlink()
    assert sweep_cache(tmp_path) == []


def test_a_full_disk_is_an_error_that_leaves_nothing(fingerprint, tmp_path):
    build(fingerprint)
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "sys.path.insert(0, 'tests/shm')\n"
        "from small_store import write_cache\n"
        "from shm.store import Store\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"  # the kernel refuses further writes
        "try:\n"
        "    write_cache(Path(sys.argv[2]), Store.attach(sys.argv[1]), lambda done: None)\n"
        "except OSError as e:\n"
        "    print(e.strerror)\n"
    )
    result = run(code, store_name(fingerprint), tmp_path / "cache")
    assert result.stdout.strip() == "File too large", result.stderr
    assert list((tmp_path / "cache").iterdir()) == []
