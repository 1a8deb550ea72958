"""The driver's functions of the same GPU."""

from __future__ import annotations

from typing import Any

from cuda.bindings import runtime


def __getattr__(name: str) -> Any:
    return getattr(runtime, name)
