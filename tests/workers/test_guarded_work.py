"""A Work that crashes the process which computes it, where that process must go on."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shm.descriptor import Descriptor, describe
from shm.layout import ExpertShape, StoreLayout, format_named
from workers.kernels.native import Library, WorkKernel

LAYOUT = StoreLayout(ExpertShape(1, 2, 64, 128, 128), format_named("int4"))


def work_of(expert: int) -> Descriptor:
    """One row through all of an expert."""
    return describe(0, [(expert, 0, 1)], [0, 1], [0], [1.0], 1)


def computed(works: WorkKernel, expert: int) -> np.ndarray:
    y = np.empty((1, 64), np.float32)
    works.compute(work_of(expert), np.linspace(-1, 1, 64, dtype=np.float32)[None], y)
    return y


def run(library: Library, path: Path) -> None:
    """In a process of its own: computes both experts of the file, cuts it, and computes again."""
    path.write_bytes(np.random.default_rng(0).bytes(LAYOUT.total_bytes))
    with path.open("r+b") as file:
        tiles = np.frombuffer(mmap.mmap(file.fileno(), LAYOUT.total_bytes), np.uint8)
    guarded, plain = (WorkKernel(library, LAYOUT, tiles, guarded=flag) for flag in (True, False))
    expected = computed(plain, 0)
    assert expected.any()
    assert not np.array_equal(computed(plain, 1), expected)
    os.truncate(path, LAYOUT.expert_stride)
    for _ in range(2):
        with pytest.raises(IndexError, match="crash"):
            computed(guarded, 1)
        np.testing.assert_array_equal(computed(guarded, 0), expected)


def test_a_work_that_crashes_ends_alone(library: Library, tmp_path: Path) -> None:
    """And a crash outside guarded Works, like a signal from outside, ends the process as ever."""
    code = f"""
import os, signal, sys
from pathlib import Path
import test_guarded_work as test
from workers.kernels.native import load
test.run(load({library.variant!r}), Path(sys.argv[1]))
print("went on", flush=True)
if sys.argv[2] == "sent":
    os.kill(os.getpid(), signal.SIGSEGV)
__import__("ctypes").string_at(0)
"""
    folder = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    for kind in ("sent", "own"):
        done = subprocess.run(
            [sys.executable, "-c", code, tmp_path / "tiles", kind],
            env=os.environ | {"PYTHONPATH": folder},
            stdout=subprocess.PIPE,
            timeout=60,
            check=False,
        )
        assert (done.stdout, done.returncode) == (b"went on\n", -signal.SIGSEGV)
