"""Tiles of the quantized formats in random and in extreme bytes, and the results that kernels must give.

A kernel may differ from the exact numbers by what float32 rounds, and by one thing more: the inner
activations are rounded to int8 steps, and a number that lies within its own error of the middle between two
steps may be rounded to the other one. `Inner` counts those, number by number, so that the bound stays narrow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from shm.blocks import Scales
from shm.expert_math import GELU_ALPHA, GELU_CUBIC, SWIGLU, ExpertMath, Glu, Relu2
from shm.layout import BlockFormat, Bytes, ExpertShape, Float32, StoreLayout, format_named

Float64 = NDArray[np.float64]
UNIT = 2.0**-24  # the most that float32 changes a number by rounding it, relative to it
TINY = 2.0**-126  # the most that it loses where numbers become too small for it
QUANTIZED = ("int8", "int4", "int4-g128", "int2")
OF_FILES = ("q4_0", "q8_0", "mxfp4", "nvfp4", "int4-f16-g32", "int4-f16", "int4-f16-g128")
BLOCKS = (*QUANTIZED, *OF_FILES)
KINDS = {
    "swiglu": SWIGLU,
    "biases": ExpertMath(bias=True),
    "clamped": ExpertMath(Glu(1.702, gate_max=7, up_limit=7, offset=1), True),
    "gelu": ExpertMath(Glu(GELU_ALPHA, GELU_CUBIC)),
    "softcaps": ExpertMath(Glu(gate_softcap=15, up_softcap=20)),
    "all numbers": ExpertMath(Glu(1.5, 0.125, 5, 6, -0.25, 12, 9), True),
    "relu2": ExpertMath(Relu2()),
    "relu2 biases": ExpertMath(Relu2(), True),
}
CODES = ("random", "zeros", "ones", "either")
HEADS = ("normal", "zero", "huge", "tiny", "denormal", "mixed")
ROWS = ("normal", "zero", "full", "huge", "tiny", "denormal", "spikes")
SIZES = {"normal": 0.02, "zero": 0.0, "huge": 2.0**10, "tiny": 2.0**-60, "denormal": 2.0**-130}
# Tiny scales of binary16 and of E4M3 are those that are denormal there.
LIFTED = {Scales.F16: 2.0**40, Scales.F16_ZEROS: 2.0**40, Scales.E4M3: 2.0**52}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


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

    def biases(self, index: int) -> Float64:
        """Of gate, unless ungated, and up, [n, T]; or zeros."""
        shape = self.layout.shape
        if not shape.math.bias:
            return np.zeros((shape.math.matrices - 1, shape.tile))
        found = self.format.biases(self.tile(index), shape.hidden, shape.tile, shape.math)
        return found.astype(np.float64)

    def matrices(self, index: int) -> list[Matrix]:
        """Gate, unless ungated, up and down of a tile."""
        shape, format, data, lo = self.layout.shape, self.format, self.tile(index), 0
        number = shape.math.matrices
        end = format.matrices_bytes(shape.hidden, shape.tile, number)
        factors = format.factors_of(data[:end]) if format.factors else np.ones(number)
        made = []
        for at, (n, k) in enumerate(
            ((shape.tile, shape.hidden),) * (number - 1) + ((shape.hidden, shape.tile),)
        ):
            size = format.blocks_bytes(n, k)
            made.append(Matrix.of(format, data[lo : lo + size], n, float(factors[at])))
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
        lines = out[:, format.record_head :]
        lines[:] = random.choice(np.array(values, np.uint8), lines.shape)
    scales = heads(random, head, (number, 16 * format.inputs // format.group))
    zeros = random.choice([0, 7.5, 15, -3, 100], (number, 16)) + random.uniform(0, 1, (number, 16))
    put_heads(format, out, scales, zeros.astype(np.float32))
    return out


def put_heads(format: BlockFormat, records: Bytes, scales: Float32, zeros: Float32) -> None:
    """Write the heads of records [n, bytes]: scales [n, 16 for each group], as near as the format has them,
    and zeros [n, 16] where it has some."""
    if format.scales in LIFTED:
        scales = np.where(np.abs(scales) < 2.0**-30, scales * LIFTED[format.scales], scales)
    match format.scales:
        case Scales.OWN if format.bits == 8:
            records[:, :64].view("<f4")[:] = scales
        case Scales.OWN:
            records[:, :32].view("<u2")[:] = scales.view(np.uint32) >> 16
        case Scales.E8M0:
            records[:, :32] = (np.frexp(scales)[1] + 126).clip(0, 254)
        case Scales.E4M3:
            numbers = e4m3(np.arange(127))
            nearest = np.searchsorted((numbers[1:] + numbers[:-1]) / 2, np.abs(scales))
            records[:, :32] = nearest + np.where(scales < 0, 128, 0)
        case _:
            records[:, :32].view("<f2")[:] = scales
    if format.scales in (Scales.OWN, Scales.F16_ZEROS) and format.bits != 8:
        records[:, 32:64].view("<u2")[:] = zeros.view(np.uint32) >> 16


def e4m3(bits: NDArray[Any]) -> Float64:
    """The numbers of these bits."""
    sign, exponent, mantissa = bits >> 7, bits >> 3 & 15, bits & 7
    size = np.where(exponent > 0, 8 + mantissa, mantissa) * 2.0 ** (np.maximum(exponent, 1) - 10)
    return np.where(sign, -size, size)


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


def random_tiles(
    random: np.random.Generator, layout: StoreLayout, number: int, codes: str, head: str
) -> Bytes:
    """So many tiles of any records, and of biases of about 1."""
    shape, format = layout.shape, layout.format
    assert isinstance(format, BlockFormat)
    matrices = shape.math.matrices
    end = format.matrices_bytes(shape.hidden, shape.tile, matrices)
    size = (matrices - 1) * format.blocks_bytes(shape.tile, shape.hidden)
    size += format.blocks_bytes(shape.hidden, shape.tile)
    out = np.zeros((number, layout.tile_bytes), np.uint8)
    out[:, :size] = records(random, format, number * size // format.record_bytes, codes, head).reshape(
        number, -1
    )
    for tile in out if format.factors else ():
        format.factors_of(tile[:end])[:matrices] = random.uniform(0.001, 2, matrices)
    for tile in out if shape.math.bias else ():
        biases = format.biases(tile, shape.hidden, shape.tile, shape.math)
        biases[:] = random.standard_normal(biases.shape)
    return out.reshape(-1)


def make_case(
    name: str,
    hidden: int,
    groups: int,
    tiles: int,
    number: int,
    codes: str,
    head: str,
    kind: str,
    seed: int,
    math: ExpertMath = SWIGLU,
) -> Case:
    random = np.random.default_rng(seed)
    format = format_named(name)
    assert isinstance(format, BlockFormat)
    tile = groups * format.granularity
    layout = StoreLayout(ExpertShape(1, 1, hidden, tiles * tile, tile, math), format)
    data = random_tiles(random, layout, tiles, codes, head)
    x = states(random, kind, number, hidden)
    some = np.flatnonzero(random.random(number) < 0.8)
    rows = random.permutation(some if len(some) else np.arange(number)).astype(np.int32)
    return Case(layout, data, x, rows)


def cases(rows: int = 40, math: ExpertMath = SWIGLU) -> st.SearchStrategy[Case]:
    return st.builds(
        make_case,
        st.sampled_from(BLOCKS),
        hidden=st.integers(1, 300),
        groups=st.integers(1, 2),
        tiles=st.integers(1, 3),
        number=st.integers(1, rows),
        codes=st.sampled_from(CODES),
        head=st.sampled_from(HEADS),
        kind=st.sampled_from(ROWS),
        seed=st.integers(0, 2**32 - 1),
        math=st.just(math),
    )


def int8_codes(x: Float32, format: BlockFormat) -> tuple[NDArray[np.int8], Float32]:
    """The contract's quantization: codes int8 [R, K in whole records], steps float32 [R, groups]."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % format.inputs))).reshape(len(x), -1, format.group)
    steps = np.abs(padded).max(axis=2) / np.float32(127)
    scaled = np.divide(padded, steps[..., None], out=np.zeros_like(padded), where=steps[..., None] > 0)
    codes = np.clip(np.rint(scaled), -127, 127).astype(np.int8)
    return codes.reshape(len(x), -1), steps


def widened(head: Bytes) -> Float64:
    """The numbers of bfloat16 in bytes."""
    patterns = np.ascontiguousarray(head).view("<u2").astype(np.uint32) << 16
    return patterns.view(np.float32).astype(np.float64)


@dataclass(frozen=True)
class Matrix:
    """A matrix's exact numbers, [N, K in whole records]."""

    scale: Float64
    centred: Float64  # q - zero; of E2M1 twice the value of the code

    @classmethod
    def of(cls, format: BlockFormat, data: Bytes, n: int, factor: float = 1.0) -> Matrix:
        """`data`: its blocks."""
        blocks = data.reshape(-(-n // 16), -1, format.record_bytes)
        head = blocks[..., : format.record_head].copy()
        rest = blocks[..., format.record_head :].reshape(*blocks.shape[:2], -1, 16, 4)  # j, lane, b
        if format.bits == 8:
            q = rest.transpose(0, 3, 1, 2, 4)
        else:
            shifts = range(0, 8, format.bits)
            q = np.stack([rest >> shift & 2**format.bits - 1 for shift in shifts], axis=3)
            q = q.transpose(0, 4, 1, 2, 3, 5)
        q = q.reshape(*q.shape[:2], -1, format.group)  # [blocks, lane, groups, inputs]
        in_groups = (len(blocks), -1, 16)
        scale: NDArray[Any]
        match format.scales:
            case Scales.OWN if format.bits == 8:
                scale = head.view("<f4")
            case Scales.OWN:
                scale = widened(head[..., :32])
            case Scales.E8M0:
                scale = np.ldexp(0.5, head.astype(int) - 127).reshape(in_groups)
            case Scales.E4M3:
                scale = 0.5 * e4m3(head.astype(int)).reshape(in_groups)
            case _:
                scale = head[..., :32].copy().view("<f2")
        if format.scales in (Scales.E8M0, Scales.E4M3):
            centred = 2 * E2M1[q]
        elif format.scales == Scales.F16 or format.bits == 8:
            centred = q.astype(np.float64) - 2 ** (format.bits - 1)
        else:
            centred = q - widened(head[..., 32:]).transpose(0, 2, 1)[..., None]
        scale = scale.astype(np.float64) * factor
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
    """What is between the matrices, in int8 steps."""

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


def between(
    math: ExpertMath, a: Float64, a_missed: Float64, b: Float64, b_missed: Float64
) -> tuple[Float64, Float64]:
    """What an expert computes of gate a and up b, which a kernel knows but for `missed`, and by how much it
    may miss the result. The formula is written out here once more."""
    f = math.activation
    if isinstance(f, Relu2):
        up = np.maximum(b, 0)
        return up**2, (2 * up + b_missed) * b_missed + 2 * UNIT * up**2 + TINY
    g, w, more = np.minimum(a, f.gate_max), np.clip(b, -f.up_limit, f.up_limit), 0 * a
    missed_b = np.where(np.abs(b) - b_missed > f.up_limit, 0, b_missed)
    z = f.alpha * g * (1 + f.cubic * g**2)
    sigmoid = 1 / (1 + np.exp(-np.clip(z, -700, None)))
    if f.gate_softcap:
        g = f.gate_softcap * np.tanh(g / f.gate_softcap)
    if f.up_softcap:
        w = f.up_softcap * np.tanh(w / f.up_softcap)
    if f != Glu():  # the sum with the offset is rounded, and z, which changes the sigmoid
        missed_b = missed_b + UNIT * (32 * np.abs(w) + abs(f.offset))
        more = (32 + 8 * np.abs(z) * (1 - sigmoid)) * UNIT
    w = w + f.offset
    gated = g * sigmoid
    # It has a slope of at most 1.1, or GELU of 1.13; the kernels' exponential ends at 88 and is exact to a
    # few units.
    missed = (1.1 if f == Glu() else 1.13) * a_missed * (np.abs(w) + missed_b) + np.abs(gated) * missed_b
    missed += (16 * UNIT + more) * np.abs(gated * w) + (np.exp(-87) * np.abs(a) + 2 * TINY) * (1 + np.abs(w))
    return gated * w, missed


def expected(case: Case) -> tuple[Float64, Float64]:
    """The sum of all tiles for `case.rows`, [n, H], and how far from it a kernel may be."""
    shape, group = case.layout.shape, case.format.group
    exact, steps = int8_codes(case.x[case.rows], case.format)
    x, x_steps = exact.astype(np.float64), np.repeat(steps.astype(np.float64), group, axis=1)
    total = np.zeros((len(case.rows), shape.hidden))
    bound, size = np.zeros_like(total), np.zeros_like(total)
    for tile in range(shape.tiles):
        *wide, down = case.matrices(tile)
        sums, long = x.shape[1] + 16, shape.tile + 16
        products = [w.product(x, x_steps, sums) for w in wide]
        if shape.math.bias:
            with_biases = zip(products, case.biases(tile), strict=True)
            products = [
                (y + bias, lost + UNIT * (np.abs(y + bias) + lost)) for (y, lost), bias in with_biases
            ]
        inner = Inner.of(*between(shape.math, *products[0], *products[-1]), group)
        y, y_missed = down.product(inner.codes, inner.steps, long)
        total += y
        size += np.abs(y) + y_missed
        bound += y_missed + 1.01 * inner.error @ np.abs(down.scale * down.centred).T
    return total, bound + UNIT * shape.tiles * size + TINY
