"""Tiles of the quantized formats in random and in extreme bytes, and the results that kernels must give.

A kernel may differ from the exact numbers by what float32 rounds, and by one thing more: the inner
activations are rounded to int8 steps, and a number that lies within its own error of the middle between two
steps may be rounded to the other one. `Inner` counts those, number by number, so that the bound stays narrow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from shm.layout import BlockFormat, Bytes, ExpertShape, Float32, StoreLayout, format_named

Float64 = NDArray[np.float64]
UNIT = 2.0**-24  # the most that float32 changes a number by rounding it, relative to it
TINY = 2.0**-126  # the most that it loses where numbers become too small for it
QUANTIZED = ("int8", "int4", "int4-g128")
CODES = ("random", "zeros", "ones", "either")
HEADS = ("normal", "zero", "huge", "tiny", "denormal", "mixed")
ROWS = ("normal", "zero", "full", "huge", "tiny", "denormal", "spikes")
SIZES = {"normal": 0.02, "zero": 0.0, "huge": 2.0**10, "tiny": 2.0**-60, "denormal": 2.0**-130}


@dataclass(frozen=True)
class Case:
    """Tiles of one expert in any bytes, hidden states, and which of them to compute."""

    layout: StoreLayout
    data: Bytes  # all tiles
    x: Float32  # [R, H]
    rows: NDArray[np.int32]

    @property
    def format(self) -> BlockFormat:
        assert isinstance(self.layout.format, BlockFormat)
        return self.layout.format

    def tile(self, index: int) -> Bytes:
        size = self.layout.tile_bytes
        return self.data[index * size : (index + 1) * size]

    def matrices(self, index: int) -> list[Matrix]:
        """Gate, up and down of a tile."""
        shape, data, lo = self.layout.shape, self.tile(index), 0
        made = []
        for n, k in ((shape.tile, shape.hidden), (shape.tile, shape.hidden), (shape.hidden, shape.tile)):
            size = self.format.matrix_bytes(n, k)
            made.append(Matrix.of(self.format, data[lo : lo + size], n))
            lo += size
        return made


def heads(random: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Float32:
    """Scales."""
    sizes = random.choice(list(SIZES.values()) if kind == "mixed" else [SIZES[kind]], shape)
    return (sizes * random.uniform(0.5, 1.5, shape) * random.choice([-1, 1], shape)).astype(np.float32)


def records(random: np.random.Generator, format: BlockFormat, number: int, codes: str, head: str) -> Bytes:
    """Any records, what pads included: nothing there may matter."""
    out = random.integers(0, 256, (number, format.record_bytes), np.uint8)
    if codes != "random":
        values = {"zeros": [0], "ones": [255], "either": [0, 255]}[codes]
        out[:, 64:] = random.choice(np.array(values, np.uint8), out[:, 64:].shape)
    scales = heads(random, head, (number, 16))
    if format.bits == 8:
        out[:, :64].view("<f4")[:] = scales
    else:
        zeros = random.choice([0, 7.5, 15, -3, 100], (number, 16)) + random.uniform(0, 1, (number, 16))
        both = np.concatenate((scales, zeros.astype(np.float32)), axis=1)
        out[:, :64].view("<u2")[:] = both.view(np.uint32) >> 16
    return out


def states(random: np.random.Generator, kind: str, rows: int, hidden: int) -> Float32:
    """Hidden states; some rows are zero."""
    x = random.standard_normal((rows, hidden))
    match kind:
        case "zero" | "huge" | "tiny" | "denormal":
            x *= SIZES[kind]
        case "full":  # every code is 127 or -127
            x = np.sign(x) * random.uniform(0.1, 10, (rows, 1))
        case "spikes":
            x *= np.where(random.random(x.shape) < 0.02, 1e4, 1)
    x[random.random(rows) < 0.1] = 0
    return x.astype(np.float32)


def make_case(
    name: str, hidden: int, groups: int, tiles: int, number: int, codes: str, head: str, kind: str, seed: int
) -> Case:
    random = np.random.default_rng(seed)
    format = format_named(name)
    assert isinstance(format, BlockFormat)
    tile = groups * format.group
    layout = StoreLayout(ExpertShape(1, 1, hidden, tiles * tile, tile), format)
    size = tiles * layout.tile_bytes // format.record_bytes
    data = records(random, format, size, codes, head).reshape(-1)
    x = states(random, kind, number, hidden)
    some = np.flatnonzero(random.random(number) < 0.8)
    rows = random.permutation(some if len(some) else np.arange(number)).astype(np.int32)
    return Case(layout, data, x, rows)


def cases(rows: int = 40) -> st.SearchStrategy[Case]:
    return st.builds(
        make_case,
        st.sampled_from(QUANTIZED),
        hidden=st.integers(1, 300),
        groups=st.integers(1, 2),
        tiles=st.integers(1, 3),
        number=st.integers(1, rows),
        codes=st.sampled_from(CODES),
        head=st.sampled_from(HEADS),
        kind=st.sampled_from(ROWS),
        seed=st.integers(0, 2**32 - 1),
    )


def int8_codes(x: Float32, group: int) -> tuple[NDArray[np.int8], Float32]:
    """The contract's quantization: codes int8 [R, K in whole groups], steps float32 [R, groups]."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % group))).reshape(len(x), -1, group)
    steps = np.abs(padded).max(axis=2) / np.float32(127)
    scaled = np.divide(padded, steps[..., None], out=np.zeros_like(padded), where=steps[..., None] > 0)
    codes = np.clip(np.rint(scaled), -127, 127).astype(np.int8)
    return codes.reshape(len(x), -1), steps


@dataclass(frozen=True)
class Matrix:
    """A matrix's exact numbers, [N, K in whole groups]."""

    scale: Float64
    centred: Float64  # q - zero

    @classmethod
    def of(cls, format: BlockFormat, data: Bytes, n: int) -> Matrix:
        blocks = data.reshape(-(-n // 16), -1, format.record_bytes)
        rest = blocks[..., 64:].reshape(*blocks.shape[:2], -1, 16, 4)  # j, lane, b
        if format.bits == 8:
            scale = blocks[..., :64].copy().view("<f4").astype(np.float64)
            zero = np.full_like(scale, 128)
            q = rest.transpose(0, 3, 1, 2, 4)
        else:
            head = blocks[..., :64].copy().view("<u2").astype(np.uint32) << 16
            scale, zero = np.split(head.view(np.float32).astype(np.float64), 2, axis=-1)
            q = np.stack((rest & 15, rest >> 4), axis=3).transpose(0, 4, 1, 2, 3, 5)
        q = q.reshape(*q.shape[:3], -1).astype(np.float64)  # [blocks, lane, groups, inputs]
        centred = q - zero.transpose(0, 2, 1)[..., None]
        spread = np.broadcast_to(scale.transpose(0, 2, 1)[..., None], centred.shape)
        size = (len(blocks) * 16, -1)
        return cls(spread.reshape(size)[:n], centred.reshape(size)[:n])

    def product(self, codes: Float64, steps: Float64, sums: int) -> tuple[Float64, Float64]:
        """With codes [R, K] and the steps [R, K] that they count: [R, N], and by how much it may be missed
        where `sums` numbers are rounded on the way of each."""
        w, x = self.scale * self.centred, codes * steps
        lost = np.abs(codes) @ np.abs(self.centred).T + np.abs(x).sum(axis=1)[:, None]
        lost += np.abs(w).sum(axis=1) + w.shape[1]
        return x @ w.T, UNIT * sums * (np.abs(x) @ np.abs(w).T) + TINY * lost


@dataclass(frozen=True)
class Inner:
    """silu(gate) * up in int8 steps."""

    codes: Float64  # [R, T]
    steps: Float64  # [R, T]: of each number's group
    error: Float64  # [R, T]: by how much codes * steps may be missed

    @classmethod
    def of(cls, v: Float64, missed: Float64, group: int) -> Inner:
        """v [R, T] is known to the kernel but for `missed` [R, T]."""
        groups, e = v.reshape(len(v), -1, group), missed.reshape(len(v), -1, group)
        largest, doubt = np.abs(groups).max(axis=2, keepdims=True), e.max(axis=2, keepdims=True)
        step = largest / 127
        moved = doubt / 127 + 2 * UNIT * step + TINY  # of the step
        place = np.divide(groups, step, out=np.zeros_like(groups), where=step > 0)
        codes = np.rint(place)
        # v'/s' - v/s is ((v' - v) + v/s * (s - s')) / s'; it takes a number across the middle, or not.
        steady = step > 4 * moved
        reach = np.where(steady, (e + np.abs(place) * moved) / np.where(steady, step - moved, 1), 0)
        reach += 2 * UNIT * np.abs(place)
        crossed = np.abs(place - np.floor(place) - 0.5) <= reach
        flips = np.where(crossed, np.floor(reach) + 1, 0)
        error = flips * (step + moved) + np.abs(codes) * moved
        error = np.where(steady, error, np.abs(codes) * step + 1.01 * (largest + doubt + TINY))
        return cls(*(part.reshape(v.shape) for part in (codes, np.broadcast_to(step, groups.shape), error)))


def expected(case: Case) -> tuple[Float64, Float64]:
    """The sum of all tiles for `case.rows`, [n, H], and how far from it a kernel may be."""
    shape, group = case.layout.shape, case.format.group
    exact, steps = int8_codes(case.x[case.rows], group)
    x, x_steps = exact.astype(np.float64), np.repeat(steps.astype(np.float64), group, axis=1)
    total = np.zeros((len(case.rows), shape.hidden))
    bound, size = np.zeros_like(total), np.zeros_like(total)
    for tile in range(shape.tiles):
        gate, up, down = case.matrices(tile)
        wide, long = x.shape[1] + 16, shape.tile + 16
        (a, a_missed), (b, b_missed) = (w.product(x, x_steps, wide) for w in (gate, up))
        gated = a / (1 + np.exp(-np.clip(a, -700, None)))
        # silu has a slope of at most 1.1; the kernels' exponential ends at 88 and is exact to a few units.
        missed = 1.1 * a_missed * (np.abs(b) + b_missed) + np.abs(gated) * b_missed
        missed += 16 * UNIT * np.abs(gated * b) + (np.exp(-87) * np.abs(a) + 2 * TINY) * (1 + np.abs(b))
        inner = Inner.of(gated * b, missed, group)
        y, y_missed = down.product(inner.codes, inner.steps, long)
        total += y
        size += np.abs(y) + y_missed
        bound += y_missed + 1.01 * inner.error @ np.abs(down.scale * down.centred).T
    return total, bound + UNIT * shape.tiles * size + TINY
