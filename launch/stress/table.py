"""A stress run's report for a person: on stdout, plain where that is no terminal."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from launch.stress.chaos_table import chaos_parts
from launch.stress.report import FAULTS

MOST_CLIENTS = 16  # rows of clients; of more, the slowest, the middle and the quickest are shown
MOST_DETAILS = 20  # lines of a kind
COUNTS = {
    "requests": ("completed", "cancelled", "refused", "sampled", "unsent"),
    "alone": ("compared", "equal", "near_ties"),
    "faults": FAULTS,
}


def show_report(found: dict[str, Any]) -> None:
    Console(highlight=False).print(Group(*_parts(found)))


def _parts(found: dict[str, Any]) -> list[RenderableType]:
    engine = f"{found['policy']} on {found['device']}, experts {found['format']}, "
    engine += f"the rest {found['backbone_dtype']}"
    if found["emulation"]:
        engine += f"; emulation: {found['emulation']}"
    rate = "" if found["tok_s"] is None else f", {found['tok_s']:.0f} tok/s"
    parts: list[RenderableType] = [
        Text(
            f"{found['requests']} requests of {found['clients']} clients in {found['seconds']:.1f} s, "
            f"{found['tokens']} tokens{rate}",
            style="bold",
        ),
        Text(engine),
        _counts(found),
        _times(found),
        _clients(found["fairness"]),
    ]
    if found["kv_reused_tokens"] or found["preemptions"]:
        parts.append(
            Text(
                f"{found['kv_reused_tokens']} prompt tokens were reused from the KV cache; "
                f"{found['preemptions']} preemptions"
            )
        )
    if found["chaos"] is not None:
        parts += chaos_parts(found["chaos"])
    for kind in ("near_ties", *FAULTS):
        parts += _details(found, kind)
    if not found["leaks_checked"]:
        parts.append(Text("leaks were not looked for: the run did not end, or other clients are connected"))
    return [*parts, _verdict(found)]


def _verdict(found: dict[str, Any]) -> Text:
    if found["passed"]:
        ties = f", {found['near_ties']} of them up to a near-tie" if found["near_ties"] else ""
        return Text(f"passed: {found['compared']} answers are what they are alone{ties}", style="bold green")
    faults = [f"{found[fault]} {fault}" for fault in FAULTS if found[fault]]
    if not found["finished"]:
        faults.insert(0, "the run did not end")
    return Text("FAILED: " + ", ".join(faults), style="bold red")


def _counts(found: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for title, keys in COUNTS.items():
        cells = []
        for key in keys:
            bad = key in FAULTS and found[key]
            cells.append(Text(f"{found[key]} {key.replace('_', '-')}", style="bold red" if bad else ""))
        table.add_row(Text(title, style="dim"), *cells)
    return table


def _times(found: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1))
    table.add_column("milliseconds")
    for name in found["first_token_s"]:
        table.add_column(name, justify="right")
    for title, key in (("to the first token", "first_token_s"), ("between tokens", "token_gap_s")):
        table.add_row(title, *(_number(value, 1000) for value in found[key].values()))
    return table


def _clients(fairness: dict[str, Any]) -> Table:
    clients = fairness["clients"]
    caption = None
    if len(clients) > MOST_CLIENTS:
        caption = f"the slowest, the middle and the quickest of {len(clients)}"
        ranked = sorted((c for c in clients if c["tok_s"] is not None), key=lambda c: c["tok_s"])
        clients = [ranked[0], ranked[len(ranked) // 2], ranked[-1]] if ranked else []
    table = Table(box=SIMPLE, padding=(0, 1), caption=caption, caption_justify="left")
    for title in ("client", "requests", "tokens", "tok/s", "first token, ms"):
        table.add_column(title, justify="right")
    for client in clients:
        table.add_row(
            *(str(client[key]) for key in ("client", "requests", "tokens")),
            _number(client["tok_s"]),
            _number(client["first_token_s"], 1000),
        )
    table.columns[3].footer = f"Jain {_number(fairness['jain'], digits=3)}"
    table.show_footer = True
    return table


def _details(found: dict[str, Any], kind: str) -> list[RenderableType]:
    lines = found["details"][kind]
    if not lines:
        return []
    title = kind.replace("_", "-")
    if kind == "near_ties":
        title += f" (first differences at margins below {found['near_tie_bound']:g})"
    shown = lines[:MOST_DETAILS]
    if len(lines) > MOST_DETAILS:
        shown.append(f"and {len(lines) - MOST_DETAILS} more (all with --json)")
    body = Text("\n".join(shown), style="dim" if kind == "near_ties" else "")
    return [Text(title, style="dim" if kind == "near_ties" else "bold red"), Padding(body, (0, 0, 0, 2))]


def _number(value: float | None, factor: float = 1.0, digits: int = 1) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"
