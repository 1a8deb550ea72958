"""The division of a text into windows."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.calibration.reading import Division
from pipeline.errors import RequestError


@given(length=st.integers(256, 20_000), context=st.integers(16, 2000))
def test_each_token_is_in_one_window_within_the_context(length: int, context: int) -> None:
    tokens = list(range(length))
    division = Division.of(tokens, context, length)
    every = sorted([*division.training, *division.validation], key=lambda window: window.tokens[0])
    assert [token for window in every for token in window.tokens] == tokens
    assert division.tokens == length
    sizes = [len(window.tokens) for window in every]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= min(context, 512)
    for window in every:
        assert 1 <= window.prefill < len(window.tokens) - 1  # at least one more token, to predict
    # every fifth window is held out, from the text's beginning to its end
    assert abs(len(division.validation) - len(every) / 5) < 1
    assert [every.index(window) for window in division.validation] == list(range(2, len(every), 5))
    assert len(division.validation) >= min(length // 320, 4)


@given(length=st.integers(256, 90_000), most=st.integers(256, 5000), context=st.integers(16, 1000))
def test_longer_text_is_sampled_from_all_of_it(length: int, most: int, context: int) -> None:
    most = min(most, length)
    division = Division.of(range(length), context, most)
    every = sorted([*division.training, *division.validation], key=lambda window: window.tokens[0])
    assert division.tokens == most
    for window in every:
        assert window.tokens == list(range(window.tokens[0], window.tokens[-1] + 1))
    starts = [window.tokens[0] for window in every]
    gaps = [following - start for start, following in pairwise(starts)]
    assert max(gaps, default=1) - min(gaps, default=1) <= 1
    assert starts[-1] + 2 * max(gaps, default=length) > length  # up to the end


@pytest.mark.parametrize(
    ("length", "context", "most", "message"),
    [
        (255, 512, 900, "255 tokens"),
        (300, 15, 900, "--context"),
        (0, 512, 900, "0 tokens"),
        (9000, 512, 255, "9000 tokens"),
    ],
)
def test_short_text_or_context_is_refused(length: int, context: int, most: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Division.of(range(length), context, most)
