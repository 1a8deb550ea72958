"""Output on stdout: answers, or with --json one object and nothing else."""

from __future__ import annotations

import json
import math
from typing import Any


def show(text: str) -> None:
    """Print part of an answer without buffering."""
    if text:
        print(text, end="", flush=True)


def print_json(fields: dict[str, Any]) -> None:
    """Print one line of JSON. NaN and infinities, which JSON does not have, become null."""
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
