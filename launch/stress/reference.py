"""Compares each deterministic answer of a load with the same request run alone, by `equality.py`'s rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from launch.equality import Comparison, Verdict, compare
from launch.stress.load import End, Outcome, Request, ask
from protocol.client import Client
from protocol.errors import EngineGone

DIVISIONS = 16  # of one answer's past into prefill and decode, at most, to measure a token


@dataclass(frozen=True)
class Finding:
    """The comparison of a request's answer with that of the same request alone."""

    label: str
    comparison: Comparison
    why: str = ""  # a difference other than in the tokens

    @property
    def verdict(self) -> Verdict:
        return self.comparison.verdict

    def __str__(self) -> str:
        difference = self.comparison
        if difference.at is None:
            return f"{self.label}: {self.why or difference.verdict}"
        tie = "" if difference.margin is None else f", {difference.margin:.3g} nats less likely"
        ours, expected = _token(difference.ours), _token(difference.expected)
        return f"{self.label}: token {difference.at} is {ours}{tie}; alone {expected}"


def alone(outcome: Outcome) -> Request | None:
    """The request to run alone for a comparison: without KV of other ones, and in place of a Cancel with a
    limit of as many tokens as had arrived. None for an outcome that cannot be compared."""
    request = replace(outcome.request, label="", cancel_after=None, reuse=False)
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
            finding = judge(outcome, reference, bound)
            compared(await _measured(client, request, outcome, finding, bound))


async def _measured(
    client: Client, request: Request, outcome: Outcome, finding: Finding, bound: float
) -> Finding:
    """A mismatch of two tokens, judged by the reference's log-probabilities of the answer's token: with the
    past decoded, as in the reference, and where that is beyond the bound, with a part of it prefilled. Each
    is one more run of the request alone, up to that token. A run that differs before it measures nothing."""
    difference = finding.comparison
    at, ours = difference.at, difference.ours
    if finding.verdict is not Verdict.MISMATCH or at is None or ours is None or difference.expected is None:
        return finding
    past = tuple(step.token for step in outcome.steps[:at])
    divisions = range(at, 0, -max(1, -(-at // DIVISIONS)))
    for prefilled in (0, *divisions) if difference.margin is None else divisions:
        resume = past[:prefilled]
        run = await ask(client, replace(request, max_tokens=at + 1, resume=resume, rival=ours))
        if run.end is End.GONE:
            raise EngineGone(run.error)
        steps = run.steps
        if tuple(step.token for step in steps[:-1]) != past[prefilled:]:
            continue
        margin = steps[-1].margin
        if difference.margin is None or margin < bound:
            difference = replace(difference, margin=margin)
        if margin < bound:
            return replace(finding, comparison=replace(difference, verdict=Verdict.NEAR_TIE))
    return replace(finding, comparison=difference)


def judge(outcome: Outcome, reference: Outcome, bound: float) -> Finding:
    """`reference`: the outcome of the same request alone."""
    label, cut = outcome.request.label, outcome.end is End.CANCELLED
    if not (outcome.served and reference.served):
        if (outcome.end, outcome.error) == (reference.end, reference.error):
            return Finding(label, Comparison(Verdict.EQUAL))
        why = f"{_ended(outcome)}; alone {_ended(reference)}"
        return Finding(label, Comparison(Verdict.MISMATCH), why)
    difference = compare([step.token for step in outcome.steps], reference.steps, bound)
    if difference.verdict is Verdict.EQUAL and outcome.text != reference.text:
        why = f"equal tokens, but the text {outcome.text!r:.60}; alone {reference.text!r:.60}"
        return Finding(label, Comparison(Verdict.MISMATCH), why)
    if difference.verdict is Verdict.EQUAL and not cut and outcome.end is not reference.end:
        why = f"equal tokens, but {_ended(outcome)}; alone {_ended(reference)}"
        return Finding(label, Comparison(Verdict.MISMATCH), why)
    return Finding(label, difference)


def _ended(outcome: Outcome) -> str:
    return f"{outcome.end}: {outcome.error}" if outcome.error else str(outcome.end)


def _token(token: int | None) -> str:
    return "none" if token is None else str(token)
