"""The sources of the CUDA kernels. NVRTC, which comes with torch's CUDA build, compiles them, and
the result is kept.

`<cache folder>/kernels/<key>.cubin`: the key is a hash of the sources, the options, the GPU's architecture
and NVRTC's version. Files are 0600 in 0700 folders; one that another user can have written is not used. A
second start reads the file in a millisecond, where compiling takes some seconds.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from shm.atomic_file import keep, read_kept
from shm.blocks import BlockFormat
from shm.expert_math import SWIGLU, ExpertMath, Glu, Relu2
from shm.formats import BF16, MatrixFormat, TileFormat
from shm.fp8 import FP8
from workers.cuda import CudaError

FOLDER = Path(__file__).parent
KEPT_IN = "kernels"  # the folder of compiled programs in the disk cache
FILE_NAME = re.compile(r"[0-9a-f]{16}\.cubin")  # of a compiled program in the disk cache
KERNELS = re.compile(r"^KERNEL\(\w+, (\w+)", re.MULTILINE)
EXPERT_KERNELS = re.compile(r"^EXPERT_KERNELS\((\d+)", re.MULTILINE)  # gate_up_N and down_N
INCLUDES = re.compile(r'^#include "(\w+\.cuh)"', re.MULTILINE)
OPTIONS = ("--std=c++17", "--fmad=false")  # every fused addition is written as one


@dataclass(frozen=True)
class Program:
    """One file and the constants of its compilation."""

    file: str
    constants: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of_blocks(cls, format: BlockFormat, math: ExpertMath = SWIGLU) -> Program:
        """Tiles and matrices of a quantized format."""
        kind = (("BITS", format.bits), ("GROUP", format.group), ("SCALES", int(format.scales)))
        return cls("tiles.cu", (*kind, *_constants(math)))

    @classmethod
    def of_format(cls, format: TileFormat, math: ExpertMath = SWIGLU) -> Program | None:
        """Tiles of a format; None without kernels for it."""
        if isinstance(format, BlockFormat):
            return cls.of_blocks(format, math)
        if isinstance(format, FP8 | BF16):
            return cls("plain.cu", (("FP8", int(isinstance(format, FP8))), *_constants(math)))
        return None

    @classmethod
    def of_matrices(cls, format: MatrixFormat) -> Program:
        """Matrices of the backbone."""
        if isinstance(format, BlockFormat):
            return cls.of_blocks(format)
        return cls("plain.cu", (("FP8", 1), *_constants(ExpertMath(Relu2()), linear=True)))

    @classmethod
    def of_channels(cls, bits: int, math: ExpertMath) -> Program:
        """Channels that a row keeps, of formats whose gate and down lie by channel."""
        return cls("channels.cu", (("ROW_BITS", bits), *_constants(math)))

    @property
    def defines(self) -> tuple[str, ...]:
        """Options of any compiler."""
        return tuple(f"-D{name}={value}" for name, value in self.constants)


def _constants(math: ExpertMath, linear: bool = False) -> tuple[tuple[str, int], ...]:
    """What `expert_math.cuh` must know: numbers as the bits of float32."""
    flags = ("BIASED", int(math.bias)), ("UNGATED", int(not math.gated)), ("LINEAR", int(linear))
    numbers = asdict(math.activation if isinstance(math.activation, Glu) else Glu())
    bits = {name.upper(): int(np.float32(number).view(np.uint32)) for name, number in numbers.items()}
    return *flags, *bits.items()


@cache
def kernels(file: str) -> frozenset[str]:
    """Names of the kernels of a program with this file."""
    source = text(file).decode()
    pairs = (f"{name}_{rows}" for rows in EXPERT_KERNELS.findall(source) for name in ("gate_up", "down"))
    return frozenset(KERNELS.findall(source)).union(pairs, *map(kernels, INCLUDES.findall(source)))


@cache
def text(file: str) -> bytes:
    return (FOLDER / file).read_bytes()


@cache
def headers() -> tuple[str, ...]:
    """Names of the files that others include."""
    return tuple(sorted(path.name for path in FOLDER.glob("*.cuh")))


LEAST_ARCHITECTURE = (8, 0)  # the first with the matrix instruction that the kernels use
MAX_BYTES = 1 << 24
MAX_LOG = 2000  # characters of the compiler's messages

log = logging.getLogger(__name__)


def compiled(program: Program, architecture: tuple[int, int], cache: Path | None) -> bytes:
    """The program as a cubin for a GPU of this compute capability; from the cache folder, if that is given
    and has it. Raises CudaError where the kernels cannot be compiled for it."""
    if architecture < LEAST_ARCHITECTURE:
        major, minor = LEAST_ARCHITECTURE
        raise CudaError(f"the kernels need compute capability {major}.{minor} or newer")
    nvrtc = Nvrtc()
    target = f"sm_{architecture[0]}{architecture[1]}"
    options = (*OPTIONS, *program.defines, f"--gpu-architecture={target}")
    path = None if cache is None else cache / KEPT_IN / f"{_key(program, options, nvrtc.version)}.cubin"
    if path is None:
        return nvrtc.compile(program, options)[0]
    if kept := read_kept(path, MAX_BYTES, _checked, log, "the kernels are compiled again"):
        with suppress(OSError):
            os.utime(path)
        return kept
    cubin, _ = nvrtc.compile(program, options)
    keep(path, cubin, log, f"compiled kernels could not be kept in {path.parent}")
    return cubin


def _key(program: Program, options: tuple[str, ...], version: tuple[int, int]) -> str:
    """Returns the name of a compiled program in the cache: 16 digits."""
    parts = [program.file, *options, str(version)]
    files = [text(name) for name in (program.file, *headers())]
    digest = hashlib.sha256("\0".join(parts).encode())
    for file in files:
        digest.update(len(file).to_bytes(8, "little") + file)
    return digest.hexdigest()[:16]


def _checked(cubin: bytes) -> bytes:
    if not cubin.startswith(b"\x7fELF"):
        raise ValueError("it is no program")
    return cubin


class Nvrtc:
    """NVRTC by cuda-bindings. Raises CudaError where it is not installed."""

    def __init__(self) -> None:
        try:
            self._library = importlib.import_module("cuda.bindings.nvrtc")
            self.version: tuple[int, int] = tuple(self._call("nvrtcVersion"))
        except (ImportError, RuntimeError, OSError) as e:
            raise CudaError(f"NVRTC is not installed: {' '.join(str(e).split())[:200]}") from None

    @property
    def architectures(self) -> list[int]:
        """The compute capabilities that it compiles for, e.g. 90."""
        return list(self._call("nvrtcGetSupportedArchs"))

    def compile(self, program: Program, options: tuple[str, ...]) -> tuple[bytes, str]:
        """The cubin, and the compiler's messages. Raises CudaError with them where it fails."""
        names = headers()
        handle = self._call(
            "nvrtcCreateProgram",
            text(program.file), program.file.encode(),
            len(names), [text(name) for name in names], [name.encode() for name in names],
        )  # fmt: skip
        try:
            try:
                self._call("nvrtcCompileProgram", handle, len(options), [one.encode() for one in options])
            except CudaError as e:
                raise CudaError(f"{e}: {self._messages(handle)[:MAX_LOG]}") from None
            return self._bytes(handle, "nvrtcGetCUBIN"), self._messages(handle)
        finally:
            self._call("nvrtcDestroyProgram", handle)

    def _messages(self, handle: Any) -> str:
        return self._bytes(handle, "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace")

    def _bytes(self, handle: Any, getter: str) -> bytes:
        data = bytearray(self._call(f"{getter}Size", handle))
        filled = bytes(data)  # the bindings write into the memory of a bytes object
        self._call(getter, handle, filled)
        return filled

    def _call(self, name: str, *arguments: Any) -> Any:
        return checked(self._library, name, *arguments)


def checked(bindings: Any, name: str, *arguments: Any) -> Any:
    """Results of a function of cuda-bindings without the status. Raises CudaError unless that is success."""
    status, *results = getattr(bindings, name)(*arguments)
    if int(status) != 0:
        raise CudaError(f"{name}: {status.name}")
    return results[0] if len(results) == 1 else tuple(results)
