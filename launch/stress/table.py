"""The report of a stress run as text."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from launch.stress.chaos import DOWN_SECONDS
from launch.stress.report import ERRORS
from launch.terminal.format import MISSING, count
from launch.terminal.tables import Column, Table, dim, each, grid
from shm.segment import byte_size

MOST_CLIENTS = 16  # rows; of more clients the slowest, the middle and the fastest are shown
MOST_DETAILS = 20  # lines of a kind
COUNTS = {
    "requests": ("completed", "cancelled", "refused", "unsent"),
    "alone": ("compared", "equal", "near_ties"),
    "errors": ERRORS,
}
NAMES = {  # of counts with other names than their keys: singular, plural
    "near_ties": ("near-tie", "near-ties"),
    "mismatches": ("mismatch", "mismatches"),
    "failures": ("failure", "failures"),
    "lost": ("lost answer", "lost answers"),
    "doubled": ("duplicate", "duplicates"),
    "leaks": ("leak", "leaks"),
    "unhealed": ("not recovered", "not recovered"),
}
MILLISECONDS = each(lambda seconds: f"{1e3 * seconds:.1f}")
CLIENTS = [
    *(Column[dict[str, Any]](key, itemgetter(key)) for key in ("client", "requests", "tokens")),
    Column[dict[str, Any]]("tok/s", itemgetter("tok_s"), each("{:.1f}".format)),
    Column[dict[str, Any]]("first token, ms", itemgetter("first_token_s"), MILLISECONDS),
]


def report_parts(report: dict[str, Any]) -> Iterator[RenderableType]:
    """The report of a run in lines and tables."""
    every, rate = report["requests"] + report["unsent"], report["tok_s"]
    sent = f"{report['requests']} of {every} requests" if report["unsent"] else count(every, "request")
    yield Text(
        f"{sent} by {count(report['clients'], 'client')} in {report['seconds']:.1f} s,"
        f" {count(report['tokens'], 'token')}" + ("" if rate is None else f", {rate:.0f} tok/s"),
        style="bold",
    )
    yield (
        f"{report['policy']} on {report['device']}, experts {report['format']}, backbone"
        f" {report['backbone_dtype']}"
        + (f"; emulation: {report['emulation']}" if report["emulation"] else "")
    )
    yield from ("", grid((Text(title, "dim"), _counts(report, title)) for title in COUNTS), "")
    yield from (_times(report), "", *_clients(report["fairness"]), "")
    if report["kv_reused_tokens"] or report["preemptions"]:
        reused = count(report["kv_reused_tokens"], "prompt token")
        yield f"KV reused for {reused}; {count(report['preemptions'], 'preemption')}"
    if report["chaos"] is not None:
        yield from chaos_parts(report["chaos"])
    for kind in ("near_ties", *ERRORS):
        yield from _details(report, kind)
    if report["refused"]:
        why = "the script's invalid requests, such as one beyond the context; alone they are refused too"
        yield from dim([f"refused: {why}"])
    if not report["leaks_checked"]:
        yield "leaks not checked: the run was interrupted, or other clients are connected"
    yield _verdict(report)


def _count(report: dict[str, Any], key: str) -> str:
    singular, plural = NAMES.get(key, (key, key))
    return f"{report[key]} {singular if report[key] == 1 else plural}"


def _verdict(report: dict[str, Any]) -> Text:
    if report["passed"]:
        ties = f" ({_count(report, 'near_ties')})" if report["near_ties"] else ""
        text = f"passed: {count(report['compared'], 'answer')} compared with the same request run alone{ties}"
        return Text(text, style="bold green")
    errors = [_count(report, error) for error in ERRORS if report[error]]
    if not report["finished"]:
        errors.insert(0, "the run was interrupted")
    return Text("FAILED: " + ", ".join(errors), style="bold red")


def _counts(report: dict[str, Any], title: str) -> Text:
    counts = [
        Text(_count(report, key), "bold red" if key in ERRORS and report[key] else "")
        for key in COUNTS[title]
    ]
    return Text(", ").join(counts).append(_not_compared(report) if title == "alone" else "")


def _not_compared(report: dict[str, Any]) -> str:
    """The rest of the requests: with the compared ones they are all that were sent."""
    kinds = {"sampled": report["sampled"], "cancelled before a token": report["cancelled_early"]}
    others = report["requests"] - report["compared"] - sum(kinds.values())
    kinds["without an answer" if report["finished"] else "without an answer or not run alone yet"] = others
    words = ", ".join(f"{number} {kind}" for kind, number in kinds.items() if number > 0)
    return f"; not compared: {words}" if words else ""


def _times(report: dict[str, Any]) -> RenderableType:
    names = {"to the first token": "first_token_s", "between tokens": "token_gap_s"}
    rows = [{"milliseconds": name} | report[key] for name, key in names.items()]
    first, *quantiles = rows[0]
    columns = [Column[dict[str, Any]](name, itemgetter(name), MILLISECONDS) for name in quantiles]
    return Table([Column(first, itemgetter(first), text=True), *columns], rows)


def _clients(fairness: dict[str, Any]) -> Iterator[RenderableType]:
    clients, jain = fairness["clients"], fairness["jain"]
    index = f"Jain's fairness index of these: {MISSING if jain is None else f'{jain:.3f}'}"
    if len(clients) > MOST_CLIENTS:
        index += f"; the slowest, the middle and the fastest of {len(clients)} are shown"
        ranked = sorted((c for c in clients if c["tok_s"] is not None), key=lambda c: c["tok_s"])
        clients = [ranked[0], ranked[len(ranked) // 2], ranked[-1]] if ranked else []
    yield Table(CLIENTS, clients)
    yield "tok/s: of a client's completed answers, by their seconds from sending to end, queueing included"
    yield index


def _details(report: dict[str, Any], kind: str) -> Iterator[RenderableType]:
    lines, tie = report["details"][kind], kind == "near_ties"
    if lines:
        bound = f"less than {report['near_tie_bound']:g} nats below the best token; no errors"
        title = _count(report, kind) + (f": first differences where rounding decides, {bound}" if tie else "")
        yield Text(title, style="dim" if tie else "bold red")
        more = len(lines) - MOST_DETAILS
        shown = [*lines[:MOST_DETAILS], *[f"and {more} more (all with --json)"] * (more > 0)]
        yield Padding(Text("\n".join(shown), style="dim" if tie else ""), (0, 0, 0, 2))


def chaos_parts(chaos: dict[str, Any]) -> Iterator[RenderableType]:
    """What was injected, and how the engine recovered."""
    kinds = "; ".join(
        f"{kind} {sum(roles.values())} ({', '.join(f'{role} {n}' for role, n in roles.items())})"
        for kind, roles in chaos["faults"].items()
    )
    head = (
        f"injected faults, seed {chaos['seed']}: {kinds or 'none'}; {chaos['during_decode']} during requests"
    )
    yield Text(head, style="bold")
    hostile = chaos["hostile_messages"]
    if hostile["sent"]:
        sent, answers = sum(hostile["sent"].values()), count(hostile["answered"], "answer")
        yield f"hostile messages: {sent} sent, {answers}; the others were refused, as intended"
    kills, together = chaos["kills_measured"], chaos["kills_with_all_workers_down"]
    if chaos["kill_to_next_token_s"]["median"] is not None:
        one, every = (
            f"median {_milliseconds(times['median'])}, maximum {_milliseconds(times['max'])}"
            for times in (chaos["kill_to_next_token_s"], chaos["kill_to_every_next_token_s"])
        )
        yield (
            f"from a kill ({kills} during answers) to the next token of any answer: {one};"
            f" of every answer: {every}"
        )
    if together:
        yield (
            f"in {together} of these {kills} every worker had been killed or stopped within"
            f" {DOWN_SECONDS:g} s before the kill or until the token: answers then wait for the first worker"
            " to be up again"
        )
    for role, times in (chaos["recovery"] or {}).items():
        if deaths := chaos["respawns"][role]:
            ready, whole = _milliseconds(times["ready_s"]), _milliseconds(times["whole_s"])
            yield f"{role} restarted {count(deaths, 'time')}: ready after {ready}, up after {whole} (medians)"
    before, after = chaos["engine_before"], chaos["engine_after"]
    used = [
        f"{role} {' to '.join(byte_size(at[role]['private_bytes']) for at in (before, after))},"
        f" {before[role]['descriptors']} to {after[role]['descriptors']} descriptors"
        for role in before
        if role in after
    ]
    if used:
        yield f"private memory, before to after: {'; '.join(used)}"


def _milliseconds(value: float | None) -> str:
    return MISSING if value is None else f"{value * 1000:.0f} ms"
