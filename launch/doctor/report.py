"""The doctor's findings as text, grouped by topic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from launch.doctor.finding import Finding
from launch.terminal import tables

COLOURS = {"ok": "green", "note": "yellow", "problem": "bold red"}


def render(findings: Sequence[Finding], verdict: str) -> str:
    parts: list[RenderableType] = []
    for topic, group in groupby(findings, key=lambda finding: finding.topic):
        table = tables.make_grid(2, gap=1)
        table.columns[0].width = max(map(len, COLOURS))
        for finding in group:
            table.add_row(Text(finding.level, style=COLOURS[finding.level]), _description(finding))
        parts += [Text(topic, style="bold"), Padding(table, (0, 0, 1, 2))]
    return tables.render(*parts, Text(verdict, style="bold"))


def _description(finding: Finding) -> Text:
    text = Text(finding.found)
    if finding.means:
        text.append(f"\n{finding.means}", style="dim")
    for line in finding.do.splitlines():
        text.append("\n> ", style="cyan")
        text.append(line)
    return text
