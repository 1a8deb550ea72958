"""A finding of the doctor, and parsers for values in the kernel's files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]

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


def parse_size(text: str) -> int | None:
    """Bytes of "32768K", "64M", "1g" or "512", as in sysfs and mount options; None for any other text."""
    match = re.fullmatch(r"([0-9]+)([KMGT]?)", text.strip().upper())
    return int(match[1]) * UNITS[match[2]] if match else None


def chosen(text: str) -> str:
    """The word in brackets of "always [madvise] never"; the text itself where it has no brackets."""
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else text


def binary(count: int) -> str:
    """A cache size in powers of two, as processors' data sheets give it: "32 KB", "1 MB"."""
    unit = max((u for u in UNITS if UNITS[u] <= max(count, 1)), key=UNITS.__getitem__)
    return f"{count / UNITS[unit]:.4g} {unit}B"
