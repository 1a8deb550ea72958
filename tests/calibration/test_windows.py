"""The division of a text into windows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.calibration.windows import Division
from pipeline.errors import RequestError


@given(length=st.integers(256, 20_000), context=st.integers(16, 2000))
def test_each_token_is_in_one_window_within_the_context(length: int, context: int) -> None:
    tokens = list(range(length))
    division = Division.of(tokens, context)
    every = [*division.training, *division.validation]
    assert [token for window in every for token in window.tokens] == tokens
    assert sum(len(window.tokens) for window in division.validation) == int(length * 0.2)
    for part in (division.training, division.validation):
        sizes = [len(window.tokens) for window in part]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= min(context, 512)
        for window in part:
            assert 1 <= window.prefill < len(window.tokens) - 1  # at least one more token, to predict
    few = int(length * 0.2) // 64
    assert len(division.validation) >= min(few, 4)


@pytest.mark.parametrize(("length", "context", "message"), [(255, 512, "255 tokens"), (300, 15, "--context")])
def test_short_text_or_context_is_refused(length: int, context: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Division.of(range(length), context)
