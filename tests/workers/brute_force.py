"""Experts computed in float64, with a bound for the rounding error of a kernel's result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from quantized_cases import between

from shm.expert_math import SWIGLU, ExpertMath, Glu
from shm.layout import Float32

Float64 = NDArray[np.float64]
UNIT = {
    "f32": 2.0**-24,
    "fp8": 2.0**-24,
    "bf16": 2.0**-8,
}  # the most that rounding changes a number, relative to it
DTYPES = {"f32": torch.float32, "fp8": torch.float32, "bf16": torch.bfloat16}  # of fp8 its numbers'


def rounded(values: Float32, format: str) -> Float64:
    """The values as a format holds them."""
    return torch.from_numpy(values).to(DTYPES[format]).double().numpy()


@dataclass(frozen=True)
class Expected:
    """A result [R, H] and how far from it a kernel may be."""

    y: Float64
    bound: Float64

    def agrees(self, found: Float32) -> bool:
        return bool((np.abs(found - self.y) <= self.bound).all())

    def __add__(self, other: Expected) -> Expected:
        return Expected(self.y + other.y, self.bound + other.bound)

    def weighted(self, weights: Float32) -> Expected:
        """weights [R]"""
        factor = weights.astype(np.float64)[:, None]
        y = self.y * factor
        return Expected(y, self.bound * np.abs(factor) + 4 * UNIT["f32"] * np.abs(y))


def expert(
    gate: Float32 | None,
    up: Float32,
    down: Float32,
    x: Float32,
    format: str,
    math: ExpertMath = SWIGLU,
    biases: Sequence[Float32] = (),
) -> Expected:
    """gate, up [C, H], down [H, C], x [R, H]: any channels of an expert, and their biases [C]."""
    g, u, d, rows = (
        rounded(np.ascontiguousarray(part), format) for part in (up if gate is None else gate, up, down, x)
    )
    channels, hidden = g.shape
    unit, sums = UNIT[format], UNIT["f32"] * (max(channels, hidden) + 8)  # products are summed in float32
    a, b = rows @ g.T, rows @ u.T  # [R, C]
    a_error = unit * np.abs(a) + sums * (np.abs(rows) @ np.abs(g).T)
    b_error = unit * np.abs(b) + sums * (np.abs(rows) @ np.abs(u).T)
    if biases:
        a, b = a + biases[0], b + biases[-1]
    if math.activation == Glu():
        inner = a / (1 + np.exp(-a)) * b
        # silu has a slope of at most 1.1; silu and the product are rounded once each
        inner_error = 1.1 * a_error * np.abs(b) + np.abs(a) * b_error + 2.5 * unit * np.abs(inner)
    else:
        inner, inner_error = between(math, a, a_error, b, b_error)
        inner_error = inner_error + 2.5 * unit * np.abs(inner)
    spread = np.abs(inner) @ np.abs(d).T
    bound = inner_error @ np.abs(d).T + (unit + sums) * spread
    return Expected(inner @ d.T, 1.5 * bound + 1e-30)
