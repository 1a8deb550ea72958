"""Reads small files of /proc and /sys: a missing or malformed file gives an empty result."""

from __future__ import annotations

import re
from pathlib import Path


def contents(path: Path) -> str:
    """A file's text without surrounding whitespace; "" if it cannot be read."""
    try:
        return path.read_text("utf-8", errors="replace").strip("\0 \n")
    except OSError:
        return ""


def number(text: str) -> int | None:
    """A whole number that is not negative; None for anything else."""
    return int(text) if re.fullmatch(r"[0-9]{1,20}", text) else None


def entries(folder: Path, pattern: str) -> list[Path]:
    """The matching entries of a folder, cpu2 before cpu10; none if it cannot be listed."""
    try:
        found = list(folder.glob(pattern))
    except OSError:
        return []
    return sorted(found, key=lambda p: [int(n) if n.isdigit() else n for n in re.split(r"(\d+)", p.name)])


def parse_cores(text: str) -> frozenset[int]:
    """The numbers of a kernel's list such as "0-3,8"; none if it is malformed."""
    if not re.fullmatch(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", text):
        return frozenset()
    spans = [part.partition("-") for part in text.split(",")]
    return frozenset(n for low, _, high in spans for n in range(int(low), int(high or low) + 1))


def parse_cpuinfo(text: str) -> tuple[str, frozenset[str]]:
    """Model and instruction sets of the first processor in /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    model = fields.get("model name") or fields.get("Model") or fields.get("cpu") or ""
    if not model and "CPU part" in fields:
        model = f"implementer {fields.get('CPU implementer', '?')} part {fields['CPU part']}"
    flags = fields.get("flags") or fields.get("Features") or ""
    return model or "unknown processor", frozenset(flags.split())
