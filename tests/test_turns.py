"""Tests marked `alone` exclude those of other processes, and a session that stops at a failure ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LIMIT = 100.0  # seconds for a session of a few tests, on a machine that may be busy
HEAD = """
import json, os, time
from pathlib import Path
import pytest

def note(name, seconds):
    began = time.monotonic()
    time.sleep(seconds)
    line = json.dumps([name, began, time.monotonic()])
    with open("log", "a") as log:
        print(line, file=log)
"""
EXCLUSIVE = """
@pytest.mark.alone
@pytest.mark.parametrize("i", range(3))
def test_exclusive(i):
    note("exclusive", 0.05)
    assert i < {failing}
"""
ORDINARY = """
@pytest.mark.parametrize("i", range(8))
def test_ordinary(i):
    note("ordinary", 0.05)
"""


def session(folder: Path, failing: int, *options: str) -> tuple[str, list[tuple[str, float, float]]]:
    """The output of pytest for two files in two processes, and the times at which their tests began and
    ended."""
    (folder / "test_a.py").write_text(HEAD + EXCLUSIVE.format(failing=failing))
    (folder / "test_b.py").write_text(HEAD + ORDINARY + EXCLUSIVE.format(failing=failing))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "turns", "-n", "2", "--dist", "loadfile", *options],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent))), "XDG_RUNTIME_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    return done.stdout, [tuple(json.loads(line)) for line in (folder / "log").read_text().splitlines()]


def test_exclusive_tests_overlap_with_no_other(tmp_path: Path) -> None:
    printed, ran = session(tmp_path, failing=3)
    assert "14 passed" in printed
    for name, began, ended in ran:
        if name == "exclusive":
            assert [other for other in ran if other[1] < ended and began < other[2]] == [(name, began, ended)]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_session_that_stops_at_an_exclusive_test_ends(failing: int, tmp_path: Path) -> None:
    printed, _ = session(tmp_path, failing, "-x")
    assert "stopping after 1 failures" in printed
