"""Registers and spills of the CUDA kernels, for each architecture and format; needs no GPU.

    python -m benchmarks.gpu.registers [--format int4]

Compiles with NVRTC where cuda-bindings finds it, otherwise with nvcc.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from shm.expert_math import SWIGLU
from shm.layout import FP8, format_named
from workers.cuda import CudaError
from workers.kernels.cuda import attention, compiler
from workers.kernels.cuda.compiler import OPTIONS, Nvrtc, Program
from workers.kernels.cuda.sums import SUMS

# After the formats: matrices of a backbone in fp8; channels of three kinds; the workers' partial sums;
# attention over a KV cache of either type.
CHANNELS = {"channels-bf16": 16, "channels-int8": 8, "channels-int4": 4}
ATTENTION = {"attention-bf16": torch.bfloat16, "attention-f32": torch.float32}
FORMATS = (
    "int4",
    "int4-g128",
    "int8",
    "q4_0",
    "q8_0",
    "mxfp4",
    "nvfp4",
    "int4-f16",
    "bf16",
    "fp8",
    "fp8-matrix",
    *CHANNELS,
    "sums",
    *ATTENTION,
)
ARCHITECTURES = (80, 86, 89, 90, 120)
ENTRY = re.compile(
    r"Compiling entry function '(\w+)' for 'sm_(\d+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores,"
    r" (\d+) bytes spill loads.*?Used (\d+) registers",
    re.DOTALL,
)


class NoCompiler(Exception):
    """Neither NVRTC nor nvcc is here."""


@dataclass(frozen=True)
class Usage:
    """Facts that ptxas prints of a kernel."""

    architecture: int
    kernel: str
    registers: int
    spilled: int  # bytes, stores and loads


def program(name: str) -> Program:
    """Returns the compiler by one of these names."""
    if name in ATTENTION:
        return attention.program(ATTENTION[name])
    if name in CHANNELS:
        return Program.of_channels(CHANNELS[name], SWIGLU)
    if name == "fp8-matrix":
        return Program.of_matrices(FP8())
    found = SUMS if name == "sums" else Program.of_format(format_named(name))
    assert found is not None
    return found


def missing(architecture: int) -> str:
    """Returns why programs cannot be compiled for an architecture here; "" where they can."""
    try:
        nvrtc = Nvrtc()
    except CudaError as e:
        return "" if shutil.which("nvcc") else f"{e}; and there is no nvcc"
    if architecture in nvrtc.architectures:
        return ""
    return f"NVRTC {'.'.join(map(str, nvrtc.version))} does not compile for sm_{architecture}"


def usages(program: Program, architectures: tuple[int, ...] = ARCHITECTURES) -> list[Usage]:
    """Compile a program. Raises NoCompiler, and CudaError where it does not compile."""
    try:
        nvrtc = Nvrtc()
    except CudaError as e:
        if (nvcc := shutil.which("nvcc")) is None:
            raise NoCompiler(f"{e}; and there is no nvcc") from None
        messages = _by_nvcc(nvcc, program, architectures)
    else:
        targets = [f"--gpu-architecture=sm_{one}" for one in architectures]
        options = (*OPTIONS, *program.defines, "--ptxas-options=-v")
        messages = "".join(nvrtc.compile(program, (*options, target))[1] for target in targets)
    return [
        Usage(int(architecture), kernel, int(registers), int(stores) + int(loads))
        for kernel, architecture, _, stores, loads, registers in ENTRY.findall(messages)
    ]


def _by_nvcc(nvcc: str, program: Program, architectures: tuple[int, ...]) -> str:
    targets = [f"-gencode=arch=compute_{one},code=sm_{one}" for one in architectures]
    with TemporaryDirectory() as folder:
        command = [nvcc, "-fatbin", *targets, *OPTIONS, *program.defines, "-Xptxas", "-v"]
        command += ["-o", str(Path(folder) / "kernels.fatbin"), str(compiler.FOLDER / program.file)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise CudaError(f"nvcc: {done.stderr[:2000]}")
    return done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--format", action="append", choices=FORMATS)
    arguments = parser.parse_args()
    found: dict[str, list[Usage]] = {}
    lacking = {one: reason for one in ARCHITECTURES if (reason := missing(one))}
    for reason in dict.fromkeys(lacking.values()):
        print(reason, file=sys.stderr)
    if len(lacking) == len(ARCHITECTURES):
        return 1
    architectures = tuple(one for one in ARCHITECTURES if one not in lacking)
    try:
        for name in arguments.format or FORMATS:
            found[name] = usages(program(name), architectures)
    except (NoCompiler, CudaError) as e:
        print(e, file=sys.stderr)
        return 1
    for name, each in found.items():
        print(f"{name}: registers of a thread (bytes spilled)")
        print(f"{'':12}" + "".join(f"{f'sm_{one}':>12}" for one in architectures))
        for kernel in dict.fromkeys(one.kernel for one in each):
            cells = [
                f"{one.registers}" + (f" ({one.spilled})" if one.spilled else "")
                for one in each
                if one.kernel == kernel
            ]
            print(f"{kernel:12}" + "".join(f"{cell:>12}" for cell in cells))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
