"""Locks of a store's builder and users, and its removal, with real processes, some of which are killed."""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from small_store import SHAPE, build, file_of, fill, run, running

from shm import locks
from shm.errors import SegmentMissing, ShmError
from shm.locks import StoreLease, build_folder, build_lock, remove_unused, sweep
from shm.manifest import BUILDING, StoreManifest, pack_head
from shm.store import STORE_SPACE, Store, StoreBuilder, store_name

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


@pytest.mark.parametrize("roots", [("one", "one", "one"), ("one", "two", "three")])
def test_engines_that_start_together_build_once(fingerprint, tmp_path, roots):
    """Also engines with different runtime directories."""
    for root in set(roots):
        (tmp_path / root).mkdir()
    with ExitStack() as stack:
        racers = [stack.enter_context(running(RACER, fingerprint, tmp_path / root)) for root in roots]
        assert [racer.stdout.readline() for racer in racers] == ["up\n"] * 3
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        answers = sorted(racer.communicate(timeout=30)[0].strip() for racer in racers)
    assert answers == ["built", "shared", "shared"]
    assert all(racer.returncode == 0 for racer in racers)
    for root in roots:  # for the sweep to find
        assert [p.suffix for p in (tmp_path / root / ".locks").iterdir()] == [".use"]


HOLDER = """
import sys, time
from pathlib import Path
from shm.locks import StoreLease
lease = StoreLease.acquire(sys.argv[1], Path(sys.argv[2]))
print("held", flush=True)
time.sleep(60)
"""


@contextmanager
def killed_user(fingerprint: str, root: Path) -> Iterator[None]:
    """An engine that holds a lease for the block and is then killed."""
    with running(HOLDER, fingerprint, root) as user:
        assert user.stdout.readline() == "held\n"
        yield


def kill_a_builder(fingerprint: str, root: Path) -> None:
    """Run an engine that is killed while it holds the build lock."""
    code = (
        "import os, signal, sys; from pathlib import Path; from shm.locks import build_lock\n"
        "with build_lock(sys.argv[1], Path(sys.argv[2])): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run(code, fingerprint, root)


def test_lock_of_a_killed_builder_is_released(fingerprint, tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from shm.locks import build_lock\n"
        "with build_lock(sys.argv[1], Path(sys.argv[2])):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    calls = []

    def waiting() -> None:
        calls.append(1)
        if len(calls) == 3:
            holder.kill()

    with running(code, fingerprint, tmp_path) as holder:
        assert holder.stdout.readline() == "held\n"
        with build_lock(fingerprint, tmp_path, waiting):
            assert len(calls) >= 3


def test_last_user_removes_the_store(fingerprint, tmp_path):
    build(fingerprint)
    first = StoreLease.acquire(fingerprint, tmp_path)
    second = StoreLease.acquire(fingerprint, tmp_path)
    assert (tmp_path / ".locks").stat().st_mode & 0o7777 == 0o700
    assert not first.release(keep=False)
    assert file_of(fingerprint).exists()
    assert second.release(keep=False)
    assert not file_of(fingerprint).exists()
    assert list((tmp_path / ".locks").iterdir()) == []


def test_store_kept_by_any_user_stays_until_its_next_use(fingerprint, tmp_path):
    build(fingerprint)
    asker = StoreLease.acquire(fingerprint, tmp_path)
    other = StoreLease.acquire(fingerprint, tmp_path)
    assert not asker.release(keep=True)
    long_ago = (1e9, 1e9)
    os.utime(file_of(fingerprint), long_ago)
    now = time.time()
    assert not other.release(keep=False)
    assert file_of(fingerprint).stat().st_mtime >= now - 1  # the time of its last use
    assert sweep(tmp_path) == []  # it is kept
    os.utime(file_of(fingerprint), long_ago)
    next_use = StoreLease.acquire(fingerprint, tmp_path)
    assert file_of(fingerprint).stat().st_mtime >= now - 1
    assert next_use.release(keep=False)
    assert not file_of(fingerprint).exists()


def test_a_lease_needs_a_store(fingerprint, tmp_path):
    with pytest.raises(SegmentMissing):
        StoreLease.acquire(fingerprint, tmp_path)
    build(fingerprint)
    StoreLease.acquire(fingerprint, tmp_path).release(keep=False)


def test_last_of_many_concurrent_leases_removes_the_store(fingerprint, tmp_path):
    """Leases are taken and released in threads; only the last release removes the store."""
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


def test_use_file_exists_after_a_build_during_which_users_removed_it(fingerprint, tmp_path):
    """Without it the sweep of a start after a crash would not find the store."""
    use = tmp_path / ".locks" / f"{fingerprint[:16]}.use"
    with build_lock(fingerprint, tmp_path):
        build(fingerprint)
        use.unlink()  # as the last user of the store does
    assert use.exists()
    assert sweep(tmp_path) == [store_name(fingerprint)]


def test_sweep_removes_stores_of_killed_engines(fingerprint, tmp_path):
    build(fingerprint)
    with killed_user(fingerprint, tmp_path):
        with killed_user(fingerprint, tmp_path):
            assert sweep(tmp_path) == []
        assert sweep(tmp_path) == []  # one engine still uses it
    assert sweep(tmp_path) == [store_name(fingerprint)]
    assert not file_of(fingerprint).exists()
    assert list((tmp_path / ".locks").iterdir()) == []


def test_sweep_removes_a_store_without_a_first_user(fingerprint, tmp_path):
    with build_lock(fingerprint, tmp_path):
        build(fingerprint)
    assert sweep(tmp_path) == [store_name(fingerprint)]


def test_an_engine_of_another_root_keeps_the_store_too(fingerprint, tmp_path):
    for root in ("here", "there"):
        (tmp_path / root).mkdir()
    build(fingerprint)
    here = StoreLease.acquire(fingerprint, tmp_path / "here")
    there = StoreLease.acquire(fingerprint, tmp_path / "there")
    assert not here.release(keep=False)
    assert file_of(fingerprint).exists()
    assert list((tmp_path / "here" / ".locks").iterdir()) == []
    assert there.release(keep=False)
    assert not file_of(fingerprint).exists()


def test_sweep_keeps_a_store_that_is_being_built(fingerprint, tmp_path):
    for root in ("here", "there"):
        (tmp_path / root).mkdir()
    with build_lock(fingerprint, tmp_path / "there"):
        pass  # an engine of the other root looked for this model and was killed
    with build_lock(fingerprint, tmp_path / "here"):
        build(fingerprint)
        assert sweep(tmp_path / "here") == []
        assert sweep(tmp_path / "there") == []
        assert file_of(fingerprint).exists()


def test_sweep_removes_the_store_of_a_killed_builder(fingerprint, tmp_path):
    kill_a_builder(fingerprint, tmp_path)
    build(fingerprint)
    assert sweep(tmp_path) == [store_name(fingerprint)]
    assert list((tmp_path / ".locks").iterdir()) == []


def leave_half_built(fingerprint: str) -> None:
    """Leave what a killed builder leaves."""
    file_of(fingerprint).write_bytes(pack_head(StoreManifest(fingerprint, SHAPE, "bf16", ""), BUILDING))


def test_unfinished_store_of_any_root_is_swept(fingerprint, tmp_path):
    """Also by an engine of another root. A store that is being built is not swept, nor a finished one, which
    an engine of the other root may have asked to keep."""
    leave_half_built(fingerprint)
    (tmp_path / "there").mkdir()
    with build_lock(fingerprint, tmp_path / "there"):
        assert sweep(tmp_path) == []
    assert sweep(tmp_path) == [store_name(fingerprint)]
    assert not file_of(fingerprint).exists()
    file_of(fingerprint).touch(mode=0o600)  # its builder was killed before it wrote a byte
    assert sweep(tmp_path) == [store_name(fingerprint)]
    build(fingerprint)
    assert sweep(tmp_path) == []
    assert file_of(fingerprint).exists()


def test_a_store_that_is_being_built_without_the_lock_is_not_swept(fingerprint, tmp_path):
    """Tools and tests build stores under names that no engine uses."""
    manifest = StoreManifest(fingerprint, SHAPE, "bf16", "")
    builder = StoreBuilder.create(store_name(fingerprint), manifest)
    assert sweep(tmp_path) == []
    fill(builder)
    builder.finish()
    Store.attach(store_name(fingerprint), fingerprint).close()


def test_only_a_store_that_can_be_used_is_kept(fingerprint, tmp_path):
    build(fingerprint)
    StoreLease.acquire(fingerprint, tmp_path).release(keep=True)
    assert sweep(tmp_path) == []
    os.truncate(file_of(fingerprint), 5000)
    assert sweep(tmp_path) == [store_name(fingerprint)]
    assert list((tmp_path / ".locks").iterdir()) == []


def test_lease_of_a_store_that_is_being_rebuilt_raises_segment_missing(fingerprint, tmp_path):
    leave_half_built(fingerprint)
    with pytest.raises(SegmentMissing, match="unfinished"):
        StoreLease.acquire(fingerprint, tmp_path)


def test_lock_files_of_killed_builders_are_swept(fingerprint, tmp_path):
    """Also if their engine's root has been removed."""
    (tmp_path / "there").mkdir()
    kill_a_builder(fingerprint, tmp_path / "there")
    left = build_folder() / f"{fingerprint[:16]}.build"
    assert left.exists()
    (tmp_path / "here").mkdir()
    assert sweep(tmp_path / "here") == []
    assert not left.exists()


def test_a_store_in_use_is_not_removed(fingerprint, tmp_path):
    build(fingerprint)
    with build_lock(fingerprint, tmp_path):
        lease = StoreLease.acquire(fingerprint, tmp_path)
        assert not remove_unused(store_name(fingerprint))
        Store.attach(store_name(fingerprint)).close()
        assert lease.release(keep=False)
        assert remove_unused(store_name(fingerprint))  # already
        build(fingerprint)
        assert remove_unused(store_name(fingerprint))
        assert not file_of(fingerprint).exists()


def test_a_lock_folder_of_another_user_is_refused(fingerprint, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    (tmp_path / ".locks").mkdir()
    os.chown(tmp_path / ".locks", 12345, 12345)
    with (
        pytest.raises(ShmError, match="belongs to user 12345, not to you"),
        build_lock(fingerprint, tmp_path),
    ):
        pytest.fail("the lock was given")


def test_spaces_share_neither_stores_nor_locks(fingerprint, tmp_path, monkeypatch):
    leave_half_built(fingerprint)
    here = file_of(fingerprint)
    with build_lock(fingerprint, tmp_path):
        folder = build_folder()
        monkeypatch.setenv(STORE_SPACE, "elsewhere")
        try:
            assert sweep(tmp_path) == []
            assert here.exists()
            assert file_of(fingerprint) != here
            with build_lock(fingerprint, tmp_path):  # at once, although the other space's is held
                assert build_folder() != folder
        finally:
            shutil.rmtree(build_folder().parent)
    monkeypatch.setenv(STORE_SPACE, "")  # not swept here: other programs' stores are in it
    (other := tmp_path / "other").mkdir()
    assert fingerprint[:16] not in locks._known_keys(other)
    monkeypatch.undo()
    assert fingerprint[:16] in locks._known_keys(other)
    assert sweep(tmp_path) == [store_name(fingerprint)]


@pytest.mark.parametrize("space", ["a/b", "..", "a-b", "a" * 65])
def test_a_space_is_one_plain_word(space, monkeypatch):
    monkeypatch.setenv(STORE_SPACE, space)
    with pytest.raises(ShmError, match=r"^TANDEM_STORE_SPACE may hold letters"):
        store_name("f" * 64)
