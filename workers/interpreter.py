"""How every other interpreter is started: its command and its environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # where `-m` finds the packages, from any working directory
# Without -P modules are looked up in the working directory first, which may hold a downloaded model.
PYTHON = (sys.executable, "-P")
CHILD_PROCESS = (*PYTHON, "-m", "workers.child")


def environment(threads: int) -> dict[str, str]:
    """Of a child whose numerical libraries use so many threads."""
    # An empty part of PYTHONPATH means the working directory.
    folders = (str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    # OpenMP's idle threads spin by default, which steals the cores that the other processes compute on.
    return os.environ | {
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": "1",  # numpy starts them when it is imported, before a worker is bound
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
    }
