"""The CUDA kernels on the host: their own sources, compiled with `emulated_cuda.h`."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.kernels.cuda.compiler import FOLDER, Program
from workers.kernels.cuda.launcher import Arguments, Tables

HEADER = Path(__file__).with_name("emulated_cuda.h")
# Unoptimized: to compile takes longer than to run.
OPTIONS = (
    "-O0",
    "-std=c++17",
    "-ffp-contract=off",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Werror",
)


class EmulatedLauncher:
    """A `Launcher` whose device is the host. `launched`: how often each kernel; `blocks`: of its
    last launch."""

    device = torch.device("cpu")

    def __init__(self, library: ctypes.CDLL) -> None:
        self._launch = library.emulated_launch
        self._launch.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
        self._launch.restype = None
        self._arguments = Arguments()
        self.launched: Counter[str] = Counter()
        self.blocks: dict[str, int] = {}

    def launch(
        self, kernel: str, blocks: int, threads: int, *arguments: int, tables: Tables | None = None
    ) -> None:
        self.launched[kernel] += 1
        self.blocks[kernel] = blocks
        self._launch(kernel.encode(), blocks, threads, self._arguments.fill(arguments, tables))

    def upload(self, data: NDArray[np.uint8]) -> Tensor:
        return torch.from_numpy(data.copy())


@cache
def library(program: Program) -> ctypes.CDLL:
    """Skips where there is no C++ compiler."""
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    with TemporaryDirectory() as folder:
        built = Path(folder) / "emulated.so"
        command = [compiler, *OPTIONS, *program.defines, f'-DTANDEM_EMULATED="{HEADER}"']
        command += ["-shared", "-fPIC", "-o", str(built), "-x", "c++", str(FOLDER / program.file)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return ctypes.CDLL(str(built))
