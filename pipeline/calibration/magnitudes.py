"""The distribution of |u| in every layer, u = up x of the channels of the experts that decoded tokens use:
the thresholds of contextual sparsity are its quantiles (FloE)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.arrays import FloatArray, IntArray, Phase
from pipeline.engine.driver import LayerDecision
from pipeline.policies.calibration import Floats
from pipeline.policies.view import ModelShape
from shm.floe import FloeFormat
from shm.store import Store
from workers.kernels.reference import int8_steps

STEPS = 100  # shares of the channels, from 0 on
BINS_AN_OCTAVE = 128  # so a quantile is exact to half a percent
LOWEST, HIGHEST = -40, 24  # powers of two; |u| outside counts as the nearest
BINS = (HIGHEST - LOWEST) * BINS_AN_OCTAVE

Up = Callable[[int, int, FloatArray], FloatArray]  # layer, expert, x [n, H] -> u [n, channels]


class Magnitudes:
    """An observer of the engine that counts |u| by size, in bins of equal ratio."""

    def __init__(self, shape: ModelShape, up: Up, every: int = 1) -> None:
        """`every`: of that many decode steps one is counted."""
        self._every = every
        self._up = up
        self._counts: NDArray[np.int64] = np.zeros((shape.layers, BINS), np.int64)
        self._sums = np.zeros((shape.layers, BINS))
        self._steps = 0
        self._phase: Phase = "prefill"

    @property
    def counts(self) -> bool:
        """Whether the present step is counted."""
        return self._phase == "decode" and (self._steps - 1) % self._every == 0

    def probes(self, layer: int) -> tuple[int, ...]:
        return ()

    def begin(self, phase: Phase, sequences: tuple[int, ...]) -> None:
        self._phase = phase
        self._steps += phase == "decode"

    def end(self) -> None:
        """Nothing is left over."""

    def layer(self, decision: LayerDecision[object], x: FloatArray) -> None:
        """Masks act on decoded tokens, so only these count."""
        if not self.counts:
            return
        active, layer = decision.gated.routing.active, decision.layer
        ends = active.offsets.tolist()
        for expert, start, end in zip(active.experts.tolist(), ends, ends[1:], strict=False):
            self.count(layer, np.abs(self._up(layer, expert, x[active.rows[start:end]])).ravel())

    def count(self, layer: int, magnitudes: FloatArray) -> None:
        """Add |u| [n]."""
        with np.errstate(divide="ignore"):
            places = (np.log2(magnitudes) - LOWEST) * BINS_AN_OCTAVE
        bins: IntArray = np.clip(places, 0, BINS - 1).astype(np.int32)
        self._counts[layer] += np.bincount(bins, minlength=BINS)
        self._sums[layer] += np.bincount(bins, magnitudes, minlength=BINS)

    def quantiles(self) -> tuple[Floats, Floats] | None:
        """`magnitudes` and `left_mass` of a Calibration; None where no token was decoded."""
        if not self._counts.any(axis=1).all():
            return None
        shares = np.arange(STEPS) / STEPS
        edges = 2.0 ** (LOWEST + np.arange(BINS + 1) / BINS_AN_OCTAVE)
        edges[0] = 0
        thresholds, left = np.zeros((2, len(self._counts), STEPS), np.float32)
        for layer, (counts, sums) in enumerate(zip(self._counts, self._sums, strict=True)):
            below = np.concatenate(([0], counts.cumsum())) / counts.sum()
            mass = np.concatenate(([0], sums.cumsum())) / max(sums.sum(), 1e-30)
            # within a bin by its share; of edges with as many below them, the largest
            keep = np.append(np.diff(below) > 0, True)
            thresholds[layer] = np.interp(shares, below[keep], edges[keep])
            left[layer] = np.interp(shares, below[keep], mass[keep])
        thresholds[:, 0] = left[:, 0] = 0
        return thresholds, left


def up_of(store: Store) -> Up | None:
    """u = up x of an expert, from the heads of the store, with x in the int8 steps that the kernels of these
    formats compute with; None where the experts' format keeps no up matrices apart."""
    shape, kind = store.layout.shape, store.layout.format
    if not isinstance(kind, FloeFormat):
        return None

    def up(layer: int, expert: int, x: FloatArray) -> FloatArray:
        heads = store.heads(layer, expert, 0, shape.tiles)  # whole blocks: together one matrix
        matrix = kind.up.decode_matrix(heads, shape.padded, shape.hidden)[: shape.intermediate]
        steps = int8_steps(torch.from_numpy(x), kind.up.group)[:, : shape.hidden].numpy()
        u: FloatArray = steps @ matrix.T
        return u

    return up
