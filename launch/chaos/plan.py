"""The faults that --chaos asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launch.command_line.values import nearest
from launch.errors import WrongUsage

KINDS = (
    "kill",  # a worker or the prefetcher is killed
    "stop",  # one of them is stopped for good, and must be replaced
    "delay",  # one of them is stopped for a moment
    "corrupt",  # a client sends hostile messages to every socket
)
SIGNALS = ("kill", "stop", "delay")  # sent to a worker or the prefetcher
RATE = 1.0


@dataclass(frozen=True)
class Chaos:
    """`rate` faults a second on average, each of a kind drawn uniformly from `kinds`."""

    kinds: tuple[str, ...]
    rate: float = RATE
    seed: int = 0

    @classmethod
    def asked(cls, written: dict[str, Any], seed: int) -> Chaos | None:
        """From --chaos and --chaos-rate; None without --chaos. Raises WrongUsage."""
        if "chaos" not in written:
            return None
        kinds = tuple(dict.fromkeys(kind.strip() for kind in written["chaos"].split(",")))
        for kind in kinds:
            if kind not in KINDS:
                near = nearest(kind, KINDS)
                raise WrongUsage(f"--chaos: unknown kind {kind!r}{near} ({', '.join(KINDS)})")
        return cls(kinds, written.get("chaos_rate", RATE), seed)
