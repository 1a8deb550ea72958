"""The report of a stress run as one plain mapping, for the JSON object and the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from launch.equality import Verdict
from launch.stress.chaos import ChaosRun
from launch.stress.load import End, Load, Outcome
from launch.stress.reference import Finding
from launch.terminal.format import count
from protocol.messages import Welcome

OF_ENGINE = ("engine", "model", "device", "policy", "emulation", "format", "backbone_dtype")
ERRORS = ("mismatches", "failures", "lost", "doubled", "leaks", "unhealed")  # each makes a run fail


@dataclass
class StressRun:
    """The state of a run; filled while it proceeds."""

    script: str
    welcome: Welcome
    bound: float  # nats
    load: Load
    findings: list[Finding] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    leaks_checked: bool = False
    chaos: ChaosRun | None = None
    finished: bool = False


def report(run: StressRun) -> dict[str, Any]:
    """Figures of the load alone; times are seconds; "details" has a text for each near-tie and error. Of the
    requests, "sampled" ones, "cancelled_early" ones (greedy, before a token) and those without an answer
    cannot be compared; completed, cancelled and refused ones are. Of the near-ties, "third_tokens" have a
    token that is not the second best, and "prefilled_ties" are such only where a part of the answer's past
    was prefilled."""
    outcomes, seconds = run.load.all, run.load.seconds
    ends = [outcome.end for outcome in outcomes]
    verdicts = [finding.verdict for finding in run.findings]
    ties = [finding for finding in run.findings if finding.verdict is Verdict.NEAR_TIE]
    gaps = [after - before for outcome in outcomes for before, after in pairwise(outcome.arrivals)]
    first = [outcome.arrivals[0] - outcome.sent for outcome in outcomes if outcome.arrivals]
    tokens = _tokens(outcomes)
    details = _details(run)
    return {
        "passed": run.finished and not any(details[error] for error in ERRORS),
        "finished": run.finished,
        "script": run.script,
        **{name: getattr(run.welcome, name) for name in OF_ENGINE},
        "clients": len(run.load.outcomes),
        "requests": len(outcomes),
        "completed": ends.count(End.STOP) + ends.count(End.LENGTH),
        "cancelled": ends.count(End.CANCELLED),
        "refused": ends.count(End.REFUSED),
        "sampled": sum(not outcome.request.deterministic for outcome in outcomes),
        "cancelled_early": sum(
            outcome.request.deterministic and outcome.end is End.CANCELLED and not outcome.tokens
            for outcome in outcomes
        ),
        "unsent": run.load.unsent,
        "compared": len(verdicts),
        "equal": verdicts.count(Verdict.EQUAL),
        "near_ties": verdicts.count(Verdict.NEAR_TIE),
        "near_tie_bound": run.bound,
        "third_tokens": sum(finding.third for finding in ties),
        "prefilled_ties": sum(finding.prefilled is not None for finding in ties),
        **{error: len(details[error]) for error in ERRORS},
        "leaks_checked": run.leaks_checked,
        "seconds": seconds,
        "tokens": tokens,
        "tok_s": tokens / seconds if seconds else None,
        "first_token_s": _quantiles(first),
        "token_gap_s": _quantiles(gaps),
        "fairness": _fairness(run.load),
        "kv_reused_tokens": _total(outcomes, "kv_reused_tokens"),
        "preemptions": _total(outcomes, "preemptions"),
        "chaos": run.chaos.report(outcomes) if run.chaos else None,
        "details": details,
    }


def _details(run: StressRun) -> dict[str, list[str]]:
    def ended(*ends: End) -> list[str]:
        outcomes = (outcome for outcome in run.load.all if outcome.end in ends)
        return [f"{outcome.request.label}: {outcome.error}" for outcome in outcomes]

    def judged(verdict: Verdict) -> list[str]:
        return [str(finding) for finding in run.findings if finding.verdict is verdict]

    doubled = [
        f"{outcome.request.label}: its tokens arrived with the indices "
        + ", ".join(str(token.index) for token in outcome.tokens)
        for outcome in run.load.all
        if not outcome.in_order
    ]
    strays = [
        f"client {number}: {count(messages, 'message')} for requests that had ended"
        for number, messages in run.load.strays.items()
        if messages
    ]
    return {
        "mismatches": judged(Verdict.MISMATCH),
        "failures": ended(End.FAILED, End.GONE),
        "lost": ended(End.LOST),
        "doubled": doubled + strays,
        "leaks": run.leaks,
        "unhealed": run.chaos.unrecovered if run.chaos else [],
        "near_ties": judged(Verdict.NEAR_TIE),
    }


def _fairness(load: Load) -> dict[str, Any]:
    """Each client's figures. `tok_s` counts its completed answers, from sending to end; Jain's index of these
    rates is 1 where all are equal, and 1/n where one client of n got all tokens."""
    clients = []
    for number, outcomes in enumerate(load.outcomes):
        completed = [outcome for outcome in outcomes if outcome.end in (End.STOP, End.LENGTH)]
        busy = sum(outcome.ended - outcome.sent for outcome in completed)
        first = [outcome.arrivals[0] - outcome.sent for outcome in outcomes if outcome.arrivals]
        clients.append(
            {
                "client": number,
                "requests": len(outcomes),
                "tokens": _tokens(outcomes),
                "tok_s": _tokens(completed) / busy if busy else None,
                "first_token_s": float(np.mean(first)) if first else None,
            }
        )
    rates = np.array([client["tok_s"] for client in clients if client["tok_s"] is not None], np.float64)
    squares = len(rates) * float(np.square(rates).sum())
    return {"clients": clients, "jain": float(rates.sum()) ** 2 / squares if squares else None}


def _tokens(outcomes: Sequence[Outcome]) -> int:
    return sum(len(outcome.tokens) for outcome in outcomes)


def _quantiles(values: Sequence[float]) -> dict[str, float | None]:
    names = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {name: float(np.quantile(values, q)) if values else None for name, q in names.items()}


def _total(outcomes: Sequence[Outcome], key: str) -> int:
    return sum(outcome.stats.get(key, 0) for outcome in outcomes)
