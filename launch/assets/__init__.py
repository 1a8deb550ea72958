"""Files that are installed with the command line."""

from __future__ import annotations

from pathlib import Path


def stress_script() -> Path:
    """The default requests of `launch.py stress`."""
    return Path(__file__).parent / "stress.jsonl"
