"""The C kernels, variant by variant: against exact arithmetic and the torch reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import brute_force
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_runs import any_matrix, bits, kernel_of, plain_kind, quick, reference, run, seeds
from quantized_cases import (
    BLOCKS,
    KINDS,
    OF_FILES,
    TINY,
    UNIT,
    Case,
    Float64,
    Matrix,
    cases,
    expected,
    int8_codes,
    make_case,
    put_heads,
    states,
)

from shm.expert_math import ExpertMath, Glu
from shm.layout import BlockFormat, format_named
from workers.kernels.c_types import Geometry
from workers.kernels.matrix import HostMatrix
from workers.kernels.native import Library
from workers.kernels.reference import int8_steps

pytestmark = pytest.mark.usefixtures("one_thread")


# --- activations ----------------------------------------------------------------------------------


@quick(60)
@given(
    name=st.sampled_from(BLOCKS),
    width=st.integers(1, 400),
    rows=st.integers(1, 9),
    kind=st.sampled_from(["normal", "zero", "full", "huge", "tiny", "denormal", "spikes", "middles"]),
    seed=seeds,
)
def test_activations_have_the_codes_of_the_reference(library, name, width, rows, kind, seed) -> None:
    format, random = format_named(name), np.random.default_rng(seed)
    assert isinstance(format, BlockFormat)
    if kind == "middles":  # between two codes: to the even one
        x = (random.integers(-254, 255, (rows, width)) / 2).astype(np.float32)
        x[:, 0] = 127
    else:
        x = states(random, kind, rows, width)
    found = library.kernel(Geometry(format, width, 16)).quantize(x)
    codes, steps = int8_codes(x, format)
    np.testing.assert_array_equal(found.codes, codes)
    np.testing.assert_array_equal(bits(found.factors[..., 0]), bits(steps))
    sums = codes.reshape(rows, -1, format.group).sum(axis=2, dtype=np.int64)
    np.testing.assert_array_equal(found.factors[..., 1], sums)
    stand_for = codes * np.repeat(steps, format.group, axis=1)
    torch_x = int8_steps(torch.from_numpy(x), format.group, format.inputs).numpy()
    np.testing.assert_array_equal(bits(stand_for + 0), bits(torch_x + 0))  # + 0: no -0


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_non_finite_activations_give_non_finite_results(library: Library, name: str, poison: float) -> None:
    case = make_case(name, 70, 1, 1, 3, "random", "normal", "normal", 3)
    x = np.ones_like(case.x)
    x[1, 5] = poison
    kernel = kernel_of(library, case.layout)
    y = kernel.tiles(case.data, kernel.quantize(x), np.arange(3, dtype=np.int32))
    assert not np.isfinite(y[1]).any()
    assert np.isfinite(y[[0, 2]]).all()


# --- a matrix -------------------------------------------------------------------------------------


@quick(60)
@given(
    name=st.sampled_from(BLOCKS),
    shape=st.tuples(st.integers(1, 70), st.integers(1, 400)),
    rows=st.integers(1, 40),
    kinds=st.tuples(
        st.sampled_from(["random", "zeros", "ones", "either"]),
        st.sampled_from(["normal", "zero", "huge", "tiny", "denormal", "mixed"]),
        st.sampled_from(["normal", "zero", "full", "huge", "tiny", "denormal", "spikes"]),
    ),
    seed=seeds,
)
def test_a_product_is_exact_but_for_the_rounding_of_each_group(
    library: Library, name: str, shape: tuple[int, int], rows: int, kinds: tuple[str, str, str], seed: int
) -> None:
    random, format, (n, k) = np.random.default_rng(seed), format_named(name), shape
    assert isinstance(format, BlockFormat)
    group = format.group
    data = any_matrix(random, format, n, k, *kinds[:2])
    x = states(random, kinds[2], rows, k)
    found = HostMatrix(library, None, format, (n, k), data).product(x)

    codes, steps = int8_codes(x, format)
    factor = float(format.factors_of(data)[0]) if format.factors else 1.0
    matrix = Matrix.of(format, data[: format.blocks_bytes(n, k)], n, factor)
    exact, bound = np.zeros((rows, n)), np.zeros((rows, n))
    for g in range(steps.shape[1]):
        part = slice(g * group, (g + 1) * group)
        dot = codes[:, part].astype(np.float64) @ matrix.centred[:, part].T
        factor = steps[:, g].astype(np.float64)[:, None] * matrix.scale[:, g * group]
        exact += factor * dot
        # dot - zero * sum, the two scales, their product and its addition to the sum: each rounded once; so
        # are a matrix's factor and its product with the sum
        roundings = steps.shape[1] + 4 + 2 * format.factors
        bound += UNIT * roundings * np.abs(factor * dot) + TINY * (np.abs(dot) + 2)
    assert found.shape == (rows, n)
    assert (np.abs(found - exact) <= bound).all()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("code", [0, 255, 0x77])
@pytest.mark.parametrize("sign", [1, -1])
def test_largest_products_do_not_saturate(library: Library, name: str, code: int, sign: int) -> None:
    """The largest products there are, in whole numbers that float32 holds exactly."""
    format = format_named(name)
    assert isinstance(format, BlockFormat)
    width = 3 * format.inputs
    data = np.full(format.matrix_bytes(16, width), code, np.uint8)
    blocks = data[: format.blocks_bytes(16, width)]
    ones = np.ones((3, 16 * format.inputs // format.group), np.float32)
    put_heads(format, blocks.reshape(3, -1), ones, np.zeros((3, 16), np.float32))
    if format.factors:
        format.factors_of(data)[0] = 1
    of_one = Matrix.of(format, blocks, 16)
    total = (of_one.scale[0] * of_one.centred[0]).sum()
    matrix = HostMatrix(library, None, format, (16, width), data)
    for rows in range(1, 10):
        found = matrix.product(np.full((rows, width), sign * 127, np.float32))
        np.testing.assert_array_equal(found, np.full((rows, 16), sign * 127 * total))


# --- tiles ----------------------------------------------------------------------------------------


@quick(60)
@given(case=cases())
def test_tiles_equal_exact_arithmetic_and_the_reference(library: Library, case: Case) -> None:
    check_tiles(library, case)


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "swiglu"])
def test_tiles_of_every_kind_of_experts_do(library: Library, kind: str) -> None:
    @quick(6)
    @given(case=cases(math=KINDS[kind]))
    def check(case: Case) -> None:
        check_tiles(library, case)

    for sizes in (("int4", 200, 1, 3, 1), ("int8", 130, 2, 2, 70)):
        check_known(library, *known_case(kind, *sizes))
    check()


@cache
def known_case(
    kind: str, name: str, hidden: int, groups: int, tiles: int, rows: int
) -> tuple[Case, Float64, Float64]:
    """A case, the same for every library, and what is known of it."""
    case = make_case(name, hidden, groups, tiles, rows, "random", "normal", "normal", rows, KINDS[kind])
    return case, *known(case)


def check_tiles(library: Library, case: Case) -> None:
    check_known(library, case, *known(case))


def known(case: Case) -> tuple[Float64, Float64]:
    """The exact result and the bound, which the reference keeps."""
    y, bound = expected(case)
    other = reference(case.layout, case.data, case.x, case.rows)
    assert (np.abs(other - y) <= bound).all()  # so the two are within twice the bound of each other
    return y, bound


def check_known(library: Library, case: Case, y: Float64, bound: Float64) -> None:
    found = run(library, case)
    assert found.shape == y.shape
    assert (np.abs(found - y) <= bound).all()


@quick(40)
@given(
    name=st.sampled_from(["f32", "bf16", "fp8"]),
    hidden=st.integers(1, 300),
    tile=st.integers(1, 50),
    tiles=st.integers(1, 3),
    rows=st.integers(1, 20),
    seed=seeds,
)
def test_plain_tiles_equal_the_brute_force_and_the_reference(
    library, name, hidden, tile, tiles, rows, seed
) -> None:
    plain_case("swiglu", name, hidden, tile, tiles, rows, seed)(library)


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "swiglu"])
@pytest.mark.parametrize("name", ["f32", "bf16", "fp8"])
@pytest.mark.parametrize(("hidden", "tile", "rows"), [(37, 23, 1), (96, 48, 5), (130, 50, 40)])
def test_plain_tiles_of_every_kind_of_experts_do(library, kind, name, hidden, tile, rows) -> None:
    same_for_every_library(kind, name, hidden, tile, 3, rows, rows)(library)


def plain_case(
    kind: str, name: str, hidden: int, tile: int, tiles: int, rows: int, seed: int
) -> Callable[[Library], None]:
    """The check of a library, for which the exact result is known and the reference was compared with it."""
    random, math = np.random.default_rng(seed), KINDS[kind]
    tile = 128 + 128 * (tile % 2) if name == "fp8" else tile
    layout, matrices, biases, data = plain_kind(random, math, hidden, tile, tiles, name)
    x = random.standard_normal((rows, hidden)).astype(np.float32)
    chosen = random.permutation(rows).astype(np.int32)
    exact = brute_force.expert(*matrices, x[chosen], name, math, biases)
    assert exact.agrees(reference(layout, data, x, chosen))

    def check(library: Library) -> None:
        kernel = kernel_of(library, layout)
        assert exact.agrees(kernel.tiles(data, kernel.quantize(x), chosen))

    return check


same_for_every_library = cache(plain_case)


@cache
def large(name: str, rows: int) -> tuple[Case, Float64, Float64]:
    """A case, the same for every library, and what is known of it."""
    case = make_case(name, 2880, 1, 1, rows, "random", "normal", "spikes", 1, KINDS["clamped"])
    return case, *known(case)


@pytest.mark.parametrize("name", OF_FILES)
@pytest.mark.parametrize("rows", [1, 5, 16, 33])
def test_tiles_of_large_experts_with_biases_do(library: Library, name: str, rows: int) -> None:
    """gpt-oss's H is no multiple of 128."""
    check_known(library, *large(name, rows))


def test_the_formula_with_swiglus_numbers_has_its_bits(library: Library) -> None:
    """So has one whose limits are never reached."""
    plain = make_case("int4", 200, 1, 3, 20, "random", "normal", "normal", 1)
    shape = replace(plain.layout.shape, math=ExpertMath(Glu(gate_max=2.0**100)))
    wide = replace(plain, layout=replace(plain.layout, shape=shape))
    np.testing.assert_array_equal(bits(run(library, wide)), bits(run(library, plain)))
