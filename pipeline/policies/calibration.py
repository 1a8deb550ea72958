"""The result of a calibration: the arrays that policies plan with, and the contextual sparsity (FloE) that
follows from them: which channels of an expert a token leaves out.

`pipeline/calibration/` makes, writes and reads it. L layers with experts, E experts a layer, k a token, H
hidden size.

A format that keeps the up matrices apart (docs/checkpoints.md) lets a token compute u = up x first, and then
only the channels whose |u| is large. A layer's threshold is the quantile of |u| that a calibration measured
with the same up matrices; without one, the largest |u| of each tile are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import IntArray
from pipeline.errors import PolicyError
from pipeline.policies.options import AUTO, Number, Value
from protocol.program import COMMAND
from shm.mask import DENSE, Mask

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Calibration:
    """Read-only arrays. Arrays that could not be measured (such as the sensitivities of a quantized backbone)
    are None."""

    decode_counts: NDArray[
        np.int64
    ]  # [L, E] rows routed to each expert while one token at a time was decoded
    residual_logits: Floats  # [L - 1, E] router l + 1 applied to the mean of x[l + 1] - x[l] (DALI)
    accuracy: dict[str, Floats]  # by predictor "raw" | "residual" | "first": [L] share of layer l's experts
    # that were among as many predicted; raw and residual predict layer l from l - 1, first predicts layer 0
    # from the last token's last layer. 0 where a predictor does not apply
    kept: Floats  # [L, G, k + 1] share of decode's tokens that keep j experts where a gate drops at most the
    # g-th of G even steps from 0 to 1 of a token's weight
    gated_accuracy: dict[str, Floats]  # by predictor, [L, G]: as accuracy, in decode alone and with that gate
    # on both sides: of the experts that tokens keep, the share that their predictions keep as well
    hit_rates: Floats  # [L, E + 1] of the experts that decode uses, the share in a cache of 0..E experts
    sensitivity: Floats | None = None  # [L] mean over tokens of the squared gradient at the experts' sum
    threshold: float | None = None  # T of AdapMoE's gate, found on the validation part of the text
    first_gate: Floats | None = None  # [E, H] predicts layer 0 of the next token from the last layer's x
    magnitudes: Floats | None = None  # [L, S] quantiles of |u|, u = up x of decoded tokens' experts, at the
    # shares 0, 1/S, 2/S, ... None unless it was made with a format that keeps up apart
    up: str = ""  # the format of the up matrices that u was computed with
    mlp_inner: Floats | None = None  # [P, W, H] and [P, E, W]: MLPs that correct the next gate's prediction
    mlp_outer: Floats | None = None  # of the layers 1 to P (FloE)
    mlp_history: Floats | None = (
        None  # [P, E, P * E], by the token's routing weights in the layers 0 to P - 1,
    )
    # which are added to that (`Trajectory`)
    mlp_accuracy: Floats | None = None  # [P] share of those layers' experts that were named, as `accuracy`
    max_loss: float | None = None  # percent that an approximation may add to the perplexity, where given
    sparsity: float | None = None  # the largest within it; 0: none is

    def of_layers(self, layers: range) -> Calibration:
        """These layers' part, counted from 0. None of them follows on the last one of all."""
        rows, between = slice(layers.start, layers.stop), slice(layers.start, layers.stop - 1)
        known = layers.start * self.decode_counts.shape[1]  # of the trajectory, on other devices

        def cut(array: Floats | None, of: slice) -> Floats | None:
            return None if array is None else array[of]

        return replace(
            self,
            decode_counts=self.decode_counts[rows],
            residual_logits=self.residual_logits[between],
            accuracy={name: array[rows] for name, array in self.accuracy.items()},
            kept=self.kept[rows],
            gated_accuracy={name: array[rows] for name, array in self.gated_accuracy.items()},
            hit_rates=self.hit_rates[rows],
            sensitivity=cut(self.sensitivity, rows),
            magnitudes=cut(self.magnitudes, rows),
            first_gate=None,
            mlp_inner=cut(self.mlp_inner, between),
            mlp_outer=cut(self.mlp_outer, between),
            mlp_history=None if self.mlp_history is None else self.mlp_history[between, :, known:],
            mlp_accuracy=cut(self.mlp_accuracy, between),
        )

    @property
    def needed(self) -> NDArray[np.float64] | None:
        """[L, k + 1]: the share of decode's tokens that use j experts with `threshold`'s gate; None without
        it."""
        if self.sensitivity is None or self.threshold is None:
            return None
        return at_limits(self.kept, drop_limits(self.sensitivity.tolist(), self.threshold))


class Trajectory:
    """The routing weights that the rows of a step had in the first layers, [R, P * E]; 0 in later ones: what
    FloE's predictor knows beside the hidden state."""

    def __init__(self, layers: int, experts: int) -> None:
        """`layers`: P."""
        self._experts, self._width = experts, layers * experts
        self.weights: Floats

    def add(self, layer: int, experts: IntArray, weights: Floats) -> None:
        """The rows' experts and weights [R, k] of a layer; a step's come in the order of its layers."""
        if not layer:
            self.weights = np.zeros((len(experts), self._width), np.float32)
        first = layer * self._experts
        if first < self._width:
            np.put_along_axis(self.weights, first + experts, weights, axis=1)


def corrected(calibration: Calibration | None, layer: int) -> bool:
    """True where a trained MLP predicts this layer's experts better than the next gate alone."""
    if calibration is None or calibration.mlp_accuracy is None:
        return False
    known = calibration.mlp_accuracy
    return 0 < layer <= len(known) and bool(known[layer - 1] > calibration.accuracy["raw"][layer])


def drop_limits(sensitivity: Sequence[float], threshold: float) -> list[float]:
    """The share of a token's weight that AdapMoE's gate may drop in each layer."""
    return [sqrt(threshold / one) if one > 0 else inf for one in sensitivity]


def at_limits(table: Floats, limits: Sequence[float]) -> NDArray[np.float64]:
    """Each layer's entry of a table [L, G, ...] over G even steps from 0 to 1, [L, ...]: between two steps by
    their distances; a limit above 1 is 1."""
    steps = table.shape[1] - 1
    place = np.minimum(np.asarray(limits, np.float64), 1) * steps
    below = np.minimum(place.astype(int), steps - 1)
    layers = np.arange(len(table))
    more = (place - below).reshape(-1, *[1] * (table.ndim - 2))
    first, second = table[layers, below].astype(np.float64), table[layers, below + 1].astype(np.float64)
    answer: NDArray[np.float64] = first + more * (second - first)
    return answer


def quantiles(table: Floats, share: float) -> NDArray[np.float64]:
    """Each layer's entry of a table [L, S] over the shares 0, 1/S, 2/S, ..., [L]: between two by their
    distances."""
    place = min(share * table.shape[1], table.shape[1] - 1.0)
    below = min(int(place), table.shape[1] - 2)
    first, second = table[:, below].astype(np.float64), table[:, below + 1].astype(np.float64)
    answer: NDArray[np.float64] = first + (place - below) * (second - first)
    return answer


MOST = 0.95  # of the channels that are left out
SPARSITY = Number(
    name="sparsity",
    help="share of an expert's channels that a decoded token leaves out, with a floe format; auto: the"
    " largest within the calibration's --max-loss",
    default=0.0,
    low=0,
    high=MOST,
    whole=False,
    auto=True,
)


@dataclass(frozen=True)
class Sparsity:
    """An option of every preset. `wished`: the share of the channels that is left out in decode, None: the
    calibration's largest within its bound."""

    wished: float | None = 0.0

    @classmethod
    def of(cls, values: Mapping[str, Value]) -> Self:
        """Make one from the values of a policy's options."""
        wished = values[SPARSITY.name]
        return cls(None if wished == AUTO else float(wished or 0))

    @property
    def dense(self) -> bool:
        """No channel is ever left out."""
        return self.wished == 0

    def check(self, policy: str, calibration: Calibration | None) -> None:
        """Raises PolicyError where the share is the calibration's, and it has none."""
        if self.wished is not None or (calibration is not None and calibration.sparsity):
            return
        if calibration is not None and calibration.sparsity is not None:
            raise PolicyError(
                f"policy {policy}: the calibration found no sparsity that adds at most"
                f" {calibration.max_loss:g} % to the perplexity; give --set {policy}.sparsity=X, or calibrate"
                " with a larger --max-loss"
            )
        raise PolicyError(
            f"policy {policy}: sparsity=auto needs a calibration with a bound: run {COMMAND} calibrate"
            " --text FILE --format floe-int4 --max-loss 2 (and --model, if given)"
        )

    def masks(self, policy: str, layers: int, up: str, calibration: Calibration | None) -> list[Mask]:
        """The mask of each layer. `up`: as in View. Raises PolicyError, one line with the remedy, where the
        experts' format or the calibration does not allow it."""
        if self.dense:
            return [DENSE] * layers
        if not up:
            asked = AUTO if self.wished is None else f"{self.wished:g}"
            raise PolicyError(
                f"policy {policy}: sparsity={asked} leaves channels out, which needs a format that keeps the"
                f" up matrices apart: start with --format floe-int4, or give --set {policy}.sparsity=0"
            )
        wished = self.share(calibration)
        magnitudes = _magnitudes(up, calibration)
        if magnitudes is None:
            return [Mask(0.0, round(1 - wished, 6))] * layers
        return [Mask(threshold, 1.0) for threshold in quantiles(magnitudes, wished).tolist()]

    def share(self, calibration: Calibration | None) -> float:
        """Share of the channels that is left out; the calibration has passed `check`."""
        if self.wished is not None:
            return self.wished
        assert calibration is not None
        assert calibration.sparsity is not None
        return calibration.sparsity

    def notes(self, policy: str, up: str, calibration: Calibration | None) -> tuple[str, ...]:
        """A line where no threshold was measured."""
        if self.dense or _magnitudes(up, calibration) is not None:
            return ()
        return (
            f"{policy}: no calibration has |u| of this format's up matrices, so the largest of each tile are"
            f" kept instead of those above a threshold ({COMMAND} calibrate --text FILE)",
        )


def _magnitudes(up: str, calibration: Calibration | None) -> Floats | None:
    """The calibration's quantiles of |u|, where it has those of these up matrices."""
    return calibration.magnitudes if calibration is not None and calibration.up == up else None
