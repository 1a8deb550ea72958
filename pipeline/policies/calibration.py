"""The result of a calibration: the arrays that policies plan with.

`pipeline/calibration/` makes, writes and reads it. L layers with experts, E experts a
layer, k a token, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    needed: Floats | None  # [L, k + 1] share of decode's tokens that use j experts with `threshold`'s gate
    sensitivity: Floats | None  # [L] mean over tokens of the squared gradient at the MoE block's output
    threshold: float | None  # T of AdapMoE's gate, found on the validation part of the text
    first_gate: Floats | None  # [E, H] predicts layer 0 of the next token from the last layer's x
