"""Greedy choices made by the device are the sampler's, with the margins that messages have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.backbone.greedy import greedy
from pipeline.errors import PipelineError
from pipeline.text.greedy import Greedy
from pipeline.text.logprobs import best_margin
from pipeline.text.sampler import Sampler
from protocol.messages import Sampling

NUMBERS = st.one_of(
    st.sampled_from([-np.inf, np.inf, np.nan, 0.0, -0.0, 1.0, 3.4e38, -3.4e38]),
    st.floats(-3, 3, width=32),
)


@given(st.integers(1, 9).flatmap(lambda n: st.lists(st.lists(NUMBERS, min_size=n, max_size=n), min_size=1)))
def test_choices_are_the_samplers(rows: list[list[float]]) -> None:
    """Ties, infinities and numbers that are none, in any place."""
    logits = np.array(rows, np.float32)
    found = greedy(torch.from_numpy(logits)).numpy()
    for row, made in zip(logits, found, strict=True):
        try:
            token = Sampler(Sampling(0.0), 0).next(row, ())
        except PipelineError as e:
            with pytest.raises(PipelineError, match=str(e)):
                Greedy.read(made, len(row))
            continue
        assert Greedy.read(made, len(row)) == (token, *best_margin(row))


def test_a_large_vocabularys_tokens_keep_their_bits() -> None:
    logits = torch.zeros(2, (1 << 18) + 3)
    logits[0, -1], logits[0, -2], logits[1, 1] = 2.0, 1.5, 1.0
    first, second = (Greedy.read(row, logits.shape[1]) for row in greedy(logits).numpy())
    assert first == (logits.shape[1] - 1, 0.5, logits.shape[1] - 2)
    assert second == (1, 1.0, 0)
