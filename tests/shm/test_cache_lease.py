"""Leases of the disk cache's entries: an entry is unused when the last lease is released, or its holder was
killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from shm.cache_lease import LOCK_FOLDER, CacheLease, lease_key, unused_entry, users

KEY, OTHER = "5" * 16, "6" * 16
LATE = f"""
import sys
from pathlib import Path
from shm.cache_lease import CacheLease
print("ready", flush=True)
lease = CacheLease.acquire(Path(sys.argv[1]), ["{KEY}"], "late")
print("leased", flush=True)
input()
"""


def test_entry_is_unused_after_the_last_lease_is_released(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    first = CacheLease.acquire(folder, [KEY, OTHER], "one")
    second = CacheLease.acquire(folder, [lease_key(KEY * 4)], "two")
    assert users(folder, KEY) == "engine one, engine two"
    assert users(folder, OTHER) == "engine one"
    with (folder / LOCK_FOLDER / f"{OTHER}.use").open("a") as file:
        file.write(f"killed {1 << 30}\n")  # no process has this number
    assert users(folder, OTHER) == "engine one"
    first.release()
    first.release()
    assert users(folder, OTHER) == ""
    with unused_entry(folder, KEY) as unused:
        assert not unused
    second.release()
    assert users(folder, KEY) == ""
    assert os.listdir(folder) == []


def test_no_lease_begins_while_an_entry_is_removed_and_a_killed_engine_holds_none(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", LATE, str(tmp_path)]
    root = Path(__file__).parents[2]
    with unused_entry(tmp_path, KEY) as unused:
        assert unused
        late = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
        assert late.stdin is not None
        assert late.stdout is not None
        assert late.stdout.readline() == "ready\n"
        assert (tmp_path / LOCK_FOLDER / f"{KEY}.use").read_text() == ""
    assert late.stdout.readline() == "leased\n"
    assert users(tmp_path, KEY) == "engine late"
    late.kill()
    late.wait()
    late.stdin.close()
    late.stdout.close()
    assert users(tmp_path, KEY) == ""
    assert os.listdir(tmp_path / LOCK_FOLDER) == [f"{KEY}.use"]
    CacheLease.acquire(tmp_path, [OTHER], "next").release()
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_used_holds_no_lease(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    lease = CacheLease.acquire(tmp_path / "file" / "cache", [KEY], "one")
    assert users(tmp_path / "file" / "cache", KEY) == ""
    lease.release()
