"""The store: building, attaching, its head against damage, its life under locks, its file on disk."""

import os
import struct
import subprocess
import sys
import threading
import time
import uuid
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shm
from shm.disk_cache import CachedStore, write_cache
from shm.errors import SegmentMissing, ShmError, StoreDamaged, StoreInvalid
from shm.layout import PAGE, ExpertShape
from shm.locks import StoreLease, build_lock, sweep
from shm.manifest import READY, StoreManifest, pack_head, read_head, store_bytes
from shm.segment import Segment, unlink
from shm.store import Store, StoreBuilder, store_name

ROOT = Path(shm.__file__).parent.parent
SHAPE = ExpertShape(layers=2, experts=3, hidden=48, intermediate=100, tile=16)


@pytest.fixture
def fingerprint():
    """A model's fingerprint that nobody else uses."""
    fingerprint = uuid.uuid4().hex * 2
    yield fingerprint
    unlink(store_name(fingerprint))


def file_of(fingerprint: str) -> Path:
    return Path("/dev/shm") / store_name(fingerprint)[1:]


def fill(builder: StoreBuilder, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for layer in range(SHAPE.layers):
        for expert in range(SHAPE.experts):
            wide = (SHAPE.intermediate, SHAPE.hidden)
            parts = (rng.standard_normal(s).astype(np.float32) for s in (wide, wide, wide[::-1]))
            builder.layout.encode_expert(*parts, builder.expert(layer, expert))


def build(fingerprint: str) -> None:
    builder = StoreBuilder.create(
        store_name(fingerprint), StoreManifest(fingerprint, SHAPE, "bf16", "/models/tiny")
    )
    fill(builder)
    builder.finish()


# --- building and attaching ---------------------------------------------------------------------------


def test_a_store_gives_back_what_was_built(fingerprint):
    build(fingerprint)
    assert file_of(fingerprint).stat().st_mode & 0o7777 == 0o600
    with Store.attach(store_name(fingerprint), fingerprint) as store:
        assert store.fingerprint == fingerprint
        assert store.layout.shape == SHAPE
        assert store.manifest.source == "/models/tiny"
        store.verify()
        rng = np.random.default_rng(0)
        for layer in range(SHAPE.layers):
            for expert in range(SHAPE.experts):
                gate = rng.standard_normal((SHAPE.intermediate, SHAPE.hidden)).astype(np.float32)
                rng.standard_normal(2 * SHAPE.intermediate * SHAPE.hidden)
                tile = store.tiles(layer, expert, 2, 3)
                assert tile.shape == (store.layout.tile_bytes,)
                assert not tile.flags.writeable
                decoded = store.layout.format.decode(tile, SHAPE.hidden, SHAPE.tile)
                np.testing.assert_allclose(decoded[0], gate[32:48], rtol=2**-8)
        whole = store.tiles(1, 2, 0, SHAPE.tiles)
        np.testing.assert_array_equal(whole[-store.layout.tile_bytes :], store.tiles(1, 2, 6, 7))
        assert store.tiles(0, 0, 3, 3).size == 0


def test_a_writable_mapping_still_gives_read_only_views(fingerprint):
    build(fingerprint)
    with Store.attach(store_name(fingerprint), fingerprint, writable=True) as store:
        assert store.segment.array.flags.writeable
        assert not store.tiles(0, 0, 0, 1).flags.writeable


def test_tiles_outside_the_shape_and_after_closing(fingerprint):
    build(fingerprint)
    store = Store.attach(store_name(fingerprint))
    for bad in ((2, 0, 0, 1), (0, 3, 0, 1), (0, 0, 0, 8), (0, 0, 2, 1), (0, 0, -1, 1)):
        with pytest.raises(IndexError):
            store.tiles(*bad)
    view = store.tiles(0, 0, 0, 1)
    total = int(view.sum())
    store.close()
    store.close()
    assert int(view.sum()) == total
    with pytest.raises(ValueError, match="closed"):
        store.tiles(0, 0, 0, 1)


def test_an_unfinished_store_is_not_attached_and_discard_removes_it(fingerprint):
    builder = StoreBuilder.create(store_name(fingerprint), StoreManifest(fingerprint, SHAPE, "f32", ""))
    fill(builder)
    with pytest.raises(StoreInvalid, match="unfinished"):
        Store.attach(store_name(fingerprint))
    builder.discard()
    with pytest.raises(SegmentMissing):
        Store.attach(store_name(fingerprint))


def test_another_models_store_is_refused(fingerprint):
    build(fingerprint)
    with pytest.raises(StoreInvalid, match=r"another model \(/models/tiny\)"):
        Store.attach(store_name(fingerprint), "0" * 64)


def test_verify_names_the_damaged_layer(fingerprint):
    build(fingerprint)
    with file_of(fingerprint).open("r+b") as file:
        file.seek(-5000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-5000, os.SEEK_END)
        file.write(bytes([byte[0] ^ 4]))
    with (
        Store.attach(store_name(fingerprint), fingerprint) as store,
        pytest.raises(StoreDamaged, match=r"layers \[1\]"),
    ):
        store.verify()


def test_attaching_takes_milliseconds_whatever_the_size(fingerprint):
    shape = ExpertShape(layers=8, experts=8, hidden=512, intermediate=1024, tile=64)  # 400 MB in f32
    manifest = StoreManifest(fingerprint, shape, "f32", "")
    assert store_bytes(manifest) > 400_000_000
    StoreBuilder.create(store_name(fingerprint), manifest).finish()
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        Store.attach(store_name(fingerprint), fingerprint).close()
        best = min(best, time.perf_counter() - start)
    assert best < 0.01


# --- the head against damage --------------------------------------------------------------------------

GOOD = StoreManifest("ab" * 32, SHAPE, "bf16", "/m", (1, 2))


def test_a_head_reads_back():
    head = np.frombuffer(pack_head(GOOD, READY), dtype=np.uint8)
    manifest, offset = read_head(head, store_bytes(GOOD))
    assert manifest == GOOD
    assert offset == 2 * PAGE


@given(st.integers(0, len(pack_head(GOOD, READY)) - 1), st.integers(1, 255))
@settings(deadline=None)
def test_a_changed_byte_is_refused_or_means_nothing(place, change):
    head = np.frombuffer(pack_head(GOOD, READY), dtype=np.uint8).copy()
    head[place] ^= change
    if 36 <= place < PAGE:
        assert read_head(head, store_bytes(GOOD))[0] == GOOD  # the header page's unused rest
    else:
        with pytest.raises(StoreInvalid):
            read_head(head, store_bytes(GOOD))


@given(st.binary(max_size=6000), st.integers(0, 1 << 40))
@settings(deadline=None)
def test_arbitrary_bytes_are_refused(data, size):
    with pytest.raises(StoreInvalid):
        read_head(np.frombuffer(data, dtype=np.uint8), size)


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_an_arbitrary_manifest_is_refused(packed):
    header = struct.pack("<8sIIQQI", b"TANDEMST", 1, READY, len(packed), 2 * PAGE, zlib.crc32(packed))
    head = np.frombuffer(header.ljust(PAGE, b"\0") + packed, dtype=np.uint8)
    with pytest.raises(StoreInvalid):
        read_head(head, 10 * PAGE)


def test_a_store_cut_short_or_too_long_is_refused():
    head = np.frombuffer(pack_head(GOOD, READY), dtype=np.uint8)
    for size in (store_bytes(GOOD) - 1, store_bytes(GOOD) + 4096, 0):
        with pytest.raises(StoreInvalid):
            read_head(head, size)


# --- building once, and the last one out --------------------------------------------------------------

RACER = """
import sys, time
from pathlib import Path
from shm.errors import SegmentMissing
from shm.layout import ExpertShape
from shm.locks import build_lock
from shm.manifest import StoreManifest
from shm.store import Store, StoreBuilder, store_name
fingerprint, root = sys.argv[1], Path(sys.argv[2])
print("up", flush=True)
sys.stdin.readline()
with build_lock(fingerprint, root):
    try:
        Store.attach(store_name(fingerprint), fingerprint).close()
        print("shared")
    except SegmentMissing:
        shape = ExpertShape(2, 3, 48, 100, 16)
        builder = StoreBuilder.create(store_name(fingerprint), StoreManifest(fingerprint, shape, "f32", ""))
        time.sleep(0.3)
        builder.finish()
        print("built")
"""


def test_engines_that_start_together_build_once(fingerprint, tmp_path):
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, fingerprint, str(tmp_path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    assert [racer.stdout.readline() for racer in racers] == ["up\n"] * 3
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    answers = sorted(racer.communicate(timeout=30)[0].strip() for racer in racers)
    assert answers == ["built", "shared", "shared"]
    assert all(racer.returncode == 0 for racer in racers)
    assert list((tmp_path / ".locks").iterdir()) == []


def test_a_killed_builder_gives_its_lock_back(fingerprint, tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from shm.locks import build_lock\n"
        "with build_lock(sys.argv[1], Path(sys.argv[2])):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, fingerprint, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "held\n"
    calls = []

    def waiting() -> None:
        calls.append(1)
        if len(calls) == 3:
            holder.kill()

    with build_lock(fingerprint, tmp_path, waiting):
        assert len(calls) >= 3
    holder.communicate(timeout=10)


def test_the_last_one_out_removes_the_store(fingerprint, tmp_path):
    build(fingerprint)
    first = StoreLease.acquire(fingerprint, tmp_path)
    second = StoreLease.acquire(fingerprint, tmp_path)
    assert (tmp_path / ".locks").stat().st_mode & 0o7777 == 0o700
    assert not first.release(keep=False)
    assert file_of(fingerprint).exists()
    assert second.release(keep=False)
    assert not file_of(fingerprint).exists()
    assert list((tmp_path / ".locks").iterdir()) == []


def test_a_kept_store_stays_whoever_asked_and_until_it_was_used_again(fingerprint, tmp_path):
    build(fingerprint)
    asker = StoreLease.acquire(fingerprint, tmp_path)
    other = StoreLease.acquire(fingerprint, tmp_path)
    assert not asker.release(keep=True)
    assert not other.release(keep=False)
    assert file_of(fingerprint).exists()
    assert sweep(tmp_path) == []  # it was asked for
    assert StoreLease.acquire(fingerprint, tmp_path).release(keep=False)
    assert not file_of(fingerprint).exists()


def test_a_lease_needs_a_store(fingerprint, tmp_path):
    with pytest.raises(SegmentMissing):
        StoreLease.acquire(fingerprint, tmp_path)
    build(fingerprint)
    StoreLease.acquire(fingerprint, tmp_path).release(keep=False)


def test_many_leases_at_once_leave_nothing_behind(fingerprint, tmp_path):
    """Leases are taken and given back in threads; the store goes with the last and only then."""
    build(fingerprint)
    holder = StoreLease.acquire(fingerprint, tmp_path)
    removed: list[bool] = []

    def use() -> None:
        for _ in range(20):
            removed.append(StoreLease.acquire(fingerprint, tmp_path).release(keep=False))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert removed == [False] * 80
    assert holder.release(keep=False)


def test_the_sweep_removes_what_killed_engines_left(fingerprint, tmp_path):
    build(fingerprint)
    code = (
        "import os, sys; from pathlib import Path; from shm.locks import StoreLease\n"
        "lease = StoreLease.acquire(sys.argv[1], Path(sys.argv[2])); os.kill(os.getpid(), 9)\n"
    )
    held = StoreLease.acquire(fingerprint, tmp_path)
    for _ in range(2):
        killed = subprocess.run(
            [sys.executable, "-c", code, fingerprint, str(tmp_path)], cwd=ROOT, timeout=30, check=False
        )
        assert killed.returncode == -9
        assert sweep(tmp_path) == []  # one engine still uses it
    os.close(held._descriptor)  # as if it had been killed, too
    assert sweep(tmp_path) == [store_name(fingerprint)]
    assert not file_of(fingerprint).exists()
    assert list((tmp_path / ".locks").iterdir()) == []


def test_the_sweep_leaves_a_store_that_is_being_built(fingerprint, tmp_path):
    with build_lock(fingerprint, tmp_path):
        build(fingerprint)
        assert sweep(tmp_path) == []
        assert file_of(fingerprint).exists()


def test_a_lock_folder_of_another_user_is_refused(fingerprint, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    (tmp_path / ".locks").mkdir()
    os.chown(tmp_path / ".locks", 12345, 12345)
    with pytest.raises(ShmError, match="another user"), build_lock(fingerprint, tmp_path):
        pytest.fail("the lock was given")


# --- on disk ------------------------------------------------------------------------------------------


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


def test_a_segment_that_is_no_store_is_refused(fingerprint):
    with Segment.create(store_name(fingerprint), 3 * PAGE) as segment:
        segment.array[:] = 1
    with pytest.raises(StoreInvalid, match="not a store"):
        Store.attach(store_name(fingerprint))
