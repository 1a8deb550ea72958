"""The end of a step: logits of the rows that need them, or the device's choices from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from pipeline.arrays import FloatArray
from pipeline.backbone.backbone import Backbone, greedy
from pipeline.backbone.batch import StepInput, logit_rows
from pipeline.device import Device


def answers(backbone: Backbone, device: Device, h: Tensor, inputs: Sequence[StepInput]) -> list[FloatArray]:
    """From the last hidden states h float32 [R, H] the wanted logits of each input, float32 [n, vocabulary],
    or its greedy choice [1, 4] as `Greedy` reads it. Other rows do not go through the head, and logits whose
    choice is enough stay on the device."""
    wanted, counts = logit_rows(inputs)
    if not wanted:
        return [np.empty((0, backbone.spec.vocabulary), np.float32) for _ in inputs]
    rows = h if len(wanted) == len(h) else h[device.from_host(np.array(wanted, np.int64))]
    logits = backbone.head(rows)
    chosen = np.repeat([item.logits == "greedy" for item in inputs], counts)
    if not chosen.any():
        return _parts(device.to_host(logits)[0], counts)
    choices = _parts(device.to_host(greedy(logits))[0], counts)
    if chosen.all():
        return choices
    (others,) = device.to_host(logits[device.from_host(np.flatnonzero(~chosen))])
    other_counts = [0 if item.logits == "greedy" else n for item, n in zip(inputs, counts, strict=True)]
    logits_of = zip(inputs, choices, _parts(others, other_counts), strict=True)
    return [choice if item.logits == "greedy" else found for item, choice, found in logits_of]


def _parts(rows: FloatArray, counts: Sequence[int]) -> list[FloatArray]:
    return np.split(rows, np.cumsum(counts)[:-1])
