"""What the coordinator is told when it starts, as it comes through its lifeline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import SettledConfig
from pipeline.experts.runs import Workers


@dataclass(frozen=True)
class Briefed:
    """One engine, from its coordinator's view."""

    engine: str
    runtime: Path
    incarnation: int
    key: bytes  # proves who this engine's children are
    control: str  # name of the control segment
    store: str
    fingerprint: str
    model: Path
    cache: Path  # what is kept on disk between starts
    workers: Workers
    prefetcher: str  # process | thread
    slab: bool  # the first policy needs one, and the prefetcher is being started
    config: SettledConfig

    @classmethod
    def from_map(cls, told: dict[str, Any]) -> Briefed:
        return cls(
            engine=told["engine"],
            runtime=Path(told["runtime"]),
            incarnation=told["incarnation"],
            key=told["key"],
            control=told["control"],
            store=told["store"],
            fingerprint=told["fingerprint"],
            model=Path(told["model"]),
            cache=Path(told["cache_dir"]),
            workers=Workers(tuple(told["workers"]), told["nodes"]),
            prefetcher=told["prefetcher"],
            slab=told["slab"],
            config=SettledConfig.from_map(told["config"]),
        )
