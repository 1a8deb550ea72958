"""The main loops of the CUDA kernels keep loads under way, by their machine code: registers and spills look
the same where every load is waited for."""

from __future__ import annotations

import pytest

from benchmarks.gpu import machine_code, registers
from benchmarks.gpu.machine_code import Loop
from benchmarks.gpu.registers import ARCHITECTURES
from workers.kernels.cuda.compiler import compiled

# Least bytes of a lane under way: of kernels that compute one row, and of those for more alone, which have
# registers for fewer records. A lane that waits for each load of 4 bytes has 4 to 7.
LEAST = {
    "int4": (60, 16),
    "int8": (100, 50),
    "q4_0": (40, 10),
    "mxfp4": (35, 12),
    "nvfp4": (22, 7),
    "bf16": (30, 16),
    "fp8": (20, 12),
}
OF_CHANNELS = {"channels-bf16": 17, "channels-int8": 28, "channels-int4": 24}
KNOWN = {("bf16", 80): {"down_8"}}  # which has 12
CASES = [("int4", one) for one in ARCHITECTURES] + [(format, 90) for format in LEAST if format != "int4"]
CASES += [
    pytest.param(format, one, marks=pytest.mark.slow)
    for format in LEAST
    for one in ARCHITECTURES
    if format != "int4" and one != 90
]
CHANNELS = [("channels-bf16", 90), ("channels-int4", 90)]
CHANNELS += [
    pytest.param(format, one, marks=pytest.mark.slow)
    for format in OF_CHANNELS
    for one in ARCHITECTURES
    if one != 90 or format == "channels-int8"
]


def under_way(format: str, architecture: int) -> dict[str, float]:
    """Bytes of a lane, by kernels. Skips where they cannot be compiled or disassembled."""
    if reason := registers.missing(architecture):
        pytest.skip(reason)
    try:
        machine_code.disassembler()
    except machine_code.NoDisassembler as e:
        pytest.skip(str(e))
    loops = machine_code.loops(compiled(registers.program(format), divmod(architecture, 10), None))
    return {loop.kernel: loop.under_way for loop in loops}


@pytest.mark.parametrize(("format", "architecture"), CASES)
def test_loads_are_under_way_while_others_are_multiplied(format: str, architecture: int) -> None:
    found = under_way(format, architecture)
    limits = (1, 2, 4, 8) if format in ("bf16", "fp8") else (8, 32)
    names = {f"{kernel}_{limit}" for kernel in ("gate_up", "down") for limit in limits}
    assert set(found) == names | {"gate_up_1"}
    of_row = {"gate_up_1", f"gate_up_{limits[0]}", f"down_{limits[0]}"}
    row, more = LEAST[format]
    short = {name: bytes for name, bytes in found.items() if bytes < (row if name in of_row else more)}
    assert set(short) == KNOWN.get((format, architecture), set()), short


@pytest.mark.parametrize(("format", "architecture"), CHANNELS)
def test_records_of_channels_are_under_way_too(format: str, architecture: int) -> None:
    found = under_way(format, architecture)
    assert set(found) == {"gates", "downs"}
    assert min(found.values()) >= OF_CHANNELS[format], found


def test_a_loop_that_waits_for_each_load_is_told_from_one_that_loads_ahead() -> None:
    def line(operation: str, sets: int, waits: int) -> str:
        upper = (2 | sets << 5 | 7 << 8 | waits << 11) << 41
        return f"        /*0010*/  {operation} R1, R2 ;  /* 0x{0:016x} */\n    /* 0x{upper:016x} */"

    load = "LDG.E.NA.CONSTANT"

    def loop_of(lines: list[str]) -> Loop:
        text = "\n".join([".text.kernel:", ".L_x_1:", *lines, line("BRA `(.L_x_1)", 7, 0)])
        (code,) = machine_code._functions(text).values()
        found = machine_code._main_loop("kernel", code)
        assert found is not None
        return found

    waiting = loop_of([line(load, 0, 0), line("FADD", 7, 1), line(load, 1, 0), line("FADD", 7, 2)])
    assert waiting.loaded == 8
    assert waiting.cycles == pytest.approx(2 * (700 + 2) + 2, abs=4)
    ahead = loop_of([line("FADD", 7, 1), line(load, 0, 0), line("FADD", 7, 2), line(load, 1, 0)])
    assert ahead.cycles < 0.6 * waiting.cycles
    assert ahead.under_way > 1.6 * waiting.under_way
