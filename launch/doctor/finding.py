"""One thing found, and words that the kernel's files use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Finding:
    """`found` is a fact, `means` what follows from it for an engine here, `do` what can be done: "" where
    nothing need be, else sentences and commands, one a line. `prevents`: engines cannot be relied on to run.
    """

    topic: str
    level: Level
    found: str
    means: str
    do: str = ""
    prevents: bool = False

    def to_map(self) -> dict[str, str]:
        """For JSON."""
        return {name: getattr(self, name) for name in ("topic", "level", "found", "means", "do")}


def parse_size(text: str) -> int | None:
    """Bytes of "32768K", "64M", "1g" or "512", as sysfs and mount options write them; None for others."""
    match = re.fullmatch(r"([0-9]+)([KMGT]?)", text.strip().upper())
    return int(match[1]) * UNITS[match[2]] if match else None


def chosen(text: str) -> str:
    """The word in brackets of "always [madvise] never"; the text itself where none is."""
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else text


def binary(count: int) -> str:
    """A size that is a power of two for a person: "32 KB", "1 MB"; memory is counted so."""
    unit = max((u for u in UNITS if UNITS[u] <= max(count, 1)), key=UNITS.__getitem__)
    return f"{count / UNITS[unit]:.4g} {unit}B"
