"""The configuration map of each child, which it receives through its lifeline when it starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch.processes.cores import Cores, CpuSet
from launch.runtime import RuntimeDir
from pipeline.config import ResolvedConfig
from shm.segment import engine_prefix
from shm.store import store_name


@dataclass(frozen=True)
class ChildConfigs:
    """`slab`: the first policy keeps experts on the device, so the prefetcher is needed from the start.
    `reserve`: bytes of memory that the store must leave free."""

    config: ResolvedConfig
    model: Path
    cores: Cores
    runtime: RuntimeDir
    slab: bool
    reserve: int
    log_level: str
    cache_dir: Path
    key: bytes  # the engine's, with which its children prove their identity

    @property
    def control_name(self) -> str:
        """The name of the control segment, in which workers and prefetcher count their progress."""
        return f"{engine_prefix(self.runtime.path)}control-0"

    @property
    def worker_cores(self) -> tuple[CpuSet, ...]:
        return self.cores.for_workers(self.config.workers) if self.config.workers else ()

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
        worker_cores = self.worker_cores
        local = all(cpus.node is not None for cpus in worker_cores)
        return self._store(fingerprint) | {
            "config": plain,
            "model": str(self.model),
            "cache_dir": str(self.cache_dir),
            "workers": [len(cpus.cores) for cpus in worker_cores],
            "nodes": len(self.cores.nodes) if local else 1,
            "slab": self.slab,
            "key": self.key,
        }

    def for_worker(self, fingerprint: str, cpus: CpuSet) -> dict[str, Any]:
        here = {"host_slowdown": self.config.host_slowdown}
        return self._store(fingerprint) | {"cores": list(cpus.cores)} | here

    def for_prefetcher(self, fingerprint: str) -> dict[str, Any]:
        # Bound to a core, it would wait for that core's worker; so it copies on any that is idle.
        return self._store(fingerprint) | {"cores": [], "link_gbps": self.config.link_gbps}

    def for_text(self) -> dict[str, Any]:
        return self._engine() | {"model": str(self.model), "fingerprint": ""}  # it knows no store

    def for_gateway(self, fingerprint: str) -> dict[str, Any]:
        keys = self.config.http_keys
        return self._engine() | {
            "fingerprint": fingerprint,
            "model": str(self.model),
            "http": self.config.http,
            "http_keys": None if keys is None else str(keys.absolute()),
        }

    def _store(self, fingerprint: str) -> dict[str, Any]:
        store = {"store": store_name(fingerprint), "fingerprint": fingerprint}
        return self._engine() | store | {"control": self.control_name}

    def _engine(self) -> dict[str, Any]:
        return {"engine": self.runtime.name, "runtime": str(self.runtime.path), "log_level": self.log_level}
