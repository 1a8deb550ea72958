"""The result of a calibration: the arrays that policies plan with.

`pipeline/calibration/` makes, writes and reads it. L layers with experts, E experts a
layer, k a token, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Calibration:
    """Read-only arrays. Arrays that could not be measured (such as the sensitivities of a quantized backbone)
    are None."""

    prefill_counts: NDArray[np.int64]  # [L, E] rows routed to each expert while prompts were read
    decode_counts: NDArray[np.int64]  # [L, E] the same while one token at a time was decoded
    residuals: Floats  # [L - 1, H] mean of x[l + 1] - x[l] over tokens (DALI)
    residual_logits: Floats  # [L - 1, E] router l + 1 applied to residuals[l]
    accuracy: dict[str, Floats]  # by predictor "raw" | "residual" | "first": [L] share of layer l's experts
    # that were among as many predicted; raw and residual predict layer l from l - 1, first predicts layer 0
    # from the last token's last layer. 0 where a predictor does not apply
    similarity: Floats  # [L] cosine of a text's counts in prefill and in decode, mean over the texts
    kept: Floats  # [L, G, k + 1] share of decode's tokens that keep j experts where a gate drops at most the
    # g-th of G even steps from 0 to 1 of a token's weight
    gated_accuracy: dict[
        str, Floats
    ]  # by predictor, [L, G]: as accuracy, in decode alone and with that gate on
    # both sides: of the experts that tokens keep, the share that their predictions keep as well
    needed: Floats | None  # [L, k + 1] share of decode's tokens that used j experts with `threshold`'s gate
    sensitivity: Floats | None  # [L] mean over tokens of the squared gradient at the MoE block's output
    threshold: float | None  # T of AdapMoE's gate, found on the validation part of the text
    first_gate: Floats | None  # [E, H] predicts layer 0 of the next token from the last layer's x
    hit_rates: dict[str, Floats] = field(default_factory=dict)  # by the order "lcp" | "lru" | "lfu" of a
    # cache, [L, E + 1]: of the experts that decode uses, the share in a cache of 0..E experts. Empty in files
    # of earlier versions
    magnitudes: Floats | None = None  # [L, S] quantiles of |u|, u = up x of decoded tokens' experts, at the
    # shares 0, 1/S, 2/S, ... None unless it was made with a format that keeps up apart
    left_mass: Floats | None = None  # [L, S] share of the sum of |u| that lies below each of them
    up: str = ""  # the format of the up matrices that u was computed with
    mlp_inner: Floats | None = None  # [P, W, H] and [P, E, W]: MLPs that correct the next gate's prediction
    mlp_outer: Floats | None = None  # of the layers 1 to P (FloE); None in files of earlier versions
    mlp_accuracy: Floats | None = None  # [P] share of those layers' experts that were named, as `accuracy`
    max_loss: float | None = (
        None  # percent that an approximation may add to the perplexity, where it was given
    )
    sparsity: float | None = None  # the largest within it; 0: none is


def corrected(calibration: Calibration | None, layer: int) -> bool:
    """Whether a trained MLP predicts this layer's experts better than the next gate alone."""
    if calibration is None or calibration.mlp_accuracy is None:
        return False
    known = calibration.mlp_accuracy
    return 0 < layer <= len(known) and bool(known[layer - 1] > calibration.accuracy["raw"][layer])


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
