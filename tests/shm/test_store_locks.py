"""Locks of a store's builder and users, and its removal, with real processes, some of which are killed."""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from small_store import SHAPE, build, file_of, running

from shm.errors import SegmentMissing
from shm.locks import StoreLease, build_folder, build_lock, remove_unused, sweep
from shm.store import BUILDING, STORE_SPACE, Store, StoreManifest, pack_head, store_name, store_segments

RACER = """
import sys, time
from shm.errors import SegmentMissing
from shm.layout import ExpertShape
from shm.locks import build_lock
from shm.store import StoreManifest
from shm.store import Store, StoreBuilder, store_name, store_segments
fingerprint = sys.argv[1]
print("up", flush=True)
sys.stdin.readline()
with build_lock(fingerprint):
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


def test_engines_that_start_together_build_once(fingerprint):
    with ExitStack() as stack:
        racers = [stack.enter_context(running(RACER, fingerprint)) for _ in range(3)]
        assert [racer.stdout.readline() for racer in racers] == ["up\n"] * 3
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        answers = sorted(racer.communicate(timeout=30)[0].strip() for racer in racers)
    assert answers == ["built", "shared", "shared"]
    assert all(racer.returncode == 0 for racer in racers)


HOLDER = """
import sys, time
from shm.locks import StoreLease
lease = StoreLease.acquire(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


@contextmanager
def killed_user(fingerprint: str) -> Iterator[None]:
    """An engine that holds a lease for the block and is then killed."""
    with running(HOLDER, fingerprint) as user:
        assert user.stdout.readline() == "held\n"
        yield


def test_lock_of_a_killed_builder_is_released(fingerprint):
    code = (
        "import sys, time; from shm.locks import build_lock\n"
        "with build_lock(sys.argv[1]):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    calls = []

    def waiting() -> None:
        calls.append(1)
        if len(calls) == 3:
            holder.kill()

    with running(code, fingerprint) as holder:
        assert holder.stdout.readline() == "held\n"
        with build_lock(fingerprint, waiting):
            assert len(calls) >= 3


def test_store_kept_by_any_user_stays_until_its_next_use(fingerprint):
    build(fingerprint)
    asker = StoreLease.acquire(fingerprint)
    other = StoreLease.acquire(fingerprint)
    assert not asker.release(keep=True)
    long_ago = (1e9, 1e9)
    os.utime(file_of(fingerprint), long_ago)
    now = time.time()
    assert not other.release(keep=False)
    assert file_of(fingerprint).stat().st_mtime >= now - 1  # the time of its last use
    assert sweep() == []  # it is kept
    os.utime(file_of(fingerprint), long_ago)
    next_use = StoreLease.acquire(fingerprint)
    assert file_of(fingerprint).stat().st_mtime >= now - 1
    assert next_use.release(keep=False)
    assert not file_of(fingerprint).exists()


def test_last_of_many_concurrent_leases_removes_the_store(fingerprint):
    """Leases are taken and released in threads; only the last release removes the store."""
    build(fingerprint)
    holder = StoreLease.acquire(fingerprint)
    removed: list[bool] = []

    def use() -> None:
        for _ in range(20):
            removed.append(StoreLease.acquire(fingerprint).release(keep=False))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert removed == [False] * 80
    assert holder.release(keep=False)


def test_sweep_removes_stores_of_killed_engines(fingerprint):
    build(fingerprint)
    with killed_user(fingerprint):
        with killed_user(fingerprint):
            assert sweep() == []
        assert sweep() == []  # one engine still uses it
    assert sweep() == [store_name(fingerprint)]
    assert not file_of(fingerprint).exists()


def test_sweep_keeps_a_store_that_is_being_built(fingerprint):
    with build_lock(fingerprint):
        build(fingerprint)
        assert sweep() == []
        assert file_of(fingerprint).exists()


def leave_half_built(fingerprint: str) -> None:
    """Leave what a killed builder leaves."""
    file_of(fingerprint).write_bytes(pack_head(StoreManifest(fingerprint, SHAPE, "bf16", ""), BUILDING))


def test_unfinished_store_is_swept_unless_it_is_being_built(fingerprint):
    leave_half_built(fingerprint)
    with build_lock(fingerprint):
        assert sweep() == []
    assert sweep() == [store_name(fingerprint)]
    assert not file_of(fingerprint).exists()
    file_of(fingerprint).touch(mode=0o600)  # its builder was killed before it wrote a byte
    assert sweep() == [store_name(fingerprint)]


def test_only_a_store_that_can_be_used_is_kept(fingerprint):
    build(fingerprint)
    StoreLease.acquire(fingerprint).release(keep=True)
    assert sweep() == []
    os.truncate(file_of(fingerprint), 5000)
    assert sweep() == [store_name(fingerprint)]


def test_lease_of_a_store_that_is_being_rebuilt_raises_segment_missing(fingerprint):
    leave_half_built(fingerprint)
    with pytest.raises(SegmentMissing, match="unfinished"):
        StoreLease.acquire(fingerprint)


def test_a_store_in_use_is_not_removed(fingerprint):
    build(fingerprint)
    with build_lock(fingerprint):
        lease = StoreLease.acquire(fingerprint)
        assert not remove_unused(store_name(fingerprint))
        Store.attach(store_name(fingerprint)).close()
        assert lease.release(keep=False)
        assert remove_unused(store_name(fingerprint))  # already
        build(fingerprint)
        assert remove_unused(store_name(fingerprint))
        assert not file_of(fingerprint).exists()


def test_spaces_share_neither_stores_nor_locks(fingerprint, monkeypatch):
    leave_half_built(fingerprint)
    here = file_of(fingerprint)
    with build_lock(fingerprint):
        folder = build_folder()
        monkeypatch.setenv(STORE_SPACE, "elsewhere")
        try:
            assert sweep() == []
            assert here.exists()
            assert file_of(fingerprint) != here
            with build_lock(fingerprint):  # at once, although the other space's is held
                assert build_folder() != folder
        finally:
            shutil.rmtree(build_folder().parent)
    monkeypatch.setenv(STORE_SPACE, "")  # not swept here: other programs' stores are in it
    assert here.name not in store_segments()
    monkeypatch.undo()
    assert sweep() == [store_name(fingerprint)]
