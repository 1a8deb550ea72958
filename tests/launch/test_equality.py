"""The rule of equality: equal, or the first difference is at a near-tie; everything else is a mismatch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launch.equality import Step, Verdict, compare, rounding_bound

BOUND = 0.1
TOKENS = st.lists(st.integers(0, 3), max_size=6)


def steps(tokens: list[int], margin: float = 5.0, runner_up: int = 9) -> list[Step]:
    return [Step(token, runner_up, margin) for token in tokens]


@given(TOKENS, TOKENS)
def test_without_ties_only_equal_sequences_agree(ours: list[int], theirs: list[int]) -> None:
    found = compare(ours, steps(theirs), BOUND)
    assert found.verdict is (Verdict.EQUAL if ours == theirs else Verdict.MISMATCH)
    if ours != theirs:
        assert found.at is not None
        assert ours[: found.at] == theirs[: found.at]
        assert ours[found.at : found.at + 1] != theirs[found.at : found.at + 1]


def test_a_first_difference_at_a_near_tie_agrees_whatever_follows() -> None:
    reference = [*steps([1, 2]), Step(3, 7, 0.09), *steps([4, 5])]
    found = compare([1, 2, 7, 8, 8], reference, BOUND)
    assert (found.verdict, found.at, found.ours, found.expected, found.margin) == (
        Verdict.NEAR_TIE,
        2,
        7,
        3,
        0.09,
    )
    assert compare([1, 2, 7], reference, BOUND).verdict is Verdict.NEAR_TIE
    assert compare([1, 2, 6], reference, BOUND).verdict is Verdict.MISMATCH  # no runner-up
    assert compare([1, 2, 7], reference, 0.09).verdict is Verdict.MISMATCH  # not below the bound
    assert compare([1, 7, 7], reference, BOUND).verdict is Verdict.MISMATCH  # before the near-tie
    assert compare([1, 2, 3, 4, 7], reference, BOUND).verdict is Verdict.MISMATCH  # after it


def test_an_answer_that_is_cut_short_or_too_long_is_no_near_tie() -> None:
    near = steps([1, 2, 3], margin=0.0)
    assert compare([1, 2], near, BOUND).verdict is Verdict.MISMATCH
    assert compare([1, 2, 3, 4], near, BOUND).verdict is Verdict.MISMATCH
    assert compare([], near, BOUND).verdict is Verdict.MISMATCH


def test_float32_alone_has_the_narrow_bound() -> None:
    assert rounding_bound("f32", "f32") < 0.001
    assert rounding_bound("bf16", "f32") == rounding_bound("f32", "bf16") == rounding_bound("bf16", "bf16")
    assert rounding_bound("bf16", "bf16") > rounding_bound("f32", "f32")
