"""What the coordinator is told when it starts, as it comes through its lifeline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import SettledConfig


@dataclass(frozen=True)
class WorkerCores:
    """The expert workers in the order of their NUMA nodes: how many cores each computes on, and the number of
    nodes (1 also where the order has no meaning)."""

    cores: tuple[int, ...]
    nodes: int = 1

    @classmethod
    def alike(cls, number: int) -> WorkerCores:
        return cls((1,) * number)

    def __len__(self) -> int:
        return len(self.cores)


@dataclass(frozen=True)
class CoordinatorConfig:
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
    workers: WorkerCores
    prefetcher: str  # process | thread
    slab: bool  # the first policy needs one, and the prefetcher is being started
    config: SettledConfig

    @classmethod
    def from_map(cls, told: dict[str, Any]) -> CoordinatorConfig:
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
            workers=WorkerCores(tuple(told["workers"]), told["nodes"]),
            prefetcher=told["prefetcher"],
            slab=told["slab"],
            config=SettledConfig.from_map(told["config"]),
        )
