"""The division of a text into windows."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.calibration.reading import Division
from pipeline.errors import RequestError


@given(length=st.integers(256, 20_000), context=st.integers(16, 2000))
def test_each_token_is_in_one_window_within_the_context(length: int, context: int) -> None:
    tokens = list(range(length))
    division = Division.of([tokens], context, length)
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


@given(
    lengths=st.lists(st.integers(0, 9000), min_size=1, max_size=30),
    most=st.integers(256, 5000),
    context=st.integers(16, 1000),
)
def test_longer_text_is_sampled_from_all_of_it(lengths: list[int], most: int, context: int) -> None:
    total = sum(lengths)
    if total <= most:
        return
    ends = list(accumulate(lengths, initial=0))
    division = Division.of([range(start, end) for start, end in pairwise(ends)], context, most)
    assert division == Division.of([range(start, end) for start, end in pairwise(ends)], context, most)
    every = sorted([*division.training, *division.validation], key=lambda window: window.tokens[0])
    assert division.tokens <= most
    for window in every:
        tokens = window.tokens
        assert tokens == list(range(tokens[0], tokens[-1] + 1))
        assert not any(tokens[0] < end <= tokens[-1] for end in ends[1:-1])  # within one excerpt
    for one, following in pairwise(every):
        assert one.tokens[-1] < following.tokens[0]
    if len(lengths) == 1:
        assert division.tokens == most
        starts = [window.tokens[0] for window in every]
        gaps = [following - start for start, following in pairwise(starts)]
        assert max(gaps, default=1) - min(gaps, default=1) <= 1
        assert starts[-1] + 2 * max(gaps, default=total) > total  # up to the end


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
        Division.of([range(length)], context, most)
