"""The configuration that the supervisor gives to a coordinator when it starts it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import ResolvedConfig


@dataclass(frozen=True)
class WorkerCores:
    """The expert workers in the order of their NUMA nodes: how many cores each computes on, and the number of
    nodes (1 also where the order is arbitrary)."""

    cores: tuple[int, ...]
    nodes: int = 1

    @classmethod
    def equal(cls, number: int) -> WorkerCores:
        return cls((1,) * number)

    def __len__(self) -> int:
        return len(self.cores)


@dataclass(frozen=True)
class CoordinatorConfig:
    """One engine, from its coordinator's view."""

    engine: str  # its name
    runtime: Path
    incarnation: int
    key: bytes  # the engine's children prove their identity with it
    control: str  # name of the control segment
    store: str
    fingerprint: str
    model: Path
    cache: Path  # folder of files that are kept between starts
    workers: WorkerCores
    slab: bool  # the first policy keeps experts on the device, and the prefetcher is being started
    options: ResolvedConfig

    @classmethod
    def from_map(cls, config: dict[str, Any]) -> CoordinatorConfig:
        return cls(
            engine=config["engine"],
            runtime=Path(config["runtime"]),
            incarnation=config["incarnation"],
            key=config["key"],
            control=config["control"],
            store=config["store"],
            fingerprint=config["fingerprint"],
            model=Path(config["model"]),
            cache=Path(config["cache_dir"]),
            workers=WorkerCores(tuple(config["workers"]), config["nodes"]),
            slab=config["slab"],
            options=ResolvedConfig.from_map(config["config"]),
        )
