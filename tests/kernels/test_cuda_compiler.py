"""The CUDA kernels are compiled for GPUs that are not here, and kept."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from benchmarks.gpu import registers
from benchmarks.gpu.registers import ARCHITECTURES
from launch.cache.command import scan
from workers.cuda import CudaError
from workers.kernels.cuda import attention, compiler
from workers.kernels.cuda.compiler import Program
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
