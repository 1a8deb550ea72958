"""What each child is told when it starts: the configuration maps that travel through the lifelines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch.processes.cores import Cores, CpuSet
from launch.processes.runtime import RuntimeDir
from pipeline.config import SettledConfig
from shm.segment import engine_prefix
from shm.store import store_name


@dataclass(frozen=True)
class ChildConfigs:
    """`config` has its device, policy and workers settled, too. `slab`: the first policy keeps experts on the
    device, so something that copies them there is needed from the start. `reserve`: bytes of memory that the
    store must leave free."""

    config: SettledConfig
    model: Path
    cores: Cores
    runtime: RuntimeDir
    slab: bool
    reserve: int
    log_level: str
    cache_dir: Path
    key: bytes  # the engine's: what its children prove themselves with

    @property
    def control_name(self) -> str:
        """Of the segment in which workers and prefetcher count their progress."""
        return f"{engine_prefix(self.runtime.path)}control-0"

    @property
    def seats(self) -> tuple[CpuSet, ...]:
        """Where the workers compute."""
        return self.cores.seats(self.config.workers) if self.config.workers else ()

    def for_loader(self) -> dict[str, Any]:
        return self._engine() | {
            "model": str(self.model),
            "format": self.config.format,
            "tile": self.config.tile,
            "cache_dir": str(self.cache_dir),
            "reserve_bytes": self.reserve,
            "verify": self.config.verify,
            "nodes": list(self.cores.nodes),
        }

    def for_coordinator(self, fingerprint: str) -> dict[str, Any]:
        plain = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self.config).items()}
        seats = self.seats
        local = all(seat.node is not None for seat in seats)
        return self._store(fingerprint) | {
            "config": plain,
            "model": str(self.model),
            "cache_dir": str(self.cache_dir),
            "workers": [len(seat.cores) for seat in seats],
            "nodes": len(self.cores.nodes) if local else 1,
            "prefetcher": self.config.prefetcher,
            "slab": self.slab,
            "key": self.key,
        }

    def for_worker(self, fingerprint: str, seat: CpuSet) -> dict[str, Any]:
        slowdown = {"host_slowdown": self.config.host_slowdown}
        return self._store(fingerprint) | {"cores": list(seat.cores)} | slowdown

    def for_prefetcher(self, fingerprint: str) -> dict[str, Any]:
        # It copies on whatever core is idle: bound to one, it would wait for that core's worker.
        return self._store(fingerprint) | {"cores": [], "link_gbps": self.config.link_gbps}

    def _store(self, fingerprint: str) -> dict[str, Any]:
        store = {"store": store_name(fingerprint), "fingerprint": fingerprint}
        return self._engine() | store | {"control": self.control_name}

    def _engine(self) -> dict[str, Any]:
        return {
            "engine": self.runtime.name,
            "runtime": str(self.runtime.path),
            "log_level": self.log_level,
        }
