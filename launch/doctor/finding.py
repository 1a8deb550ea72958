"""A finding of the doctor, findings as text, and parsers for values in the kernel's files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from launch.terminal import tables

Level = Literal["ok", "note", "problem"]

COLOURS = {"ok": "green", "note": "yellow", "problem": "bold red"}
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Finding:
    """`found`: a fact; `means`: its consequence for an engine on this machine; `do`: what to change, as
    sentences and commands, one a line, or "". `prevents`: engines may not run."""

    topic: str
    level: Level
    found: str
    means: str
    do: str = ""
    prevents: bool = False

    def to_map(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in ("topic", "level", "found", "means", "do")}


@dataclass(frozen=True)
class Topic:
    """Makes the findings on one subject."""

    name: str

    def ok(self, found: str, means: str) -> Finding:
        return Finding(self.name, "ok", found, means)

    def note(self, found: str, means: str, do: str = "") -> Finding:
        return Finding(self.name, "note", found, means, do)

    def problem(self, found: str, means: str, do: str, prevents: bool = False) -> Finding:
        return Finding(self.name, "problem", found, means, do, prevents)


def render(findings: Sequence[Finding], verdict: str) -> str:
    """The findings by topic, and the verdict, as text."""
    parts: list[RenderableType] = []
    for topic, group in groupby(findings, key=lambda finding: finding.topic):
        rows = [(Text(found.level, style=COLOURS[found.level]), _description(found)) for found in group]
        table = tables.grid(rows, gap=1)
        table.columns[0].width = max(map(len, COLOURS))
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


def parse_size(text: str) -> int | None:
    """Bytes of "32768K", "64M", "1g" or "512", as in sysfs and mount options; None for any other text."""
    match = re.fullmatch(r"([0-9]+)([KMGT]?)", text.strip().upper())
    return int(match[1]) * UNITS[match[2]] if match else None


def binary(count: int) -> str:
    """A cache size in powers of two, as processors' data sheets give it: "32 KB", "1 MB"."""
    unit = max((u for u in UNITS if UNITS[u] <= max(count, 1)), key=UNITS.__getitem__)
    return f"{count / UNITS[unit]:.4g} {unit}B"
