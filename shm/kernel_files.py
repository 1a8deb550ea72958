"""Reading what the kernel says in small files: what is missing or odd reads as nothing."""

from __future__ import annotations

import re
from pathlib import Path


def contents(path: Path) -> str:
    """A file's text without the space around it; "" where it cannot be read."""
    try:
        return path.read_text("utf-8", errors="replace").strip("\0 \n")
    except OSError:
        return ""


def number(text: str) -> int | None:
    """A whole number that is not negative; None for anything else."""
    return int(text) if re.fullmatch(r"[0-9]{1,20}", text) else None
