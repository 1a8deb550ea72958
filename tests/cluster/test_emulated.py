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
DRILL = Path(__file__).parent / "cluster_drill.py"


@pytest.mark.parametrize("replicas", [0, 1])
def test_no_answer_differs_under_faults(replicas: int) -> None:
    subprocess.run([sys.executable, DRILL, "--replicas", str(replicas)], check=True)
