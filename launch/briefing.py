"""What each child is told when it starts: the configuration maps that travel through the lifelines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch.runtime import RuntimeDir
from pipeline.config import DEFAULT_CONTEXT, KV_CONTEXTS, EngineConfig
from pipeline.errors import PipelineError
from pipeline.models.registry import expert_shape, model_spec
from shm.layout import StoreLayout, format_named
from shm.segment import engine_prefix
from shm.store import store_name

FREE_BYTES = 2_000_000_000  # left for the rest of the machine
NUMBER_BYTES = {"f32": 4, "bf16": 2}


@dataclass(frozen=True)
class Briefing:
    """`config` has its device, policy and workers settled. `slab`: the first policy keeps experts on the
    device, so something that copies them there is needed from the start."""

    config: EngineConfig
    model: Path
    runtime: RuntimeDir
    slab: bool
    log_level: str
    cache_dir: Path
    key: bytes  # the engine's: what its children prove themselves with

    @property
    def control_name(self) -> str:
        """Of the segment in which workers and prefetcher count their progress."""
        return f"{engine_prefix(self.runtime.path)}control-0"

    def for_loader(self) -> dict[str, Any]:
        return self._engine() | {
            "model": str(self.model),
            "format": self.config.format,
            "tile": self.config.tile,
            "cache_dir": str(self.cache_dir),
            "reserve_bytes": self._reserve_bytes(),
            "verify": self.config.verify,
        }

    def for_coordinator(self, fingerprint: str) -> dict[str, Any]:
        plain = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self.config).items()}
        return self._store(fingerprint) | {
            "config": plain,
            "model": str(self.model),
            "workers": self.config.workers,
            "prefetcher": self.config.prefetcher,
            "slab": self.slab,
            "key": self.key,
        }

    def for_worker(self, fingerprint: str, core: int) -> dict[str, Any]:
        slowdown = {"host_slowdown": self.config.host_slowdown}
        return self._store(fingerprint) | {"cores": [core], "threads": 1} | slowdown

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

    def _reserve_bytes(self) -> int:
        """What must stay free beside the store: slab, backbone, KV cache, and 2 GB. A
        model that cannot be read is the loader's to report."""
        try:
            config = json.loads((self.model / "config.json").read_text("utf-8"))
            spec, shape = model_spec(config), expert_shape(config, self.config.tile)
        except (OSError, ValueError, PipelineError):
            return FREE_BYTES
        experts = StoreLayout(shape, format_named(self.config.format)).total_bytes
        slab = self.config.expert_cache * experts if self.slab and self.config.device == "cpu" else 0
        attention = 2 * spec.hidden * spec.head_dim * (spec.heads + spec.kv_heads)
        embeddings = spec.vocabulary * spec.hidden * (1 if spec.tied_embeddings else 2)
        context = self.config.context or min(spec.max_positions, DEFAULT_CONTEXT)
        kv = (self.config.kv_tokens or KV_CONTEXTS * context) * spec.kv_numbers_per_token
        numbers = embeddings + spec.layers * attention + kv
        return FREE_BYTES + int(slab) + numbers * NUMBER_BYTES[self.config.backbone_dtype]
