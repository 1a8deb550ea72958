"""The siege of the gateway (benchmarks/siege) with few requests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_process_ends_and_no_answer_changes_in_a_small_siege() -> None:
    few = ("--requests", "4000", "--seconds", "20", "--turns", "1")
    command = [sys.executable, "-m", "benchmarks.siege", *few]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=500)
    assert done.returncode in (0, 1)
    faults = re.findall("^FAULT: (.*)", done.stdout, re.MULTILINE)
    assert [fault for fault in faults if not fault.endswith("of their speed")] == []  # others' work slows it
    assert re.search(r"│ all +│ +[1-9]\d{3,} ", done.stdout)
