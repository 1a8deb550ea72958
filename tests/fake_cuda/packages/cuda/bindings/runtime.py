"""For child processes that a test starts with this folder in PYTHONPATH: the GPU that FAKE_CUDA names."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[3]))
from fake_runtime import FakeRuntime

_key, _seed = os.environ["FAKE_CUDA"].split(":")
_runtime = FakeRuntime(_key, int(_seed))


def __getattr__(name: str) -> Any:
    return getattr(_runtime, name)
