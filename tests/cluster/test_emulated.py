"""Three emulated machines under every fault once: no answer differs, none is lost. Takes minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="the extra `cluster` is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]
DRILL, SPEED = (Path(__file__).parent / name for name in ("cluster_drill.py", "cluster_speed.py"))


@pytest.mark.parametrize("replicas", [0, 1])
def test_no_answer_differs_under_faults(replicas: int) -> None:
    subprocess.run([sys.executable, DRILL, "--replicas", str(replicas)], check=True)


def test_a_model_runs_that_no_machine_has_room_for() -> None:
    subprocess.run([sys.executable, SPEED, "--rounds", "1", "--model", "shape:qwen3-30b-a3b/2"], check=True)
