"""The CUDA kernels are compiled for GPUs that are not here, and kept. They spill few registers, and by their
machine code their main loops keep loads under way: registers look the same where every load is waited for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks.gpu import machine_code, registers
from benchmarks.gpu.machine_code import Loop
from benchmarks.gpu.registers import ARCHITECTURES
from launch.cache.command import scan
from workers.cuda import CudaError
from workers.kernels.cuda import attention, compiler
from workers.kernels.cuda.compiler import Nvrtc, Program
from workers.kernels.cuda.sums import SUMS

CASES = [
    ("int4", 80),
    ("int4", 90),
    ("int4", 120),
    ("bf16", 90),
    ("fp8", 90),
    ("fp8-matrix", 90),
    ("sums", 80),
    ("sums", 120),
]
CASES += [
    ("attention-bf16", 80),
    ("attention-f32", 120),
    ("mxfp4", 80),
    ("nvfp4", 120),
]
LONG = [(name, one) for name in ("q4_0", "q8_0", "int4-f16", "mxfp4", "nvfp4") for one in (80, 90, 120)]
LONG += [*(("int4", one) for one in ARCHITECTURES), ("bf16", 120), ("fp8", 80)]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in LONG if case not in CASES]


VERBOSE = "--ptxas-options=-v"


@pytest.fixture(scope="module", autouse=True)
def _compiled_once() -> Iterator[None]:
    """Tests of registers and of machine code look at the same compilation: ptxas tells of both."""
    compile = Nvrtc.compile

    @cache
    def compiled(program: Program, options: tuple[str, ...]) -> tuple[bytes, str]:
        return compile(Nvrtc(), program, (*options, VERBOSE))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Nvrtc,
            "compile",
            lambda _, program, options: compiled(program, tuple(one for one in options if one != VERBOSE)),
        )
        yield


@pytest.fixture
def nvrtc() -> None:
    try:
        compiler.Nvrtc()
    except CudaError as e:
        pytest.skip(str(e))


@pytest.mark.parametrize(("format", "architecture"), CASES)
def test_no_kernel_of_one_row_spills(format: str, architecture: int) -> None:
    """But two numbers; those of more rows spill a few at most."""
    if reason := registers.missing(architecture):
        pytest.skip(reason)
    found = registers.usages(registers.program(format), (architecture,))
    assert {one.architecture for one in found} == {architecture}
    spilled = {one.kernel: one.spilled for one in found if one.spilled > 8}
    assert not {"quantize", "gate_up_1", "down_1", "add_outputs", "merge"} & set(spilled)
    tight = format in ("mxfp4", "nvfp4") and architecture == 80
    assert max(spilled.values(), default=0) <= (160 if tight else 128)
    if "gate_up_32" in {one.kernel for one in found}:  # those of up to 8 rows take a single one too
        assert spilled.get("gate_up_8", 0) <= 24
        assert spilled.get("down_8", 0) <= (160 if tight else 24)
    assert max(one.registers for one in found) <= 255
    if format.startswith("attention"):
        assert {one.kernel.partition("_")[0] for one in found} == set(attention.THREADS)
        assert max(spilled.values(), default=0) <= 64
        assert max(one.registers for one in found) <= 128


@pytest.mark.usefixtures("nvrtc")
def test_compiled_kernels_are_kept_and_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cubin = compiler.compiled(SUMS, (9, 0), tmp_path)
    assert cubin.startswith(b"\x7fELF")
    (kept,) = (tmp_path / "kernels").iterdir()
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    kept.write_bytes(b"\x7fELF and more")
    assert compiler.compiled(SUMS, (9, 0), tmp_path) == b"\x7fELF and more"
    kept.chmod(0o666)
    with caplog.at_level(logging.WARNING):
        assert compiler.compiled(SUMS, (9, 0), tmp_path) == cubin
    assert "compiled again" in caplog.text
    kept.write_bytes(b"")
    assert compiler.compiled(SUMS, (9, 0), tmp_path) == cubin
    (entry,) = [one for one in scan(tmp_path) if one.on_disk]
    assert (entry.kind, entry.size) == ("kernels", len(cubin))


@pytest.mark.usefixtures("nvrtc")
def test_what_does_not_compile_is_refused_with_the_compilers_words() -> None:
    with pytest.raises(CudaError, match="error: identifier"):
        compiler.compiled(Program("tiles.cu", (("BITS", 4), ("GROUP", 64))), (9, 0), None)
    with pytest.raises(CudaError, match="INVALID_OPTION"):
        compiler.compiled(SUMS, (12, 9), None)


def test_an_older_gpu_is_refused() -> None:
    with pytest.raises(CudaError, match=r"compute capability 8\.0 or newer"):
        compiler.compiled(SUMS, (7, 5), None)


# --- loads under way, by the machine code ------------------------------------------------------------------

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
LOOPS = [*(("int4", one) for one in (80, 90, 120)), ("int8", 86), ("q4_0", 89)]
LOOPS += [("mxfp4", 80), ("nvfp4", 120), ("bf16", 90), ("fp8", 90)]
LOOPS += [
    pytest.param(format, one, marks=pytest.mark.slow)
    for format in LEAST
    for one in ARCHITECTURES
    if (format, one) not in LOOPS
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
    loops = machine_code.loops(compiler.compiled(registers.program(format), divmod(architecture, 10), None))
    return {loop.kernel: loop.under_way for loop in loops}


@pytest.mark.parametrize(("format", "architecture"), LOOPS)
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
