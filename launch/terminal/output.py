"""Output on stdout: answers, or with --json one object and nothing else."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from launch.terminal.background import BackgroundOutput
from protocol.program import escaped, visible

MEASURED = 4  # significant digits of a measured figure: clocks and loads vary by more than the rest


def show(text: str, rendered: bool = False) -> None:
    """Print part of an answer, or other text, without buffering: exact into a pipe or a file, `visible` on a
    terminal. `rendered`: by `tables.render`, which colours, and has made its texts visible."""
    if text:
        exact = rendered or not sys.stdout.isatty()
        print(text if exact else visible(text), end="", flush=True)


def announce(line: str) -> None:
    """Print a line for the program that has started this one, which may never read it. Raises OSError where
    it cannot be written."""
    output = BackgroundOutput(sys.stdout.fileno())
    output.write(f"{line}\n".encode())
    if output.error is not None:
        raise output.error


def print_json(fields: dict[str, Any], *, digits: int = MEASURED) -> None:
    """Print one line of JSON. Numbers that are not whole have `digits` significant digits; NaN and
    infinities, which JSON does not have, become null."""
    print(escaped(json.dumps(plain(fields, digits), ensure_ascii=False, allow_nan=False)), flush=True)


def plain(value: Any, digits: int = MEASURED) -> Any:
    """Returns what `print_json` prints of a value."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case float() if value:
            return round(value, max(0, digits - 1 - math.floor(math.log10(abs(value)))))
        case dict():
            return {str(key): plain(item, digits) for key, item in value.items()}
        case list() | tuple():
            return [plain(item, digits) for item in value]
    return value
