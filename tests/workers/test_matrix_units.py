"""Products by matrix units have the same bits as by vectors, those of bf16 the same within its rounding:
amx.c with its tiles emulated as Intel's manual defines them, because few processors have them. The emulation
ends the process where a processor would refuse. Its vectors do without VDPBF16PS, which changes no bit."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import brute_force
import numpy as np
import pytest
from attention_cases import Paged, attended, numbers, stored, tables_of
from c_libraries import c_libraries
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kernel_runs import any_matrix, kernel_of, plain_kind
from quantized_cases import BLOCKS, KINDS, make_case

from shm.layout import BlockFormat, format_named
from workers.kernels.layer import Heads
from workers.kernels.matrix import HostMatrix
from workers.kernels.native import Library, load

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def vectors() -> Library:
    found = load("avx512")
    if isinstance(found, str):
        pytest.skip(f"AVX-512: {found}")
    return found


@pytest.fixture(scope="module")
def emulated(vectors: Library, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Library]:
    """By the number of rows from which matrix units compute."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    (module,) = (one for one in c_libraries() if one.name == "workers.kernels._amx")
    options = [one for one in module.extra_compile_args if not one.startswith(("-mamx", "-O"))]
    options.append("-O1")  # takes a third of the time
    tiles, folder = Path(__file__).with_name("emulated_tiles.h"), tmp_path_factory.mktemp("amx")
    (folder / "rows.h").write_text('__attribute__((visibility("default"))) int unit_rows;')
    options += [f'-DTANDEM_EMULATED_TILES="{tiles}"', "-DTANDEM_WITHOUT_PAIRS", "-shared", "-fPIC"]
    options += ["-DUNIT_ROWS=unit_rows", "-include", str(folder / "rows.h"), "-o", str(folder / "units.so")]
    command = [compiler, *options, *(ROOT / one for one in module.sources)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr

    @cache
    def loaded(least: int) -> Library:
        library = shutil.copy(folder / "units.so", folder / f"from{least}.so")  # with a variable of its own
        functions = ctypes.CDLL(str(library))
        ctypes.c_int.in_dll(functions, "unit_rows").value = least
        assert functions.tandem_supported()
        return Library("emulated", functions)

    return loaded


@pytest.mark.parametrize("threads", [1, 3])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(BLOCKS),
    rows=st.integers(1, 300),
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 400),
    seed=st.integers(0, 1000),
)
@example(name="int8", rows=300, outputs=17, inputs=129, seed=0)
@example(name="int4", rows=129, outputs=33, inputs=65, seed=0)
@example(name="int4-g128", rows=16, outputs=16, inputs=128, seed=0)
def test_products(emulated, vectors, threads, name, rows, outputs, inputs, seed) -> None:
    form, random = format_named(name), np.random.default_rng(seed)
    assert isinstance(form, BlockFormat)
    data = any_matrix(random, form, outputs, inputs, "random", "normal")
    x = random.standard_normal((rows, inputs)).astype(np.float32)
    found = []
    for library in (emulated(1), vectors):
        team = library.team(threads)
        found.append(HostMatrix(library, team, form, (outputs, inputs), data).product(x))
        if team is not None:
            team.close()
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("least", [1, 12, 40])
@pytest.mark.parametrize("name", BLOCKS)
def test_tiles_from_any_number_of_rows_on(emulated, vectors, name, least) -> None:
    """Every number of rows, from wherever matrix units take over."""
    units = emulated(least)
    for rows in (1, 2, 7, 8, 9, 11, 12, 15, 16, 17, 31, 32, 39, 40, 47, 127, 128, 131):
        case = make_case(name, 150, 1, 3, rows, "random", "normal", "normal", seed=rows)
        kernels = [kernel_of(library, case.layout) for library in (units, vectors)]
        found = [kernel.tiles(case.data, kernel.quantize(case.x), case.rows) for kernel in kernels]
        np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("threads", [1, 3])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    hidden=st.integers(1, 200),
    tile=st.integers(1, 100),
    tiles=st.integers(1, 2),
    rows=st.integers(1, 90),
    seed=st.integers(0, 1000),
    kind=st.sampled_from(["swiglu", "clamped", "relu2", "relu2 biases"]),
)
@example(
    hidden=544, tile=300, tiles=2, rows=67, seed=0, kind="swiglu"
)  # two parts of a row and of the channels
@example(hidden=65, tile=37, tiles=2, rows=40, seed=1, kind="relu2 biases")
def test_bf16_tiles(emulated, vectors, threads, hidden, tile, tiles, rows, seed, kind) -> None:
    random, math = np.random.default_rng(seed), KINDS[kind]
    layout, matrices, biases, data = plain_kind(random, math, hidden, tile, tiles)
    x, chosen = random.standard_normal((rows, hidden)).astype(np.float32), random.permutation(rows)
    found = {}
    for name, library in (("units", emulated(1)), ("vectors", emulated(1000)), ("pairs", vectors)):
        team = library.team(threads)
        kernel = kernel_of(library, layout, team)
        found[name] = kernel.tiles(data, kernel.quantize(x), chosen.astype(np.int32))
        if team is not None:
            team.close()
    np.testing.assert_array_equal(found["pairs"], found["vectors"])
    assert brute_force.expert(*matrices, x[chosen], "bf16", math, biases).agrees(found["units"])


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("widths", [(128, 128), (141, 45)])
def test_attention_without_pairs(vectors: Library, emulated, bits: int, widths: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    caches = [part for width in widths for part in stored(numbers(random, 2, 300, width), bits)]
    table = tables_of(random, [300])
    slabs = [Paged.of([cache], table) for cache in caches]
    facts, q = Heads(bits, 6, 2, *widths, 0, 0, None, 0.1), numbers(random, 6, widths[0])
    found, wanted = (attended(one, None, facts, q, slabs, 290) for one in (emulated(12), vectors))
    np.testing.assert_array_equal(found, wanted)
