"""What faults were asked for. Does no harm itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launch.command_line.grammar import nearest
from launch.errors import WrongUsage

KINDS = (
    "kill",  # a worker or the prefetcher is killed
    "stop",  # one of them stops for good, and has to be replaced
    "delay",  # one of them is held up for a moment
    "corrupt",  # a stranger sends hostile messages to every socket
)
SIGNALS = ("kill", "stop", "delay")  # kinds that need a victim
RATE = 1.0


@dataclass(frozen=True)
class Chaos:
    """`kinds` at random, each as likely, `rate` faults a second on average."""

    kinds: tuple[str, ...]
    rate: float = RATE
    seed: int = 0

    @classmethod
    def asked(cls, written: dict[str, Any], seed: int) -> Chaos | None:
        """What --chaos and --chaos-rate say; None without them. Raises WrongUsage."""
        if "chaos" not in written:
            return None
        kinds = tuple(dict.fromkeys(kind.strip() for kind in written["chaos"].split(",")))
        for kind in kinds:
            if kind not in KINDS:
                near = nearest(kind, KINDS)
                raise WrongUsage(f"--chaos: there is no {kind!r}{near} ({', '.join(KINDS)})")
        return cls(kinds, written.get("chaos_rate", RATE), seed)
