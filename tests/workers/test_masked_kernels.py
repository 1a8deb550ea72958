"""Tiles whose gate and down lie by channel: the C kernels, variant by variant, against dense arithmetic with
the same mask and against the reference; and that a row's bits depend on nothing but the row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from decoding import decode
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_runs import bits, quick, seeds
from quantized_cases import KINDS, between
from work_cases import Case

from shm.descriptor import SHARE, THRESHOLD
from shm.expert_math import SWIGLU, ExpertMath, Glu
from shm.floe import FLOE_FORMATS, FloeFormat
from shm.layout import Bytes, ExpertShape, Float32, StoreLayout, format_named
from shm.mask import DENSE, Mask, Tally
from workers.kernels.channels import ChannelKernel
from workers.kernels.native import Library, WorkKernel
from workers.kernels.reference import ReferenceChannels, int8_steps

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = [format.name for format in FLOE_FORMATS]
MASKS = st.one_of(
    st.just(DENSE),
    st.builds(Mask, threshold=st.floats(0, 3, width=32)),
    st.builds(Mask, share=st.floats(0, 1, width=32)),
    st.just(Mask(threshold=2.0**60)),  # no channel
)


@dataclass
class Expert:
    """One layer of experts, and rows of x."""

    layout: StoreLayout
    data: Bytes
    x: Float32

    def part(self, expert: int, lo: int, hi: int) -> tuple[Bytes, Bytes]:
        """The heads and the tiles [lo, hi)."""
        layout, head, at = (
            self.layout,
            *(f(0, expert, lo) for f in (self.layout.head_offset, self.layout.offset)),
        )
        return (
            self.data[head : head + (hi - lo) * layout.head_bytes],
            self.data[at : at + (hi - lo) * layout.tile_bytes],
        )

    def biases(self, expert: int) -> list[Float32]:
        """Of gate and up, [channels] each, as they lie in the tiles; none without biases."""
        layout, tiles = self.layout, range(self.layout.shape.tiles)
        heads, out = (f(0, expert) for f in (layout.head_offset, layout.offset))
        parts = [layout.biases_of(self.data[out:], self.data[heads:], tile) for tile in tiles]
        return [np.concatenate(of_matrix) for of_matrix in zip(*parts, strict=True)]


def made(
    name: str,
    hidden: int,
    tile: int,
    tiles: int,
    rows: int,
    seed: int,
    experts: int = 1,
    math: ExpertMath = SWIGLU,
) -> Expert:
    random, format = np.random.default_rng(seed), format_named(name)
    layout = StoreLayout(ExpertShape(1, experts, hidden, tile * tiles, tile, math), format)
    data = np.zeros(layout.total_bytes, np.uint8)
    expert = Expert(layout, data, random.standard_normal((rows, hidden)).astype(np.float32))
    for e in range(experts):
        for n in range(tiles):
            head, body = expert.part(e, n, n + 1)
            gate, up, down = (
                random.standard_normal((tile, hidden)).astype(np.float32) * hidden**-0.5 for _ in range(3)
            )
            format.encode(gate, up, down, body, head)
            out, heads = data[layout.offset(0, e) :], data[layout.head_offset(0, e) :]
            for biases in layout.biases_of(out, heads, n):
                biases[:] = random.standard_normal(tile)
    return expert


def work_of(expert: Expert, mask: Mask, rows: list[int] | None = None) -> Case:
    """All tiles of expert 0, for these rows."""
    chosen = np.array(range(len(expert.x)) if rows is None else rows, np.int32)
    items = np.array([[0, 0, expert.layout.shape.tiles]], np.int32)
    weights = np.ones(len(chosen), np.float32)
    offsets = np.array([0, len(chosen)], np.int32)
    return Case(0, items, offsets, chosen, weights, expert.x, mask)


def run(library: Library, expert: Expert, work: Case, threads: int = 1) -> tuple[Float32, Tally]:
    team = library.team(threads)
    try:
        return work.computed(WorkKernel(library, expert.layout, expert.data, team))
    finally:
        if team is not None:
            team.close()


def exact(expert: Expert, mask: Mask) -> tuple[np.ndarray, np.ndarray, Tally, float]:
    """y in float64 with the mask of u, a bound of a kernel's error, the tally, and how near to the mask's
    limit the nearest u is, relative to the largest."""
    layout, x = expert.layout, torch.from_numpy(expert.x)
    format, shape = layout.format, layout.shape
    assert isinstance(format, FloeFormat)
    steps = int8_steps(x, 64)[:, : shape.hidden].double().numpy()
    gate_x = x.bfloat16().double().numpy() if format.rows.bits == 16 else steps
    y, bound = np.zeros((len(x), shape.hidden)), np.zeros((len(x), shape.hidden))
    tallies, near, unit = [], 1.0, 20 * 2.0**-24 * (shape.hidden + 16)  # 20: zero times sum, and scales
    f, biases = shape.math.activation, expert.biases(0)
    assert isinstance(f, Glu)
    for n in range(shape.tiles):
        head, body = expert.part(0, n, n + 1)
        gate, up, down = decode(format, body, shape.hidden, shape.tile, head).astype(np.float64)
        u, g = steps @ up.T, gate_x @ gate.T
        if biases:
            g, u = (
                part + bias[n * shape.tile :][: shape.tile] for part, bias in zip((g, u), biases, strict=True)
            )
        size, kept = np.abs(u), mask.keeps(u.astype(np.float32))
        near = min(near, nearest(size, kept, mask))
        spread_u, spread_g = np.abs(steps) @ np.abs(up).T + size, np.abs(gate_x) @ np.abs(gate).T
        if f == Glu():
            a = g / (1 + np.exp(-g)) * u
            error = unit * (1.1 * spread_g * size + (np.abs(g) + 1) * spread_u)
        else:
            a, error = between(shape.math, g, unit * (spread_g + np.abs(g)), u, unit * spread_u)
        a, error = np.where(kept, a, 0), np.where(kept, error, 0)
        y += a @ down
        bound += error @ np.abs(down) + unit * np.abs(a) @ np.abs(down)
        left = np.where(kept, 0, size).sum()
        tallies.append(Tally(size.sum(), left, int(kept.any(axis=0).sum()), shape.tile))
    return y, bound + 1e-30, Tally.of(tallies), near


def nearest(size: np.ndarray, kept: np.ndarray, mask: Mask) -> float:
    if not size.size or not size.max():
        return 0.0 if size.size and not kept.all() else 1.0
    if mask.share < 1:
        gaps = [a[k].min() - a[~k].max() for a, k in zip(size, kept, strict=True) if k.any() and not k.all()]
        return min(gaps, default=size.max()) / size.max()
    return float(np.abs(size - mask.threshold).min() / size.max()) if mask.threshold else 1.0


# --- against dense arithmetic ---------------------------------------------------------------------------


@quick(60)
@given(
    name=st.sampled_from(NAMES),
    hidden=st.integers(1, 400),
    tile=st.sampled_from([16, 32, 48, 80, 160]),
    tiles=st.integers(1, 3),
    rows=st.integers(1, 12),
    mask=MASKS,
    seed=seeds,
)
@example("floe-int4", 1100, 160, 2, 1, Mask(share=0.2), 1)  # several segments of scales, odd groups
@example("floe", 1100, 160, 2, 3, Mask(share=0.2), 1)
@example("floe-int8", 1100, 160, 2, 9, Mask(share=0.2), 1)
def test_masked_tiles_equal_dense_arithmetic_and_the_reference(
    library: Library, name: str, hidden: int, tile: int, tiles: int, rows: int, mask: Mask, seed: int
) -> None:
    check_masked(library, made(name, hidden, tile, tiles, rows, seed), mask)


@pytest.mark.parametrize("kind", [name for name, math in KINDS.items() if math.gated and name != "swiglu"])
@pytest.mark.parametrize("name", ["floe", "floe-u4-int8", "floe-u8-int4"])
@pytest.mark.parametrize(("hidden", "rows"), [(37, 1), (200, 3), (130, 12)])
def test_masked_tiles_of_every_kind_of_experts_do(
    library: Library, kind: str, name: str, hidden: int, rows: int
) -> None:
    expert = made(name, hidden, 48, 3, rows, rows, math=KINDS[kind])
    for mask in (DENSE, Mask(threshold=0.5), Mask(share=0.3)):
        check_masked(library, expert, mask)


def check_masked(library: Library, expert: Expert, mask: Mask) -> None:
    shape, rows = expert.layout.shape, len(expert.x)
    y, bound, tally, near = exact(expert, mask)
    found, counted = run(library, expert, work_of(expert, mask))
    if near < 1e-5:  # rounding decides what is kept
        assert np.isfinite(found).all()
        return
    assert (np.abs(found - y) <= bound).all()
    assert (counted.kept, counted.channels) == (tally.kept, tally.channels)
    np.testing.assert_allclose(
        [counted.mass, counted.left], [tally.mass, tally.left], rtol=1e-4, atol=1e-4 * tally.mass
    )

    reference = ReferenceChannels(expert.layout)
    inputs, every = reference.activations(torch.from_numpy(expert.x)), torch.arange(rows)
    other, biases = np.zeros_like(found), expert.biases(0)
    for n in range(shape.tiles):
        of_up = torch.from_numpy(biases[1][n * shape.tile :][: shape.tile]) if biases else None
        parts = map(torch.from_numpy, expert.part(0, n, n + 1))
        part, _ = reference.compute(*parts, inputs, every, mask, of_up)
        other += part.numpy()
    assert (np.abs(other - y) <= bound).all()


@pytest.mark.parametrize("name", ["floe", "floe-int8", "floe-int4"])
def test_equal_sizes_are_kept_from_the_first_on(library: Library, name: str) -> None:
    """All channels have the same up row; the rest of a channel tells which were kept."""
    expert, format = made(name, 64, 32, 1, 1, 5), format_named(name)
    head, body = expert.part(0, 0, 1)
    gate, up, down = decode(format, body, 64, 32, head)
    format.encode(gate, np.repeat(up[:1], 32, axis=0), down, body, head)
    mask = Mask(share=0.25)
    u = ReferenceChannels(expert.layout)
    kept = np.zeros((1, 32), np.float32)
    inputs = u.activations(torch.from_numpy(expert.x))
    kept[:, :8] = u.up(torch.from_numpy(head), inputs, torch.arange(1)).numpy()[:, :8]
    wanted = u.channels(torch.from_numpy(body), torch.from_numpy(kept), inputs, torch.arange(1)).numpy()
    found, tally = run(library, expert, work_of(expert, mask))
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)
    assert tally.kept == 8
    assert tally.left == pytest.approx(0.75 * tally.mass, rel=1e-5)


# --- the same bits --------------------------------------------------------------------------------------


@quick(25)
@given(
    name=st.sampled_from(NAMES),
    hidden=st.integers(1, 300),
    tile=st.sampled_from([16, 48, 96]),
    tiles=st.integers(1, 3),
    mask=MASKS,
    seed=seeds,
)
def test_a_rows_bits_do_not_depend_on_the_other_rows_nor_on_threads(
    library: Library, name: str, hidden: int, tile: int, tiles: int, mask: Mask, seed: int
) -> None:
    expert = made(name, hidden, tile, tiles, 140, seed)
    whole, tally = run(library, expert, work_of(expert, mask))
    shared, again = run(library, expert, work_of(expert, mask), 3)
    np.testing.assert_array_equal(bits(shared), bits(whole))
    assert again == tally
    for rows in ([0], [0, 1], [1, 5, 139], [2, 3, 4, 5], [0, 2, 4, 6, 8, 10, 12]):
        for threads in (1, 3):
            few, _ = run(library, expert, work_of(expert, mask, rows), threads)
            np.testing.assert_array_equal(bits(few[rows]), bits(whole[rows]))


@quick(15)
@given(
    name=st.sampled_from(NAMES),
    hidden=st.integers(1, 300),
    rows=st.integers(1, 9),
    mask=MASKS,
    threads=st.sampled_from([1, 3]),
    seed=seeds,
    math=st.sampled_from([SWIGLU, KINDS["clamped"], KINDS["softcaps"]]),
)
def test_parts_for_a_callers_own_masks_give_the_bits_of_a_tile(
    library: Library,
    name: str,
    hidden: int,
    rows: int,
    mask: Mask,
    threads: int,
    seed: int,
    math: ExpertMath,
) -> None:
    expert = made(name, hidden, 48, 2, rows, seed, math=math)
    format, team = expert.layout.format, library.team(threads)
    assert isinstance(format, FloeFormat)
    try:
        kernel = ChannelKernel(library, format, hidden, team, math)
        x, every = kernel.activations(expert.x), np.arange(rows, dtype=np.int32)
        of_up = expert.biases(0)[1] if math.bias else None
        whole = kernel.up(expert.part(0, 0, 2)[0], x, every, of_up)
        found = np.zeros_like(expert.x)
        for n in range(2):
            u = whole[:, 48 * n : 48 * (n + 1)]
            kept = np.where(mask.keeps(u), u, np.float32(0))
            found += kernel.channels(expert.part(0, n, n + 1)[1], kept, x, every)
    finally:
        if team is not None:
            team.close()
    np.testing.assert_array_equal(found, run(library, expert, work_of(expert, mask))[0])


# --- what is refused, and what is not read ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["floe", "floe-u4-int8", "floe-u8-int4"])
def test_channels_that_no_row_keeps_are_not_read(library: Library, name: str) -> None:
    expert = made(name, 130, 32, 1, 3, 8)
    mask = Mask(share=0.25)
    wanted, tally = run(library, expert, work_of(expert, mask))
    assert tally.kept < 32
    head, body = expert.part(0, 0, 1)
    reference = ReferenceChannels(expert.layout)
    inputs = reference.activations(torch.from_numpy(expert.x))
    kept = (
        reference.keeps(reference.up(torch.from_numpy(head), inputs, torch.arange(3)), mask)
        .any(dim=0)
        .numpy()
    )
    body.reshape(32, -1)[~kept] = 255  # NaN, as numbers and as scales
    found, _ = run(library, expert, work_of(expert, mask))
    np.testing.assert_array_equal(bits(found), bits(wanted))


def test_what_is_no_mask_is_refused(library: Library) -> None:
    expert = made("floe-int4", 64, 16, 1, 1, 0)
    good = work_of(expert, DENSE)
    works = WorkKernel(library, expert.layout, expert.data)
    wrong = [(THRESHOLD, number) for number in (-1.0, np.nan, np.inf)] + [(SHARE, 1.5), (SHARE, np.nan)]
    for place, number in wrong:
        descriptor = good.descriptor
        descriptor.view(np.float32)[place] = number
        with pytest.raises(IndexError, match="no mask at all"):
            works.compute(descriptor, expert.x, np.empty_like(expert.x))


def test_not_a_number_is_kept_and_counts_for_nothing(library: Library) -> None:
    expert = made("floe-int4", 64, 16, 1, 2, 0)
    expert.x[1, 3] = np.nan
    found, tally = run(library, expert, work_of(expert, Mask(threshold=0.5)))
    assert np.isnan(found[1]).all()
    assert np.isfinite(found[0]).all()
    assert tally.kept == 16
    assert np.isfinite([tally.mass, tally.left]).all()
