"""The report of a stress run as text."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from launch.stress.chaos_table import chaos_parts
from launch.stress.report import ERRORS
from launch.terminal.format import MISSING, count
from launch.terminal.output import show
from launch.terminal.tables import make_grid, make_table, render

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


def show_report(found: dict[str, Any]) -> None:
    show(render(*_parts(found)), rendered=True)


def _count(found: dict[str, Any], key: str) -> str:
    singular, plural = NAMES.get(key, (key, key))
    return f"{found[key]} {singular if found[key] == 1 else plural}"


def _parts(found: dict[str, Any]) -> list[RenderableType]:
    engine = f"{found['policy']} on {found['device']}, experts {found['format']}, "
    engine += f"backbone {found['backbone_dtype']}"
    if found["emulation"]:
        engine += f"; emulation: {found['emulation']}"
    rate = "" if found["tok_s"] is None else f", {found['tok_s']:.0f} tok/s"
    parts: list[RenderableType] = [
        Text(
            f"{_sent(found)} by {count(found['clients'], 'client')}"
            f" in {found['seconds']:.1f} s, {count(found['tokens'], 'token')}{rate}",
            style="bold",
        ),
        Text(engine),
        *("", _counts(found)),
        *("", _times(found)),
        *("", *_clients(found["fairness"]), ""),
    ]
    if found["kv_reused_tokens"] or found["preemptions"]:
        parts.append(
            Text(
                f"KV reused for {count(found['kv_reused_tokens'], 'prompt token')};"
                f" {count(found['preemptions'], 'preemption')}"
            )
        )
    if found["chaos"] is not None:
        parts += chaos_parts(found["chaos"])
    for kind in ("near_ties", *ERRORS):
        parts += _details(found, kind)
    if found["refused"]:
        why = "the script's invalid requests, such as one beyond the context; alone they are refused too"
        parts.append(Text(f"refused: {why}", style="dim"))
    if not found["leaks_checked"]:
        parts.append(Text("leaks not checked: the run was interrupted, or other clients are connected"))
    return [*parts, _verdict(found)]


def _sent(found: dict[str, Any]) -> str:
    every = found["requests"] + found["unsent"]
    return f"{found['requests']} of {every} requests" if found["unsent"] else count(every, "request")


def _verdict(found: dict[str, Any]) -> Text:
    if found["passed"]:
        ties = f" ({_count(found, 'near_ties')})" if found["near_ties"] else ""
        text = f"passed: {count(found['compared'], 'answer')} compared with the same request run alone{ties}"
        return Text(text, style="bold green")
    errors = [_count(found, error) for error in ERRORS if found[error]]
    if not found["finished"]:
        errors.insert(0, "the run was interrupted")
    return Text("FAILED: " + ", ".join(errors), style="bold red")


def _counts(found: dict[str, Any]) -> Table:
    table = make_grid(2)
    for title, keys in COUNTS.items():
        counts = [
            Text(_count(found, key), "bold red" if key in ERRORS and found[key] else "") for key in keys
        ]
        line = Text(", ").join(counts)
        if title == "alone":
            line.append(_not_compared(found))
        table.add_row(Text(title, style="dim"), line)
    return table


def _not_compared(found: dict[str, Any]) -> str:
    """The rest of the requests: with the compared ones they are all that were sent."""
    kinds = {"sampled": found["sampled"], "cancelled before a token": found["cancelled_early"]}
    others = found["requests"] - found["compared"] - sum(kinds.values())
    kinds["without an answer" if found["finished"] else "without an answer or not run alone yet"] = others
    words = ", ".join(f"{number} {kind}" for kind, number in kinds.items() if number > 0)
    return f"; not compared: {words}" if words else ""


def _times(found: dict[str, Any]) -> Table:
    table = make_table("milliseconds", numbers=found["first_token_s"])
    for title, key in (("to the first token", "first_token_s"), ("between tokens", "token_gap_s")):
        table.add_row(title, *(_number(value, 1000) for value in found[key].values()))
    return table


def _clients(fairness: dict[str, Any]) -> list[RenderableType]:
    clients = fairness["clients"]
    caption = (
        "tok/s: of a client's completed answers, by their seconds from sending to end, queueing included"
    )
    caption += f"\nJain's fairness index of these: {_number(fairness['jain'], digits=3)}"
    if len(clients) > MOST_CLIENTS:
        caption += f"; the slowest, the middle and the fastest of {len(clients)} are shown"
        ranked = sorted((c for c in clients if c["tok_s"] is not None), key=lambda c: c["tok_s"])
        clients = [ranked[0], ranked[len(ranked) // 2], ranked[-1]] if ranked else []
    table = make_table(numbers=("client", "requests", "tokens", "tok/s", "first token, ms"))
    for client in clients:
        table.add_row(
            *(str(client[key]) for key in ("client", "requests", "tokens")),
            _number(client["tok_s"]),
            _number(client["first_token_s"], 1000),
        )
    return [table, Text(caption)]


def _details(found: dict[str, Any], kind: str) -> list[RenderableType]:
    lines = found["details"][kind]
    if not lines:
        return []
    title = _count(found, kind)
    if kind == "near_ties":
        title += (
            f": first differences where rounding decides, less than {found['near_tie_bound']:g} nats below"
        )
        title += " the best token; no errors"
    shown = lines[:MOST_DETAILS]
    if len(lines) > MOST_DETAILS:
        shown.append(f"and {len(lines) - MOST_DETAILS} more (all with --json)")
    body = Text("\n".join(shown), style="dim" if kind == "near_ties" else "")
    return [Text(title, style="dim" if kind == "near_ties" else "bold red"), Padding(body, (0, 0, 0, 2))]


def _number(value: float | None, factor: float = 1.0, digits: int = 1) -> str:
    return MISSING if value is None else f"{value * factor:.{digits}f}"
