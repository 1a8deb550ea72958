"""The counters of a replay, phase by phase, and the figures made from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isnan
from typing import Any

from pipeline.arrays import Phase
from pipeline.counters import Fidelity, MoveCounters

MOVED = ("demanded", "predicted", "useful", "late", "wasted", "placed")


@dataclass
class PhaseOutcome(MoveCounters):
    """Sums over the steps of one phase. Times are seconds of the cost model; what the mover counts is in the
    engine's words."""

    steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    host_busy: float = 0.0
    device_busy: float = 0.0
    link_busy: float = 0.0
    wait_link: float = 0.0  # in which the device waited for a demanded tile
    wait_host: float = 0.0  # or for the host's share
    demanded_tiles: int = 0
    channel_tiles: float = 0.0  # single channels that crossed the link, in tiles
    host_tiles: int = 0
    device_tiles: int = 0
    fidelity: Fidelity = field(default_factory=Fidelity)

    @property
    def tok_s(self) -> float:
        """Rows a second; 0 where no time passed."""
        return self.rows / self.seconds if self.seconds else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the active experts that were fully resident when their layer was planned."""
        return _share(float(self.hits.sum()), float(self.active.sum()))

    @property
    def tile_hit_rate(self) -> float:
        """The same of the active experts' tiles."""
        return _share(float(self.hit_tiles.sum()), float(self.active_tiles.sum()))

    @property
    def issued_share(self) -> float | None:
        """Share of the wanted prefetches that were issued; None without any."""
        return self.issued_experts / self.wanted_experts if self.wanted_experts else None

    @property
    def moved(self) -> float:
        """Tiles that crossed the link, and channels in tiles."""
        return self.demanded_tiles + self.predicted_tiles + self.placed_tiles + self.channel_tiles

    @property
    def host_share(self) -> float:
        """Share of the expert tiles that the host computed."""
        return _share(self.host_tiles, self.host_tiles + self.device_tiles)

    def to_json(self, tile_bytes: int) -> dict[str, Any]:
        """Rates, shares and bytes a token."""
        tokens = max(self.rows, 1)
        return {
            "steps": self.steps,
            "tokens": self.rows,
            "seconds": self.seconds,
            "tok_s": self.tok_s,
            "hit_rate": self.hit_rate,
            "hit_rate_by_layer": [_share(h, a) for h, a in zip(self.hits, self.active, strict=True)],
            "tile_hit_rate": self.tile_hit_rate,
            "tile_hit_rate_by_layer": [
                _share(h, a) for h, a in zip(self.hit_tiles, self.active_tiles, strict=True)
            ],
            "bytes_per_token": {name: getattr(self, f"{name}_tiles") * tile_bytes / tokens for name in MOVED}
            | {"moved": self.moved * tile_bytes / tokens},
            "prefetches": {
                "wanted": self.wanted_experts,
                "issued": self.issued_experts,
                "share": self.issued_share,
                "paused_steps": self.paused_steps,
            },
            "host_share": self.host_share,
            "busy": {  # work is booked when it is sent, and may go on in the next phase
                side: min(1.0, _share(getattr(self, f"{side}_busy"), self.seconds))
                for side in ("host", "device", "link")
            },
            "waits": {
                cause: _share(getattr(self, f"wait_{cause}"), self.seconds) for cause in ("link", "host")
            },
            "fidelity": self.shares(),
        }

    def shares(self) -> dict[str, float | None]:
        """The shares of all routed weight that were skipped, substituted, stale, predicted and left out; None
        for an unknown one."""
        sums = vars(self.fidelity)
        return {
            kind: None if isnan(part) else _share(part, sums["weight"])
            for kind, part in sums.items()
            if kind != "weight"
        }


@dataclass
class Outcome:
    """One policy's replay."""

    prefill: PhaseOutcome
    decode: PhaseOutcome
    exact: bool
    notes: list[str]

    @property
    def phases(self) -> dict[Phase, PhaseOutcome]:
        return {"prefill": self.prefill, "decode": self.decode}


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0
