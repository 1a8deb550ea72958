"""Files that another user has put under the names of segments and of the folder of locks."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_store import ROOT, build, run

from protocol.errors import NotPrivate
from protocol.files import own_directory
from shm.errors import SegmentMissing, ShmError
from shm.file_locks import try_lock
from shm.locks import StoreLease, build_lock, sweep
from shm.segment import Segment, is_segment, present_name, unlink
from shm.store import STORE_SPACE, store_name, store_prefix

OTHER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def take(path: Path, kind: str) -> None:
    """What another user can put there; without root's rights of another kind than the file that we expect."""
    match kind:
        case "file":
            path.touch()
        case "link":
            path.symlink_to("/etc/passwd")
        case "pipe":
            os.mkfifo(path, 0o666)  # the umask applies
        case "folder":
            path.mkdir()
        case "hard link":  # to a file of this user that others can write
            path.touch()
            path.chmod(0o666)
            os.link(path, path.with_name(f".{path.name}.linked"))
    if kind != "hard link" and os.geteuid() == 0:
        os.chown(path, OTHER, OTHER, follow_symlinks=False)


def free(path: Path) -> None:
    path.with_name(f".{path.name}.linked").unlink(missing_ok=True)
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.fixture(params=[pytest.param("file", marks=as_root), "link", "pipe", "folder", "hard link"])
def taken(request, fingerprint) -> Iterator[Path]:
    """The file of a store's usual name."""
    path = Path("/dev/shm") / store_name(fingerprint)[1:]
    take(path, request.param)
    yield path
    free(path)


ENGINE = """
import sys
from pathlib import Path
from shm.locks import StoreLease, build_lock
from shm.store import Store, store_name
with build_lock(sys.argv[1], Path(sys.argv[2])):
    Store.attach(store_name(sys.argv[1]), sys.argv[1]).close()
    lease = StoreLease.acquire(sys.argv[1], Path(sys.argv[2]))
print(lease.release(False))
"""


def test_a_store_with_a_taken_name_is_shared_and_removed_as_any_other(fingerprint, taken, tmp_path, caplog):
    before = taken.lstat()
    with build_lock(fingerprint, tmp_path):
        build(fingerprint)
    assert [f"{taken} is not a segment of this user" in line for line in caplog.messages] == [True]
    name = store_name(fingerprint)
    assert name.startswith(f"/{taken.name}-")
    lease = StoreLease.acquire(fingerprint, tmp_path)
    other = run(ENGINE, fingerprint, tmp_path)  # as another engine of this user does
    assert (other.stdout, other.stderr) == ("False\n", "")
    assert sweep(tmp_path) == []
    assert lease.release(keep=False)
    assert not is_segment(Path("/dev/shm") / name[1:])
    with build_lock(fingerprint, tmp_path):
        build(fingerprint)  # its builder is killed before an engine has a lease
    name = store_name(fingerprint)
    assert sweep(tmp_path) == [name] != [f"/{taken.name}"]
    assert [path.name for path in Path("/dev/shm").glob(f"{taken.name}*")] == [taken.name]
    assert taken.lstat() == before


def test_segments_of_this_user_are_found_by_name_and_suffix_only(name):
    segments = [Segment.create(f"{name}{end}", 100) for end in ("-0", "-0-12345678-9", "-0-1234567g")]
    try:
        assert present_name(f"{name}-0") == f"{name}-0"
        unlink(f"{name}-0")
        assert present_name(f"{name}-0") == f"{name}-0"
        segments.append(Segment.create(f"{name}-0-12345678", 100))
        assert present_name(f"{name}-0") == f"{name}-0-12345678"
    finally:
        for segment in segments:
            unlink(segment.name)


NEIGHBOUR = """
import os, sys
from pathlib import Path
from launch.runtime import RuntimeDir, running_engines, sweep
from protocol.sockets import runtime_root
from shm.control import ControlSegment
from shm.locks import build_lock, sweep as sweep_stores
from shm.segment import engine_prefix, present_name
from shm.layout import ExpertShape
from shm.manifest import StoreManifest
from shm.store import Store, StoreBuilder, store_name
user, fingerprint = int(sys.argv[1]), sys.argv[2]
os.setgroups([]); os.setgid(user); os.setuid(user)
root = runtime_root()
assert sweep() == [] and sweep_stores(root) == []
runtime = RuntimeDir.claim("neighbour")
print(root, engine_prefix(runtime.path))
sys.stdout.flush(); sys.stdin.readline()      # names of this engine's segments are taken now
with build_lock(fingerprint, root):
    manifest = StoreManifest(fingerprint, ExpertShape(2, 3, 48, 100, 16), "f32", "")
    StoreBuilder.create(store_name(fingerprint), manifest).finish()
Store.attach(store_name(fingerprint), fingerprint).close()
control = ControlSegment.create(f"{engine_prefix(runtime.path)}control-0", 2)
ControlSegment.attach(present_name(f"{engine_prefix(runtime.path)}control-0")).close()
assert runtime_root() == root and sweep() == []
runtime.remove()
name = store_name(fingerprint)
assert sweep_stores(root) == [name]
print(sorted(os.listdir(root)))
"""


@as_root
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_unprivileged_user_starts_beside_a_hostile_one(fingerprint, kind):
    """With the rights and in the folders that both really have: /tmp and /dev/shm."""
    user = 100_000 + os.getpid()
    space = os.environ[STORE_SPACE]
    taken = [Path(f"/tmp/tandem-{user}"), Path(f"/tmp/tandem-{user}-{space}")]
    taken.append(Path(f"/dev/shm{store_prefix()}{fingerprint[:16]}-{user}"))
    environment = {k: v for k, v in os.environ.items() if k != "XDG_RUNTIME_DIR"}
    command = [sys.executable, "-c", NEIGHBOUR, str(user), fingerprint]
    pipe = subprocess.PIPE
    try:
        for path in taken:
            take(path, kind)
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        ) as process:
            root, _, prefix = process.stdout.readline().strip().partition(" ")
            if prefix:
                taken.append(Path(f"/dev/shm{prefix}control-0"))
                take(taken[-1], kind)
            out, err = process.communicate("go\n", timeout=30)
        assert (process.returncode, out) == (0, "['.locks']\n"), err
        assert len(err.splitlines()) == 4, err  # runtime directory, lock folder, store, control
        assert root.startswith(f"/tmp/tandem-{user}.")
        assert all(path.lstat().st_uid == OTHER for path in taken)
    finally:
        for path in taken:
            free(path)
        for path in Path("/tmp").glob(f"tandem-{user}*"):
            subprocess.run(["rm", "-r", path])


@pytest.mark.parametrize("kind", [pytest.param("file", marks=as_root), pytest.param("folder", marks=as_root)])
def test_all_programs_use_the_same_folder_instead_of_a_taken_one(tmp_path, kind):
    place = tmp_path / "place"
    take(place, kind)
    (tmp_path / "place.theirs12").mkdir()
    os.chown(tmp_path / "place.theirs12", OTHER, OTHER)
    (tmp_path / "place.file1234").touch()
    used = own_directory(place)
    assert used.stat().st_mode & 0o7777 == 0o700
    assert own_directory(place) == used
    free(place)
    assert own_directory(place) == used  # a running engine is in it


def test_an_own_folder_that_is_open_is_an_error_with_what_to_do(tmp_path):
    (tmp_path / "place").mkdir(mode=0o755)
    with pytest.raises(NotPrivate, match="chmod 700"):
        own_directory(tmp_path / "place")
    with pytest.raises(NotPrivate, match="cannot create"):
        own_directory(tmp_path / "missing" / "place")


@pytest.mark.parametrize(("mode", "links"), [(0o620, 1), (0o600, 2)])
def test_a_segment_or_a_lock_that_others_can_write_is_not_used(name, tmp_path, mode, links):
    segment = Segment.create(name, 100)
    path, second = Path(f"/dev/shm{name}"), Path(f"/dev/shm{name}-second")
    try:
        for file in (path, tmp_path / "a.use"):
            file.touch()
            file.chmod(mode)
        if links == 2:
            os.link(path, second)
            os.link(tmp_path / "a.use", tmp_path / "second")
        with pytest.raises(SegmentMissing, match=rf"{name} (is open to other users|has 2 names)"):
            Segment.attach(name)
        with pytest.raises(ShmError, match=r"a.use (is open to other users|has 2 names)"):
            try_lock(tmp_path / "a.use", fcntl.LOCK_SH)
    finally:
        segment.close()
        path.unlink()
        second.unlink(missing_ok=True)


def test_a_found_segment_is_looked_up_without_reading_all_names_again(name, monkeypatch):
    take(Path(f"/dev/shm{name}"), "pipe")
    segment = Segment.create(name, 100)
    try:
        assert present_name(name) == segment.name != name
        with monkeypatch.context() as patch:
            for read in ("listdir", "scandir"):  # of a hundred thousand names of other users, for example
                patch.setattr(os, read, None)
            assert present_name(name) == segment.name
        unlink(segment.name)
        assert present_name(name) == name
    finally:
        unlink(segment.name)
        free(Path(f"/dev/shm{name}"))
