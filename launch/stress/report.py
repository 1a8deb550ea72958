"""The report of a stress run: one plain mapping, which is its JSON object, and the same as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from launch.equality import Verdict
from launch.stress.chaos import Injector
from launch.stress.load import End, Finding, Load, Outcome
from launch.terminal.format import count
from launch.terminal.tables import Column, Grid, Table, each
from protocol.messages import Welcome

OF_ENGINE = ("engine", "model", "device", "policy", "emulation", "format", "backbone_dtype")
ERRORS = ("mismatches", "failures", "lost", "doubled", "leaks", "unhealed")  # each makes a run fail
MOST_DETAILS = 20  # lines of a kind
COUNTS = {
    "requests": ("completed", "cancelled", "refused", "unsent"),
    "alone": ("compared", "equal", "near_ties"),
    "errors": ERRORS,
}
MILLISECONDS = each(lambda seconds: f"{1e3 * seconds:.1f}")


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
    chaos: Injector | None = None
    finished: bool = False


def report(run: StressRun) -> dict[str, Any]:
    """Figures of the load alone; times are seconds; "details" has a text for each near-tie and error."""
    outcomes, seconds = run.load.all, run.load.seconds
    ends = [outcome.end for outcome in outcomes]
    verdicts = [finding.verdict for finding in run.findings]
    gaps = [after - before for outcome in outcomes for before, after in pairwise(outcome.arrivals)]
    first = [outcome.arrivals[0] - outcome.sent for outcome in outcomes if outcome.arrivals]
    tokens = sum(len(outcome.tokens) for outcome in outcomes)
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
        "unsent": run.load.unsent,
        "compared": len(verdicts),
        "equal": verdicts.count(Verdict.EQUAL),
        "near_ties": verdicts.count(Verdict.NEAR_TIE),
        "near_tie_bound": run.bound,
        **{error: len(details[error]) for error in ERRORS},
        "leaks_checked": run.leaks_checked,
        "seconds": seconds,
        "tokens": tokens,
        "tok_s": tokens / seconds if seconds else None,
        "first_token_s": _quantiles(first),
        "token_gap_s": _quantiles(gaps),
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


def _quantiles(values: Sequence[float]) -> dict[str, float | None]:
    names = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {name: float(np.quantile(values, q)) if values else None for name, q in names.items()}


def _total(outcomes: Sequence[Outcome], key: str) -> int:
    return sum(outcome.stats.get(key, 0) for outcome in outcomes)


# --- as text ------------------------------------------------------------------------------------------------


def report_parts(report: dict[str, Any]) -> Iterator[RenderableType]:
    """The report of a run in lines and tables."""
    rate = "" if report["tok_s"] is None else f", {report['tok_s']:.0f} tok/s"
    yield Text(
        f"{count(report['requests'], 'request')} by {count(report['clients'], 'client')} in"
        f" {report['seconds']:.1f} s, {count(report['tokens'], 'token')}{rate}",
        style="bold",
    )
    yield (
        f"{report['policy']} on {report['device']}, experts {report['format']}, backbone"
        f" {report['backbone_dtype']}"
        + (f"; emulation: {report['emulation']}" if report["emulation"] else "")
    )
    yield from ("", Grid([(Text(title, "dim"), _counts(report, title)) for title in COUNTS]), "")
    yield from (_times(report), "")
    if report["chaos"] is not None:
        yield from chaos_parts(report["chaos"])
    for kind in ("near_ties", *ERRORS):
        yield from _listed(report, kind)
    if not report["leaks_checked"]:
        yield "leaks not checked: the run was interrupted, or other clients are connected"
    yield _verdict(report)


def _name(key: str) -> str:
    return key.replace("_", " ")


def _verdict(report: dict[str, Any]) -> Text:
    if report["passed"]:
        text = f"passed: {count(report['compared'], 'answer')} compared with the same request run alone"
        return Text(text, style="bold green")
    errors = [f"{_name(error)} {report[error]}" for error in ERRORS if report[error]]
    if not report["finished"]:
        errors.insert(0, "the run was interrupted")
    return Text("FAILED: " + ", ".join(errors), style="bold red")


def _counts(report: dict[str, Any], title: str) -> Text:
    counts = [
        Text(f"{_name(key)} {report[key]}", "bold red" if key in ERRORS and report[key] else "")
        for key in COUNTS[title]
    ]
    return Text(", ").join(counts)


def _times(report: dict[str, Any]) -> RenderableType:
    names = {"to the first token": "first_token_s", "between tokens": "token_gap_s"}
    rows = [{"milliseconds": name} | report[key] for name, key in names.items()]
    first, *quantiles = rows[0]
    columns = [Column[dict[str, Any]](name, itemgetter(name), MILLISECONDS) for name in quantiles]
    return Table([Column(first, itemgetter(first), text=True), *columns], rows)


def _listed(report: dict[str, Any], kind: str) -> Iterator[RenderableType]:
    lines, tie = report["details"][kind], kind == "near_ties"
    if lines:
        bound = f"less than {report['near_tie_bound']:g} nats below the best token; no errors"
        title = f": first differences where rounding decides, {bound}" if tie else ""
        yield Text(_name(kind) + title, style="dim" if tie else "bold red")
        more = len(lines) - MOST_DETAILS
        shown = [*lines[:MOST_DETAILS], *[f"and {more} more (all with --json)"] * (more > 0)]
        yield Padding(Text("\n".join(shown), style="dim" if tie else ""), (0, 0, 0, 2))


def chaos_parts(chaos: dict[str, Any]) -> Iterator[RenderableType]:
    """Tell what was injected, and how the engine recovered."""
    kinds = "; ".join(
        f"{kind} {sum(roles.values())} ({', '.join(f'{role} {n}' for role, n in roles.items())})"
        for kind, roles in chaos["faults"].items()
    )
    head = f"injected faults, seed {chaos['seed']}: {kinds or 'none'}"
    yield Text(f"{head}; {chaos['during_decode']} during requests", style="bold")
    if missed := chaos["missed"]:
        yield f"{count(missed, 'more fault')} met no process: none was up, or none in its start"
    if sent := sum(chaos["hostile_messages"]["sent"].values()):
        yield f"hostile messages: {sent} sent"
    waits = chaos["kill_to_every_next_token_s"]
    if kills := chaos["kills_measured"]:
        yield (
            f"from a kill ({kills} during answers) to the next token of every answer: median"
            f" {1e3 * waits['median']:.0f} ms, maximum {1e3 * waits['max']:.0f} ms"
        )
    for role, deaths in chaos["respawns"].items():
        if deaths:
            yield f"{role} restarted {count(deaths, 'time')}, as the last coordinator counted"
