"""The sources of the CUDA kernels, and the options that they are compiled with."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shm.blocks import BlockFormat
from shm.formats import BF16, TileFormat

FOLDER = Path(__file__).parent
KEPT_IN = "kernels"  # the folder of compiled programs in the disk cache
FILE_NAME = re.compile(r"[0-9a-f]{16}\.cubin")  # of a compiled program in the disk cache
KERNELS = re.compile(r"^KERNEL\(\w+, (\w+)", re.MULTILINE)
INCLUDES = re.compile(r'^#include "(\w+\.cuh)"', re.MULTILINE)
OPTIONS = ("--std=c++17", "--fmad=false")  # every fused addition is written as one


@dataclass(frozen=True)
class Program:
    """One file and the constants of its compilation."""

    file: str
    constants: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of_blocks(cls, format: BlockFormat, fused: bool) -> Program:
        """Tiles and matrices of a quantized format. `fused`: with the bits of the host's variants whose
        additions are fused; else with those of `portable`."""
        return cls("tiles.cu", (("BITS", format.bits), ("GROUP", format.group), ("FUSED", int(fused))))

    @classmethod
    def of_format(cls, format: TileFormat, fused: bool) -> Program | None:
        """Tiles of a format; None without kernels for it."""
        if isinstance(format, BlockFormat):
            return cls.of_blocks(format, fused)
        return cls("plain.cu") if isinstance(format, BF16) else None

    @classmethod
    def of_sums(cls) -> Program:
        """Sums of partial sums in the host's memory."""
        return cls("sums.cu")

    @property
    def defines(self) -> tuple[str, ...]:
        """Options of any compiler."""
        return tuple(f"-D{name}={value}" for name, value in self.constants)


@cache
def kernels(file: str) -> frozenset[str]:
    """Names of the kernels of a program with this file."""
    source = text(file).decode()
    return frozenset(KERNELS.findall(source)).union(*map(kernels, INCLUDES.findall(source)))


@cache
def text(file: str) -> bytes:
    return (FOLDER / file).read_bytes()


@cache
def headers() -> tuple[str, ...]:
    """Names of the files that others include."""
    return tuple(sorted(path.name for path in FOLDER.glob("*.cuh")))
