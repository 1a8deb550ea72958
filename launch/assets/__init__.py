"""The files that the command line carries."""

from __future__ import annotations

from pathlib import Path


def stress_script() -> Path:
    """The requests that `launch.py stress` sends where no --script is given."""
    return Path(__file__).parent / "stress.jsonl"
