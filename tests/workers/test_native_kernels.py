"""The C kernels, variant by variant: against exact arithmetic, the torch reference and themselves."""

from __future__ import annotations

from collections.abc import Iterator

import brute_force
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from quantized_cases import (
    QUANTIZED,
    TINY,
    UNIT,
    Case,
    Matrix,
    cases,
    expected,
    int8_codes,
    make_case,
    records,
    states,
)

from shm.layout import BlockFormat, ExpertShape, Float32, StoreLayout, format_named
from workers.kernels.native import VARIANTS, Geometry, Kernel, Library, Quantized, Team, load
from workers.kernels.reference import ReferenceKernel
from workers.kernels.unpack import int8_steps

seeds = st.integers(0, 2**32 - 1)


def quick(examples: int) -> settings:
    """The library is the same for all of a test's examples."""
    health = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(max_examples=examples, deadline=None, suppress_health_check=health)


@pytest.fixture(params=VARIANTS)
def library(request: pytest.FixtureRequest) -> Library:
    found = load(request.param)
    if isinstance(found, str):
        pytest.skip(f"{VARIANTS[request.param]}: {found}")
    return found


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As in a worker."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def bits(array: Float32) -> NDArray[np.uint32]:
    return np.ascontiguousarray(array).view(np.uint32)


def kernel_of(library: Library, layout: StoreLayout, team: Team | None = None) -> Kernel:
    shape = layout.shape
    return library.kernel(Geometry(layout.format, shape.hidden, shape.hidden, shape.tile), team)


def run(library: Library, case: Case, team: Team | None = None) -> Float32:
    kernel = kernel_of(library, case.layout, team)
    return kernel.tiles(case.data, kernel.quantize(case.x), case.rows)


def reference(layout: StoreLayout, data: NDArray[np.uint8], x: Float32, rows: NDArray[np.int32]) -> Float32:
    kernel = ReferenceKernel(layout)
    activations = kernel.activations(torch.from_numpy(x))
    return kernel.run(torch.from_numpy(data), activations, torch.from_numpy(rows.astype(np.int64))).numpy()


# --- activations ----------------------------------------------------------------------------------


@quick(60)
@given(
    name=st.sampled_from(QUANTIZED),
    width=st.integers(1, 400),
    rows=st.integers(1, 9),
    kind=st.sampled_from(["normal", "zero", "full", "huge", "tiny", "denormal", "spikes", "middles"]),
    seed=seeds,
)
def test_activations_have_the_codes_of_the_reference(
    library: Library, name: str, width: int, rows: int, kind: str, seed: int
) -> None:
    format, random = format_named(name), np.random.default_rng(seed)
    if kind == "middles":  # between two codes: to the even one
        x = (random.integers(-254, 255, (rows, width)) / 2).astype(np.float32)
        x[:, 0] = 127
    else:
        x = states(random, kind, rows, width)
    found = library.kernel(Geometry(format, width, 16)).quantize(x)
    codes, steps = int8_codes(x, format.granularity)
    np.testing.assert_array_equal(found.codes, codes)
    np.testing.assert_array_equal(bits(found.factors[..., 0]), bits(steps))
    sums = codes.reshape(rows, -1, format.granularity).sum(axis=2, dtype=np.int64)
    np.testing.assert_array_equal(found.factors[..., 1], sums)
    stand_for = codes * np.repeat(steps, format.granularity, axis=1)
    torch_x = int8_steps(torch.from_numpy(x), format.granularity).numpy()
    np.testing.assert_array_equal(bits(stand_for + 0), bits(torch_x + 0))  # + 0: no -0


@quick(30)
@given(width=st.integers(1, 100), rows=st.integers(1, 5), seed=seeds)
def test_bf16_activations_are_rounded_as_torch_rounds(
    library: Library, width: int, rows: int, seed: int
) -> None:
    patterns = np.random.default_rng(seed).integers(0, 2**32, (rows, width), np.uint32)
    x = patterns.view(np.float32)
    found = library.kernel(Geometry(format_named("bf16"), width, width)).quantize(x)
    np.testing.assert_array_equal(found.codes, torch.from_numpy(x).bfloat16().float().numpy())


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_not_finite_stays_visible(library: Library, name: str, poison: float) -> None:
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
    name=st.sampled_from(QUANTIZED),
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
    number = format.matrix_bytes(n, k) // format.record_bytes
    data = records(random, format, number, *kinds[:2]).reshape(-1)
    x = states(random, kinds[2], rows, k)
    kernel = library.kernel(Geometry(format, k, n))
    found = kernel.matmul(data, kernel.quantize(x))

    codes, steps = int8_codes(x, group)
    matrix = Matrix.of(format, data, n)
    exact, bound = np.zeros((rows, n)), np.zeros((rows, n))
    for g in range(steps.shape[1]):
        part = slice(g * group, (g + 1) * group)
        dot = codes[:, part].astype(np.float64) @ matrix.centred[:, part].T
        factor = steps[:, g].astype(np.float64)[:, None] * matrix.scale[:, g * group]
        exact += factor * dot
        # dot - zero * sum, the two scales, their product and its addition to the sum: each rounded once
        bound += UNIT * (steps.shape[1] + 4) * np.abs(factor * dot) + TINY * (np.abs(dot) + 2)
    assert found.shape == (rows, n)
    assert (np.abs(found - exact) <= bound).all()


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("code", [0, 255])
@pytest.mark.parametrize("sign", [1, -1])
def test_nothing_saturates(library: Library, name: str, code: int, sign: int) -> None:
    """The largest products there are, in whole numbers that float32 holds exactly."""
    format = format_named(name)
    assert isinstance(format, BlockFormat)
    data = np.full((3, format.record_bytes), code, np.uint8)  # 16 outputs, 3 groups
    if format.bits == 8:
        data[:, :64].view("<f4")[:] = 1
        weight = code - 128
    else:
        data[:, :64].view("<u2")[:, :16] = 0x3F80  # 1
        data[:, :64].view("<u2")[:, 16:] = 0
        weight = code & 15
    width = 3 * format.group
    kernel = library.kernel(Geometry(format, width, 16))
    for rows in range(1, 10):
        found = kernel.matmul(
            data.reshape(-1), kernel.quantize(np.full((rows, width), sign * 127, np.float32))
        )
        np.testing.assert_array_equal(found, np.full((rows, 16), sign * 127 * weight * width))


# --- tiles ----------------------------------------------------------------------------------------


@quick(60)
@given(case=cases())
def test_tiles_equal_exact_arithmetic_and_the_reference(library: Library, case: Case) -> None:
    y, bound = expected(case)
    found = run(library, case)
    assert found.shape == y.shape
    assert (np.abs(found - y) <= bound).all()
    other = reference(case.layout, case.data, case.x, case.rows)
    assert (np.abs(other - y) <= bound).all()  # so the two are within twice the bound of each other


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_bound_would_show_wrong_codes(library: Library, name: str) -> None:
    case = make_case(name, 200, 1, 2, 5, "random", "normal", "normal", 1)
    y, bound = expected(case)
    start = len(case.data) - case.format.record_bytes + 64
    case.data[start : start + 64] ^= 64 if case.format.bits == 8 else 8  # four inputs of the last outputs
    assert (np.abs(run(library, case) - y) > bound).any()


@quick(40)
@given(
    hidden=st.integers(1, 200),
    tile=st.integers(1, 50),
    tiles=st.integers(1, 3),
    rows=st.integers(1, 20),
    seed=seeds,
)
def test_bf16_tiles_equal_the_brute_force_and_the_reference(
    library: Library, hidden: int, tile: int, tiles: int, rows: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    layout = StoreLayout(ExpertShape(1, 1, hidden, tiles * tile, tile), format_named("bf16"))
    wide = (tiles * tile, hidden)
    gate, up, down = (
        (random.standard_normal(s) * s[1] ** -0.5).astype(np.float32) for s in (wide, wide, wide[::-1])
    )
    data = np.zeros(layout.expert_stride, np.uint8)
    layout.encode_expert(gate, up, down, data)
    data = data[: tiles * layout.tile_bytes]
    x = random.standard_normal((rows, hidden)).astype(np.float32)
    chosen = random.permutation(rows).astype(np.int32)
    kernel = kernel_of(library, layout)
    found = kernel.tiles(data, kernel.quantize(x), chosen)
    exact = brute_force.expert(gate, up, down, x[chosen], "bf16")
    assert exact.agrees(found)
    assert exact.agrees(reference(layout, data, x, chosen))


def any_case(name: str, rows: int, seed: int) -> Case:
    if name != "bf16":
        return make_case(name, 150, 1, 3, rows, "random", "normal", "normal", seed)
    random = np.random.default_rng(seed)
    layout = StoreLayout(ExpertShape(1, 1, 75, 3 * 21, 21), format_named(name))
    data = np.empty(3 * layout.tile_bytes, np.uint8)
    for tile in range(3):
        part = data[tile * layout.tile_bytes : (tile + 1) * layout.tile_bytes]
        layout.format.fill_random(random, 75, 21, 0.1, part)
    x = states(random, "normal", rows, 75)
    return Case(layout, data, x, random.permutation(rows).astype(np.int32))


FORMATS = (*QUANTIZED, "bf16")


@quick(20)
@given(name=st.sampled_from(FORMATS), rows=st.integers(1, 40), data=st.data(), seed=seeds)
def test_a_row_has_the_same_bits_in_any_company(
    library: Library, name: str, rows: int, data: st.DataObject, seed: int
) -> None:
    case = any_case(name, rows, seed)
    kernel = kernel_of(library, case.layout)
    x = kernel.quantize(case.x)
    every = np.arange(rows, dtype=np.int32)
    together = kernel.tiles(case.data, x, every)
    some = np.array(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=12)), np.int32)
    np.testing.assert_array_equal(bits(kernel.tiles(case.data, x, some)), bits(together[some]))
    row = int(some[0])
    alone = kernel.tiles(case.data, kernel.quantize(case.x[row : row + 1]), every[:1])
    np.testing.assert_array_equal(bits(alone[0]), bits(together[row]))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 3, 8, 13, 200])
def test_a_team_computes_the_same_bits(library: Library, name: str, rows: int) -> None:
    case = any_case(name, rows, rows)
    alone = run(library, case)
    for threads in (1, 2, 3, 5, 16):
        team = library.team(threads)
        assert (team is None) == (threads == 1)
        for _ in range(5):
            np.testing.assert_array_equal(bits(run(library, case, team)), bits(alone))
        if team is not None:
            team.close()
            team.close()  # once more does nothing


def test_a_team_shares_a_product(library: Library) -> None:
    format, random = format_named("int4"), np.random.default_rng(4)
    assert isinstance(format, BlockFormat)
    data = records(random, format, format.matrix_bytes(1000, 300) // format.record_bytes, "random", "normal")
    x = states(random, "normal", 9, 300)
    team = library.team(3)
    assert team is not None
    alone, shared = (library.kernel(Geometry(format, 300, 1000), t) for t in (None, team))
    flat, codes = data.reshape(-1), alone.quantize(x)
    np.testing.assert_array_equal(bits(shared.matmul(flat, codes)), bits(alone.matmul(flat, codes)))
    numbers = np.random.default_rng(1).integers(0, 2**64, 8 * 1001, np.uint64)
    total = int(np.add.reduce(numbers))  # modulo 2**64
    assert library.read(numbers.view(np.uint8)) == library.read(numbers.view(np.uint8), team) == total
    team.close()


@pytest.mark.parametrize("name", FORMATS)
def test_tiles_are_added_in_their_order_and_counted(library: Library, name: str) -> None:
    case = any_case(name, 11, 5)
    kernel = kernel_of(library, case.layout)
    x, ticks = kernel.quantize(case.x), np.zeros(2, np.uint64)
    whole = kernel.tiles(case.data, x, case.rows, int(ticks[1:].ctypes.data))
    assert ticks.tolist() == [0, 3]
    y = kernel.tiles(case.tile(0), x, case.rows)
    for tile in (1, 2):
        y += kernel.tiles(case.tile(tile), x, case.rows)
    np.testing.assert_array_equal(bits(y), bits(whole))


@pytest.mark.parametrize("name", FORMATS)
def test_no_rows_give_nothing_and_inputs_are_not_changed(library: Library, name: str) -> None:
    case = any_case(name, 6, 8)
    data, x, rows = (np.array(part) for part in (case.data, case.x, case.rows))
    for array in (case.data, case.x, case.rows):
        array.flags.writeable = False  # as the store's mapping and a Work's arrays are
    run(library, case)
    np.testing.assert_array_equal(case.data, data)
    np.testing.assert_array_equal(case.x, x)
    np.testing.assert_array_equal(case.rows, rows)
    kernel = kernel_of(library, case.layout)
    nothing = kernel.tiles(case.data, kernel.quantize(case.x), np.zeros(0, np.int32))
    assert nothing.shape == (0, case.layout.shape.hidden)


# --- what is refused before C is entered ----------------------------------------------------------


def test_only_formats_with_a_kernel_and_whole_groups_are_geometries() -> None:
    with pytest.raises(ValueError, match="no C kernel for f32"):
        Geometry(format_named("f32"), 16, 16, 16)
    with pytest.raises(ValueError, match="no whole groups of 64"):
        Geometry(format_named("int4"), 16, 16, 96)


@pytest.mark.parametrize("name", FORMATS)
def test_arrays_that_do_not_fit_are_refused(library: Library, name: str) -> None:
    case = any_case(name, 4, 2)
    kernel = kernel_of(library, case.layout)
    x, hidden = kernel.quantize(case.x), case.layout.shape.hidden
    wrong_data = {
        "nothing": case.data[:0],
        "half a tile": case.data[: case.layout.tile_bytes // 2],
        "a byte too many": np.append(case.data, np.uint8(0)),
        "every second byte": np.repeat(case.data, 2)[::2],
        "other numbers": case.data.view(np.int8),
        "two axes": case.data.reshape(3, -1),
    }
    for data in wrong_data.values():
        with pytest.raises(ValueError, match="weights"):
            kernel.tiles(data, x, case.rows)
    for rows in ([4], [-1], [0, 1, 100]):
        with pytest.raises(IndexError):
            kernel.tiles(case.data, x, np.array(rows, np.int32))
    for wrong in (
        Quantized(x.codes[:, :-1], x.factors),
        Quantized(x.codes.astype(np.float64), x.factors),
        Quantized(np.asfortranarray(x.codes), x.factors),
        *(
            ()
            if name == "bf16"
            else (
                Quantized(x.codes, x.factors[:-1]),
                Quantized(x.codes, x.factors[:, :-1]),
                Quantized(x.codes, x.factors.astype(np.float64)),
                Quantized(x.codes, np.asfortranarray(x.factors)),
            )
        ),
    ):
        with pytest.raises(ValueError, match="activations"):
            kernel.tiles(case.data, wrong, case.rows)
    for shape in ((4, hidden + 1), (hidden,), (1, 4, hidden)):
        with pytest.raises(ValueError, match="activations"):
            kernel.quantize(np.zeros(shape, np.float32))
    with pytest.raises(ValueError, match="weights"):
        kernel.matmul(case.data[:100], x)


def test_only_whole_lines_are_read(library: Library) -> None:
    with pytest.raises(ValueError, match="whole lines"):
        library.read(np.zeros(65, np.uint8))
    with pytest.raises(ValueError, match="whole lines"):
        library.read(np.zeros(256, np.uint8)[::2])
