"""Quantization to few bits: half-quadratic optimisation of a group's scale and zero, with numpy.

A group of weights w is stored as whole numbers q from 0 to a largest code (15 for 4 bits, 3 for 2) that stand
for r = scale * (q - zero). Rounding to
nearest takes scale and zero from the group's range, so that one outlier makes all steps wide. Badri and
Shaji (HQQ, 2023) instead minimise sum |w - r|^p with p < 1, which lets few weights be far off so that most
are near, and split it with an auxiliary error e:

    e     <- shrink(w - r) = sign(w - r) * max(0, |w - r| - |w - r|^(p-1) / beta)
    zero  <- the exact minimiser of |w - e - r|^2 for the codes q
    beta  <- kappa * beta

for at most STEPS times, until the group's error no longer falls. Here the second step finds the scale too, by
least squares of w - e over q, which is no dearer. Both are rounded to bfloat16, as they are stored, before
the codes are made, and errors are those of the numbers that would be stored; the first candidate is rounding
to nearest, so the result is never worse than that. Errors are in units of the group's first scale: the
thresholds of a group do not depend on how large its weights are.

With 2 bits (SQUARED) the error is the squared one, p = 2, and so e = 0: of four levels each is used by many
weights, and a norm that forgives large errors costs a model more than it gains. Alternating then ends in
one of several minima: it starts twice, the second time with a narrower grid around the mean, and the better
end counts.

`shm/quantize.c` computes the same, number for number: both give the same bytes. That is why the power is
computed as it is, and why every sum runs over the inputs one after the other (numpy adds the rows of a matrix
in order).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shm.formats import Bytes, Float32, round_to_bf16, widen_bf16

STEPS = 20
NORM = np.float32(0.7)  # p
BETA = np.float32(10)
KAPPA = np.float32(1.01)
SQUARED = 3  # the largest code with which squared errors are minimised
NARROWER = np.float32(0.7)  # the second start's scale, of the first one's
SCALE_DRIFT = np.float32(4)  # the most that the scale moves away from its start, either way
SMALLEST = np.float32(2.0**-120)  # a group with a scale below is all zeros
LARGEST = np.float32(2.0**120)  # weights are below

LOGARITHM = (1.00189034e-4, 1.43730211, -0.67293417, 0.3154676, -0.08001088)  # of 1 + m, base 2, m in 0..1
POWER = (1.0000001, 0.693121, 0.24022107, 0.055922035, 0.009676037)  # 2^f, f in -0.5..0.5


def coded_groups(
    x: Float32, most: int, steps: int = STEPS
) -> tuple[NDArray[np.uint16], NDArray[np.uint16], Bytes]:
    """Groups of finite weights float32 [inputs, groups], at least 16 groups. Returns the bfloat16 patterns of
    scales and zeros [groups], and codes uint8 [inputs, groups], of 0..`most`. `steps` = 0: rounding to
    nearest."""
    low, high = np.minimum(x.min(axis=0), 0), np.maximum(x.max(axis=0), 0)
    start: Float32 = (high - low) / np.float32(most)
    start[start < SMALLEST] = 0
    live = start > 0
    grid = np.where(live, start, np.float32(1))
    inverse = np.where(live, 1 / grid, np.float32(0))
    x = x * inverse
    scale: Float32 = np.where(live, _bf16(start) / grid, np.float32(1))
    zero = _bf16((0 - low * inverse) / scale)
    best = np.full_like(scale, 3e38)
    best_scale, best_zero = scale, zero
    squared = most == SQUARED and steps > 0
    for again in range(2 if squared else 1):
        if again:
            live = start > 0
            mean = np.add.reduce(x, axis=0) / np.float32(len(x))
            scale = np.where(live, _bf16(NARROWER * start) / grid, np.float32(1))
            zero = _bf16(np.float32(most) / 2 - mean / scale)
        least, beta = np.full_like(scale, 3e38), BETA
        for _ in range(steps + 1):
            error, mean_q, mean_t, slope = _examine(x, most, scale, zero, None if squared else 1 / beta)
            live = live & (error < least)
            least = np.where(live, error, least)
            better = live & (error < best)
            best = np.where(better, error, best)
            best_scale, best_zero = np.where(better, scale, best_scale), np.where(better, zero, best_zero)
            if not live.any():
                break
            usable = (slope >= 1 / SCALE_DRIFT) & (slope <= SCALE_DRIFT) & (start > 0)
            scale = np.where(usable, _bf16(slope * start) / grid, scale)
            zero = _bf16(mean_q - mean_t / scale)
            beta = beta * KAPPA
    codes = _codes(x, most, best_scale, best_zero).astype(np.uint8)
    return round_to_bf16(best_scale * start), round_to_bf16(best_zero), codes


def int8_groups(x: Float32) -> tuple[Float32, Bytes]:
    """Quantize finite weights float32 [inputs, groups]. Returns scales [groups] and codes + 128, uint8
    [inputs, groups]."""
    scale = np.abs(x).max(axis=0) / np.float32(127)
    scale[scale < SMALLEST] = 0
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    return scale, (np.rint(np.clip(x * inverse, -127, 127)) + 128).astype(np.uint8)


def _examine(
    x: Float32, most: int, scale: Float32, zero: Float32, threshold: np.float32 | None
) -> tuple[Float32, Float32, Float32, Float32]:
    """The groups' errors with this scale and zero, and for the next ones: the mean code, the mean of
    t = w - e, and the slope of t over the codes. `threshold`: 1 / beta; None: of squared errors."""
    code = _codes(x, most, scale, zero)
    rest = x - (code - zero) * scale
    if threshold is None:
        errors, target = rest * rest, x
    else:
        size = np.abs(rest)
        slope = _power(size)
        errors, target = size * slope, x - np.copysign(np.maximum(size - slope * threshold, 0), rest)
    sums = [np.add.reduce(v, axis=0) for v in (errors, code, code * code, target, code * target)]
    error, sum_q, sum_qq, sum_t, sum_qt = sums
    total = np.float32(len(x))
    mean_q, mean_t = sum_q / total, sum_t / total
    spread = np.maximum(sum_qq - sum_q * mean_q, np.float32(0.5))
    return error, mean_q, mean_t, (sum_qt - sum_q * mean_t) / spread


def _codes(x: Float32, most: int, scale: Float32, zero: Float32) -> Float32:
    return np.rint(np.clip(x * (1 / scale) + zero, 0, most))


def _bf16(values: Float32) -> Float32:
    return widen_bf16(round_to_bf16(values))


def _power(size: Float32) -> Float32:
    """size^(p-1), to 3e-5 of it; of 0 it is 2^38."""
    bits = size.view(np.int32)
    exponent = ((bits >> 23) - 127).astype(np.float32)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).view(np.float32) - np.float32(1)
    y = (NORM - np.float32(1)) * (exponent + _polynomial(LOGARITHM, mantissa))
    whole = np.rint(y)
    part = _polynomial(POWER, y - whole)
    raised: NDArray[np.int32] = part.view(np.int32) + (whole.astype(np.int32) << 23)
    return raised.view(np.float32)


def _polynomial(coefficients: tuple[float, ...], x: Float32) -> Float32:
    value = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = np.float32(coefficient) + x * value
    return value
