"""Answers under load against the same alone, from an engine of known answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from launch.equality import Verdict
from launch.stress.load import End, Finding, Outcome, Request, alone, compare_all, judge
from protocol.answer import Answer
from protocol.client import Client
from protocol.errors import EngineGone
from protocol.messages import Done, Sampling, Token

GREEDY = Request("a label", "hello", None, 4, Sampling())
BOUND = 0.5


def outcome(*tokens: int, end: End = End.LENGTH, request: Request = GREEDY, **fields: Any) -> Outcome:
    """Tokens with the runner-up 100 and a margin of 3."""
    steps = [Token(0, i, token, "x", 3.0, 100) for i, token in enumerate(tokens)]
    return Outcome(request, 0.0, steps, end=end, text="x" * len(steps), **fields)


class StandInEngine:
    """Answers 1 2 3 4; a rival's margin is `margins[resumed tokens]`, and then 9 precedes it in `other`."""

    def __init__(self, margins: dict[int, float] | None = None) -> None:
        self.margins = margins or {}
        self.other: set[int] = set()  # numbers of resumed tokens
        self.asked: list[dict[str, Any]] = []
        self.gone_at = -1  # the request that finds no engine

    def generate(self, **fields: Any) -> Answer:
        answer = Answer(0, lambda request: None)
        if len(self.asked) == self.gone_at:
            answer.feed(EngineGone("it was there a moment ago"))
        self.asked.append(fields)
        had, rival = len(fields["resume"]), fields["rival"]
        for index in range(had, fields["max_tokens"]):
            last = index == fields["max_tokens"] - 1
            token = 9 if rival >= 0 and had in self.other and not last else index + 1
            margin = self.margins.get(had, 3.0) if rival >= 0 else 3.0
            answer.feed(Token(0, index, token, "x", margin, rival if rival >= 0 else 100))
        answer.feed(Done(0, "length"))
        return answer


async def compared(engine: StandInEngine, *outcomes: Outcome) -> list[Finding]:
    findings: list[Finding] = []
    await compare_all(cast(Client, engine), outcomes, BOUND, findings.append)
    return findings


def test_request_alone_has_no_past_and_ends_where_the_answer_was_cancelled() -> None:
    asked = replace(GREEDY, cancel_after=2)
    plain = replace(GREEDY, label="", reuse=False)
    for end, tokens, expected in (
        (End.LENGTH, (1, 2), plain),
        (End.STOP, (), plain),
        (End.CANCELLED, (1, 2), replace(plain, max_tokens=2)),
        (End.CANCELLED, (), None),
        (End.REFUSED, (), plain),
        (End.FAILED, (1,), None),
        (End.GONE, (1,), None),
        (End.LOST, (1,), None),
    ):
        assert alone(outcome(*tokens, end=end, request=asked)) == expected
    assert alone(outcome(1, request=replace(asked, sampling=Sampling(1.0)))) is None


async def test_each_different_request_runs_once() -> None:
    engine, other = StandInEngine(), replace(GREEDY, prompt="other", label="b")
    outcomes = (
        outcome(1, 2, 3, 4),
        outcome(1, 2, 3, 4, request=replace(GREEDY, label="again")),
        outcome(1, 5, request=replace(GREEDY, sampling=Sampling(1.0))),
        outcome(1, 2, 3, 4, request=other),
        outcome(1, 2, request=replace(other, cancel_after=2), end=End.CANCELLED),
    )
    findings = await compared(engine, *outcomes)
    assert [(found.label, found.verdict) for found in findings] == [
        (label, Verdict.EQUAL) for label in ("a label", "again", "b", "b")
    ]
    assert [(asked["prompt"], asked["max_tokens"]) for asked in engine.asked] == [
        ("hello", 4),
        ("other", 4),
        ("other", 2),
    ]


@pytest.mark.parametrize(
    ("ours", "reference", "verdict", "words"),
    [
        (outcome(1, 2), outcome(1, 2), Verdict.EQUAL, "equal"),
        (outcome(1, 2), outcome(1, 2, end=End.STOP), Verdict.MISMATCH, "length; alone stop"),
        (outcome(1, 2, end=End.CANCELLED), outcome(1, 2), Verdict.EQUAL, "equal"),
        (outcome(1), replace(outcome(1), text="y"), Verdict.MISMATCH, "text 'x'; alone 'y'"),
        (
            replace(outcome(1), text="y"),
            outcome(2),
            Verdict.MISMATCH,
            "token 0 is 1; alone 2",
        ),
        (outcome(end=End.REFUSED, error="a"), outcome(end=End.REFUSED, error="a"), Verdict.EQUAL, "equal"),
        (
            outcome(end=End.REFUSED, error="a"),
            outcome(end=End.REFUSED, error="b"),
            Verdict.MISMATCH,
            "refused: a; alone refused: b",
        ),
        (outcome(1), outcome(end=End.FAILED, error="b"), Verdict.MISMATCH, "length; alone failed: b"),
        (outcome(end=End.REFUSED, error="a"), outcome(1), Verdict.MISMATCH, "refused: a; alone length"),
        (outcome(1), outcome(1, 2), Verdict.MISMATCH, "token 1 is none; alone 2"),
    ],
)
def test_answers_are_judged_by_tokens_then_text_then_end(
    ours: Outcome, reference: Outcome, verdict: Verdict, words: str
) -> None:
    found = judge(ours, reference, BOUND)
    assert found.verdict is verdict
    assert str(found).startswith("a label: ")
    assert str(found).endswith(words)


async def test_a_runner_up_is_measured_again_only_with_a_part_prefilled() -> None:
    engine = StandInEngine({2: 0.75, 1: 0.25})
    (found,) = await compared(engine, outcome(1, 2, 100, 4))
    assert found.verdict is Verdict.NEAR_TIE
    assert found.comparison.margin == 0.25
    assert [a["resume"] for a in engine.asked] == [(), (1, 2), (1,)]
    (found,) = await compared(StandInEngine({2: 0.75, 1: 0.6}), outcome(1, 2, 100, 4))
    assert (found.verdict, found.comparison.margin) == (Verdict.MISMATCH, 3.0)  # as with a decoded past


async def test_a_rerun_with_another_past_measures_nothing() -> None:
    engine = StandInEngine({0: 0.1, 1: 0.1})
    engine.other = {0, 1}
    (found,) = await compared(engine, outcome(1, 2, 7, 4))
    assert len(engine.asked) == 4
    assert (found.verdict, found.comparison.margin) == (
        Verdict.MISMATCH,
        3.0,
    )  # with all of the past prefilled
    ended = StandInEngine({0: 0.1})
    for tokens in ((1, 2), (1, 2, 3, 4, 5)):  # the end of an answer is no token
        (found,) = await compared(ended, outcome(*tokens))
        assert found.verdict is Verdict.MISMATCH
    assert len(ended.asked) == 2


@pytest.mark.parametrize("request_number", [0, 1])
async def test_engine_that_ends_ends_the_comparison(request_number: int) -> None:
    engine = StandInEngine()
    engine.gone_at = request_number
    with pytest.raises(EngineGone, match="a moment ago"):
        await compared(engine, outcome(1, 2, 7, 4))
    assert len(engine.asked) == request_number + 1
