"""Cycles and bytes under way of the CUDA kernels' main loops, simulated from machine code; needs no GPU.

    python -m benchmarks.gpu.machine_code [--format int4]

One warp issues its instructions in order. An instruction's encoding has what the hardware obeys: the cycles
until the next one may be issued, the scoreboard that a load holds until its value is there, and those that
the instruction waits for. So a kernel whose loads are waited for one after the other is found here, where
registers and spills look the same. Other warps of a multiprocessor, which hide a part of it, are left out.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu.registers import ARCHITECTURES, FORMATS, missing, program
from workers.cuda import CudaError
from workers.kernels.cuda.compiler import compiled

MEMORY = 700  # cycles of a load from the device's memory
CACHED = 38  # of one that the first cache answers
OTHER = 24  # of other instructions that take a scoreboard: shared memory, conversions
READ = 20  # until a register that a load or store reads may be written again
SCOREBOARDS = 6
ROUNDS = 6  # passes of a loop; the second half is timed
WEIGHTS = ".NA"  # of a load that leaves the first cache alone: read_once (device.cuh)

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/ +(?:@!?U?P\w+ +)?([A-Z][A-Z0-9_.]*) *([^;]*);")
ENCODING = re.compile(r"^ +/\* 0x([0-9a-f]{16}) \*/")  # the upper half; the lower one ends the line before
FUNCTION = re.compile(r"^\.text\.(\w+):")
LABEL = re.compile(r"^(\.L_x_\d+):")
WIDTHS = (("128", 16), (".64", 8), ("U16", 2), ("U8", 1))


class NoDisassembler(Exception):
    """nvdisasm is not here."""


@dataclass(frozen=True)
class Instruction:
    """One instruction, with what its encoding tells the hardware."""

    operation: str
    operands: str
    stall: int  # cycles until the next one may be issued
    sets: int  # the scoreboard that is released when its result is there; 7 without one
    reads: int  # the one that is released when its operands have been read; 7 without one
    waits: int  # a bit for each scoreboard that it waits for

    @property
    def latency(self) -> int:
        if self.operation.startswith("LDG"):
            return MEMORY if self.loads_weights else CACHED
        return OTHER

    @property
    def loads_weights(self) -> bool:
        return self.operation.startswith("LDG") and WEIGHTS in self.operation

    @property
    def bytes(self) -> int:
        """Bytes that a load brings to one lane."""
        return next((size for word, size in WIDTHS if word in self.operation), 4)


@dataclass(frozen=True)
class Loop:
    """A kernel's main loop: of those without another in them the one that loads most weights."""

    kernel: str
    loaded: int  # bytes of weights that a pass loads for each lane
    cycles: float  # of a pass

    @property
    def under_way(self) -> float:
        """Bytes of weights of a lane that are being loaded at any time (Little's law)."""
        return self.loaded * MEMORY / self.cycles

    @property
    def cycles_a_byte(self) -> float:
        """Cycles in which a lane's next byte of weights is multiplied."""
        return self.cycles / self.loaded


def disassembler() -> Path:
    """Returns nvdisasm: of the package nvidia-cuda-nvdisasm, or of an installed CUDA. Raises
    NoDisassembler."""
    try:
        for file in metadata.files("nvidia-cuda-nvdisasm") or ():
            if file.name == "nvdisasm":
                return Path(str(file.locate()))
    except metadata.PackageNotFoundError:
        pass
    if (found := shutil.which("nvdisasm")) is None:
        raise NoDisassembler("nvdisasm is not installed; the package nvidia-cuda-nvdisasm has it")
    return Path(found)


def loops(cubin: bytes) -> list[Loop]:
    """Returns the main loops of a compiled program's kernels that have one. Raises NoDisassembler."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.cubin"
        file.write_bytes(cubin)
        command = [str(disassembler()), "-c", "-hex", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    made = (_main_loop(kernel, code) for kernel, code in _functions(text).items())
    return [loop for loop in made if loop is not None]


def _functions(text: str) -> dict[str, list[Instruction | str]]:
    """Returns the instructions and labels of each function."""
    functions: dict[str, list[Instruction | str]] = {}
    code: list[Instruction | str] = []
    operation = operands = ""
    for line in text.splitlines():
        if match := FUNCTION.match(line):
            code = functions[match[1]] = []
        elif match := LABEL.match(line):
            code.append(match[1])
        elif match := INSTRUCTION.search(line):
            operation, operands = match[2], match[3]
        elif operation and (match := ENCODING.match(line)):
            control = int(match[1], 16) >> 41
            fields = control & 15, control >> 5 & 7, control >> 8 & 7, control >> 11 & 63
            code.append(Instruction(operation, operands, *fields))
            operation = ""
    return functions


def _main_loop(kernel: str, code: Sequence[Instruction | str]) -> Loop | None:
    labels = {label: at for at, label in enumerate(code) if isinstance(label, str)}
    spans = []  # of loops that load weights, the shortest first
    for end, one in enumerate(code):
        if isinstance(one, str) or not one.operation.startswith("BRA"):
            continue
        target = re.search(r"\.L_x_\d+", one.operands)
        start = labels.get(target[0], end) if target else end
        if any(isinstance(each, Instruction) and each.loads_weights for each in code[start:end]):
            spans.append((end - start, start, end))
    bodies: list[list[Instruction]] = []
    inner: list[tuple[int, int]] = []
    for _, start, end in sorted(spans):
        if not any(start <= first and last <= end for first, last in inner):
            inner.append((start, end))
            bodies.append([each for each in code[start : end + 1] if isinstance(each, Instruction)])
    if not bodies:
        return None
    body = max(bodies, key=_loaded)
    return Loop(kernel, _loaded(body), _cycles(body))


def _loaded(body: Sequence[Instruction]) -> int:
    return sum(one.bytes for one in body if one.loads_weights)


def _cycles(body: Sequence[Instruction]) -> float:
    """Returns the cycles of a pass of a loop: branches out of it or over a part of it are not taken."""
    now, half = 0, 0
    free = [0] * SCOREBOARDS  # when each is released
    for number in range(ROUNDS):
        if number == ROUNDS // 2:
            half = now
        for one in body:
            now = max(now, *(free[board] for board in range(SCOREBOARDS) if one.waits >> board & 1), 0)
            if one.sets < SCOREBOARDS:
                free[one.sets] = max(free[one.sets], now + one.latency)
            if one.reads < SCOREBOARDS:
                free[one.reads] = max(free[one.reads], now + READ)
            now += max(one.stall, 1)
    return (now - half) / (ROUNDS - ROUNDS // 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--format", action="append", choices=FORMATS)
    arguments = parser.parse_args()
    print("cycles for 16 bytes of a lane, and bytes of a lane under way")
    try:
        for name in arguments.format or ("int4", "int8", "q4_0", "mxfp4", "nvfp4", "bf16", "fp8"):
            found = {
                one: {loop.kernel: loop for loop in loops(compiled(program(name), divmod(one, 10), None))}
                for one in ARCHITECTURES
                if not missing(one)
            }
            print(f"{name:12}" + "".join(f"{f'sm_{one}':>12}" for one in found))
            for kernel in dict.fromkeys(kernel for each in found.values() for kernel in each):
                cells = [
                    f"{16 * each[kernel].cycles_a_byte:.0f} {each[kernel].under_way:4.0f}"
                    for each in found.values()
                ]
                print(f"{kernel:12}" + "".join(f"{cell:>12}" for cell in cells))
    except (NoDisassembler, CudaError) as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
