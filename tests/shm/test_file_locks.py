"""Lock files: who gets a lock, when a wait ends, and files that are removed by their holder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from shm.locks import leads_to, try_lock


@pytest.mark.parametrize(
    ("held", "wanted", "given"),
    [
        (fcntl.LOCK_SH, fcntl.LOCK_SH, True),
        (fcntl.LOCK_SH, fcntl.LOCK_EX, False),
        (fcntl.LOCK_EX, fcntl.LOCK_SH, False),
        (fcntl.LOCK_EX, fcntl.LOCK_EX, False),
    ],
)
def test_lock_excludes_others_until_its_descriptor_is_closed(tmp_path, held, wanted, given) -> None:
    path, before = tmp_path / "a.use", len(os.listdir("/proc/self/fd"))
    first = try_lock(path, held)
    assert first is not None
    assert path.stat().st_mode & 0o7777 == 0o600
    second = try_lock(path, wanted)
    assert (second is not None) == given
    if second is not None:
        os.close(second)
    os.close(first)
    third = try_lock(path, wanted)
    assert third is not None
    os.close(third)
    assert len(os.listdir("/proc/self/fd")) == before  # a refused lock leaves no descriptor open


def test_file_that_its_holder_removes_meanwhile_is_locked_anew(tmp_path: Path, monkeypatch) -> None:
    path, flock, turns = tmp_path / "a.use", fcntl.flock, []
    before = len(os.listdir("/proc/self/fd"))

    def removing(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        turns.append(operation)
        if len(turns) < 3:
            path.unlink()

    monkeypatch.setattr(fcntl, "flock", removing)
    found = try_lock(path, fcntl.LOCK_EX)
    assert found is not None
    assert turns == [fcntl.LOCK_EX | fcntl.LOCK_NB] * 3
    assert leads_to(path, found)
    path.unlink()
    assert not leads_to(path, found)
    path.touch()
    assert not leads_to(path, found)  # another file of that name
    os.close(found)
    assert len(os.listdir("/proc/self/fd")) == before


def test_name_that_leads_into_a_loop_or_to_a_file_does_not_lead_to_the_lock(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    found = try_lock(folder / "a.use", fcntl.LOCK_EX)
    assert found is not None
    folder.rename(tmp_path / "moved")
    folder.symlink_to(folder)
    assert not leads_to(folder / "a.use", found)
    folder.unlink()
    folder.touch()
    assert not leads_to(folder / "a.use", found)
    os.close(found)
