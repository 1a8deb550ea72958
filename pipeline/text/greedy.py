"""Greedy choices that a device makes: of each row the largest logit and the second go to the host, instead of
a number for each token of the vocabulary."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pipeline.arrays import FloatArray
from pipeline.errors import PipelineError
from pipeline.text.logprobs import MOST

WIDTH = 4  # numbers of a row: both logits, and the bits of their tokens, int32


class Greedy(NamedTuple):
    """One row's token, as `Sampler` chooses it at temperature 0: the first of equals."""

    token: int
    margin: float  # as `best_margin`, like `runner_up`
    runner_up: int

    @classmethod
    def read(cls, row: FloatArray, vocabulary: int) -> Greedy:
        """From float32 [WIDTH], the larger logit first. Raises PipelineError where no largest is finite."""
        best, second = row[:2].tolist()
        token, runner_up = row[2:].view(np.int32).tolist()
        if not math.isfinite(best):
            raise PipelineError("the model's logits are not finite")
        if vocabulary == 1:
            return cls(token, 0.0, -1)
        if runner_up == token:  # all others are minus infinity, as is the excluded best: the first of those
            runner_up = int(token == 0)
        return cls(token, min(best - second, MOST), runner_up)
