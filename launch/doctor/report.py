"""The doctor's findings for a person: grouped by topic, no wider than the terminal, colours only there."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from launch.doctor.finding import Finding

COLOURS = {"ok": "green", "note": "yellow", "problem": "bold red"}
PLAIN_WIDTH = 80
WIDEST = 110  # longer lines are hard to read


def rendered(findings: Sequence[Finding], verdict: str) -> str:
    """The whole report, for stdout as it is now."""
    terminal = sys.stdout.isatty()
    out = io.StringIO()
    width = min(Console().width, WIDEST) if terminal else PLAIN_WIDTH
    console = Console(
        file=out, width=width, force_terminal=terminal, highlight=False, markup=False, emoji=False
    )
    for topic, group in groupby(findings, key=lambda finding: finding.topic):
        console.print(Text(topic, style="bold"))
        table = Table.grid(padding=(0, 1), expand=False)
        table.add_column(width=max(map(len, COLOURS)), no_wrap=True)
        table.add_column(overflow="fold")
        for finding in group:
            table.add_row(Text(finding.level, style=COLOURS[finding.level]), _words(finding))
        console.print(Padding(table, (0, 0, 1, 2)))
    console.print(Text(verdict, style="bold"))
    lines = out.getvalue().split("\n")
    return "\n".join(line.rstrip() for line in lines)  # cells are filled up with spaces


def _words(finding: Finding) -> Text:
    text = Text(finding.found)
    if finding.means:
        text.append(f"\n{finding.means}", style="dim")
    for line in finding.do.splitlines():
        text.append("\n> ", style="cyan")
        text.append(line)
    return text
