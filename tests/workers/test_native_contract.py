"""The contract of the C kernels, variant by variant: a row's bits do not depend on other rows, and invalid
arrays never reach C."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_runs import bits, kernel_of, quick, run, seeds
from quantized_cases import BLOCKS, Case, make_case, states

from shm.layout import ExpertShape, StoreLayout, format_named
from workers.kernels import native
from workers.kernels.c_types import Quantized
from workers.kernels.native import VARIANTS, Library, best, load

pytestmark = pytest.mark.usefixtures("one_thread")


def any_case(name: str, rows: int, seed: int) -> Case:
    if name in BLOCKS:
        return make_case(name, 150, 1, 3, rows, "random", "normal", "normal", seed)
    random = np.random.default_rng(seed)
    channels = 256 if name == "fp8" else 150
    layout = StoreLayout(ExpertShape(1, 1, 75, 3 * channels, channels), format_named(name))
    data = np.empty(3 * layout.tile_bytes, np.uint8)
    for tile in range(3):
        part = data[tile * layout.tile_bytes : (tile + 1) * layout.tile_bytes]
        layout.format.fill_random(random, 75, channels, 0.1, part)
    x = states(random, "normal", rows, 75)
    return Case(layout, data, x, random.permutation(rows).astype(np.int32))


FORMATS = (*BLOCKS, "bf16", "fp8")


@quick(20)
@given(name=st.sampled_from(FORMATS), rows=st.integers(1, 40), data=st.data(), seed=seeds)
def test_bits_of_a_row_do_not_depend_on_other_rows(library, name, rows, data, seed) -> None:
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


def test_compiled_variants_are_used_best_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is not found costs no result, only time."""
    compiled = {path.name.split(".")[0] for path in Path(native.__file__).parent.glob("_*.so")}
    found = {name: load(name) for name in VARIANTS}
    for name, library in found.items():
        missing = "not compiled at installation"
        expected = f"this processor has no {VARIANTS[name]}" if f"_{name}" in compiled else missing
        assert isinstance(library, Library) or library == expected
    order = ("amx", "avx512", "avx2", "portable")
    usable = [name for name in order if isinstance(found[name], Library)]
    for version in (native.VERSION - 1, native.VERSION + 1):
        monkeypatch.setattr(native, "VERSION", version)
        others = {load.__wrapped__(name) for name in VARIANTS if f"_{name}" in compiled}
        assert others <= {"compiled from another version: install again"}
    assert best().variant == usable[0]
    assert ("portable" in usable) == ("_portable" in compiled)


@pytest.mark.parametrize("name", FORMATS)
def test_tiles_are_added_in_their_order(library: Library, name: str) -> None:
    case = any_case(name, 11, 5)
    kernel = kernel_of(library, case.layout)
    x = kernel.quantize(case.x)
    whole = kernel.tiles(case.data, x, case.rows)
    y = kernel.tiles(case.tile(0), x, case.rows)
    for tile in (1, 2):
        y += kernel.tiles(case.tile(tile), x, case.rows)
    np.testing.assert_array_equal(bits(y), bits(whole))


@pytest.mark.parametrize("name", FORMATS)
def test_no_rows_give_an_empty_result_and_inputs_are_not_changed(library: Library, name: str) -> None:
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


@pytest.mark.parametrize("name", FORMATS)
def test_arrays_of_wrong_shape_or_type_are_refused(library: Library, name: str) -> None:
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
            if name not in BLOCKS
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


@pytest.mark.parametrize("name", BLOCKS)
def test_variants_with_fused_additions_give_equal_bits_of_quantized_formats(name: str) -> None:
    found = [load(variant) for variant in VARIANTS if variant != "portable"]
    runs = [
        run(one, any_case(name, 23, rows)) for rows in (1, 5) for one in found if isinstance(one, Library)
    ]
    for of_one in (runs[: len(runs) // 2], runs[len(runs) // 2 :]):
        for other in of_one[1:]:
            np.testing.assert_array_equal(bits(other), bits(of_one[0]))


@pytest.mark.parametrize("name", BLOCKS)
def test_many_rows_of_many_outputs_have_the_bits_of_each(library: Library, name: str) -> None:
    """More outputs than a core's cache holds are summed in another order of memory."""
    case = make_case(name, 1100, 1, 2, 125, "random", "normal", "normal", 3)
    kernel = kernel_of(library, case.layout)
    x, rows = kernel.quantize(case.x), np.arange(125, dtype=np.int32)
    together = kernel.tiles(case.data, x, rows)
    for at in (0, 57, 124):
        alone = kernel.tiles(case.data, x, rows[at : at + 1])
        np.testing.assert_array_equal(bits(alone[0]), bits(together[at]))
