"""What goes to stdout: answers, and with --json one object and nothing else."""

from __future__ import annotations

import json
import math
from typing import Any


def show(text: str) -> None:
    """A piece of an answer, at once."""
    if text:
        print(text, end="", flush=True)


def print_json(fields: dict[str, Any]) -> None:
    """One line of JSON. Numbers that JSON does not have (a rate of nothing, say) become null."""
    print(json.dumps(_plain(fields), ensure_ascii=False, allow_nan=False), flush=True)


def _plain(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
    return value
