"""Compares each deterministic answer of a load with the same request run alone, by `equality.py`'s rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from launch.equality import Comparison, Verdict, compare
from launch.stress.requests import End, Outcome, Request, ask
from protocol.client import Client
from protocol.errors import EngineGone

MEASUREMENTS = 3  # further runs of one request alone, each of which measures one token


@dataclass(frozen=True)
class Finding:
    """The comparison of a request's answer with that of the same request alone."""

    label: str
    comparison: Comparison
    why: str = ""  # a difference other than in the tokens
    third: bool = False  # the answer's token is not the second best of the request alone

    @property
    def verdict(self) -> Verdict:
        return self.comparison.verdict

    def __str__(self) -> str:
        found = self.comparison
        if found.at is None:
            return f"{self.label}: {self.why or found.verdict}"
        tie = "" if found.margin is None else f", {found.margin:.3g} nats less likely"
        tie += " (not the second best)" * self.third
        return f"{self.label}: token {found.at} is {_token(found.ours)}{tie}; alone {_token(found.expected)}"


def alone(outcome: Outcome) -> Request | None:
    """The request to run alone for a comparison: without a conversation's KV, and in place of a Cancel with a
    limit of as many tokens as had arrived. None for an outcome that cannot be compared."""
    request = replace(outcome.request, label="", cancel_after=None, conversation=None)
    cut = outcome.end is End.CANCELLED
    if not request.deterministic or (cut and not outcome.tokens):
        return None
    if not outcome.served and outcome.end is not End.REFUSED:
        return None
    return replace(request, max_tokens=len(outcome.tokens)) if cut else request


async def compare_all(
    client: Client, outcomes: Iterable[Outcome], bound: float, compared: Callable[[Finding], None]
) -> None:
    """Run each different request once, in turn; call `compared` for every outcome. Raises EngineGone."""
    groups: dict[Request, list[Outcome]] = {}
    for outcome in outcomes:
        request = alone(outcome)
        if request is not None:
            groups.setdefault(request, []).append(outcome)
    for request, group in groups.items():
        reference = await ask(client, request)
        if reference.end is End.GONE:
            raise EngineGone(reference.error)
        for outcome in group:
            compared(await _judge_any_rank(client, request, outcome, reference, bound))


async def _judge_any_rank(
    client: Client, request: Request, outcome: Outcome, reference: Outcome, bound: float
) -> Finding:
    """`judge`; where the answer's token is neither the best nor the second best of the reference, the request
    runs alone again and measures that token. That run may differ from the first, at a near-tie of its own."""
    finding = judge(outcome, reference, bound)
    for _ in range(MEASUREMENTS):
        token = finding.comparison.ours
        if token is None or not finding.comparison.unmeasured:
            break
        again = await ask(client, replace(request, rival=token))
        if again.end is End.GONE:
            raise EngineGone(again.error)
        finding = replace(judge(outcome, again, bound), third=True)
    return finding


def judge(outcome: Outcome, reference: Outcome, bound: float) -> Finding:
    """`reference`: the outcome of the same request alone."""
    label, cut = outcome.request.label, outcome.end is End.CANCELLED
    if not (outcome.served and reference.served):
        if (outcome.end, outcome.error) == (reference.end, reference.error):
            return Finding(label, Comparison(Verdict.EQUAL))
        why = f"{_ended(outcome)}; alone {_ended(reference)}"
        return Finding(label, Comparison(Verdict.MISMATCH), why)
    found = compare([step.token for step in outcome.steps], reference.steps, bound)
    if found.verdict is Verdict.EQUAL and outcome.text != reference.text:
        why = f"equal tokens, but the text {outcome.text!r:.60}; alone {reference.text!r:.60}"
        return Finding(label, Comparison(Verdict.MISMATCH), why)
    if found.verdict is Verdict.EQUAL and not cut and outcome.end is not reference.end:
        why = f"equal tokens, but {_ended(outcome)}; alone {_ended(reference)}"
        return Finding(label, Comparison(Verdict.MISMATCH), why)
    return Finding(label, found)


def _ended(outcome: Outcome) -> str:
    return f"{outcome.end}: {outcome.error}" if outcome.error else str(outcome.end)


def _token(token: int | None) -> str:
    return "none" if token is None else str(token)
