"""Files that another user has put under the names of segments and of the folder of locks."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_store import build

from shm.errors import SegmentMissing, ShmError
from shm.locks import StoreLease, build_lock, sweep, try_lock
from shm.segment import Segment, is_segment
from shm.store import store_name

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


def test_a_segment_of_a_taken_name_is_neither_used_nor_made(fingerprint, taken):
    before = taken.lstat()
    assert not is_segment(taken)
    with pytest.raises(ShmError, match="is not a segment of this user: have it removed, or avoid its name"):
        build(fingerprint)
    with build_lock(fingerprint), pytest.raises(SegmentMissing):
        StoreLease.acquire(fingerprint)
    assert sweep() == []
    assert taken.lstat() == before


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
