"""The measurement of round trips between two processes: the second one never outlives the first."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from shm.doorbell import library

ROOT = Path(__file__).parents[2]
ENDLESS = "from workers.round_trips import round_trips\nwhile round_trips(): pass"


@pytest.mark.skipif(library() is None, reason="the doorbell library is not compiled here")
def test_the_other_process_ends_with_a_killed_first(tmp_path: Path) -> None:
    for number in range(3):
        place = os.environ | {"TMPDIR": str(tmp_path)}
        process = subprocess.Popen([sys.executable, "-P", "-c", ENDLESS], cwd=ROOT, env=place)
        other = forked(psutil.Process(process.pid))
        process.kill()
        process.wait()
        assert wait_until(partial(ended, other), 5), number


def forked(first: psutil.Process) -> psutil.Process:
    found: list[psutil.Process] = []
    assert wait_until(lambda: found.extend(first.children()) or found, 20)  # type: ignore[func-returns-value]
    return found[0]


def ended(process: psutil.Process) -> bool:
    return not process.is_running()
