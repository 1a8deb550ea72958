"""An engine's description and counters for clients. Any thread may read them while the engine computes: each
value is consistent, and two values may be a step apart."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.arrays import IntArray
from pipeline.engine.observer import ActivityObserver
from pipeline.engine.stage import EngineStage
from pipeline.memory.needs import kv_dtype
from pipeline.policies.placements import counted_tokens
from pipeline.scheduling.scheduler import Scheduler
from pipeline.serving.engine_parts import EngineParts
from pipeline.serving.policy_switch import PolicySwitch
from pipeline.text.generation_defaults import sampling_defaults
from pipeline.text.tokenizer import has_chat_template
from protocol.messages import VERSION, ExpertActivityReply, Welcome


class EngineStatus:
    """Reads an engine's parts, policy and scheduler."""

    def __init__(self, parts: EngineParts, policies: PolicySwitch, scheduler: Scheduler) -> None:
        """Raises ModelError where the model's sampling settings are damaged."""
        self._parts = parts
        self._policies = policies
        self._scheduler = scheduler
        shape = parts.engine.shape
        self._activity = ActivityObserver(shape.layers, shape.experts, shape.tiles)
        parts.engine.observers.append(self._activity)
        self._sampling = sampling_defaults(parts.config.model)

    def welcome(self) -> Welcome:
        """Returns the engine's description for a client that connects."""
        parts = self._parts
        config, options = parts.config, parts.config.options
        policy = parts.engine.policy
        return Welcome(
            version=VERSION,
            engine=config.engine,
            model=str(config.model),
            fingerprint=config.fingerprint,
            device=parts.device.name,
            policy=policy.name,
            exact=parts.engine.exact,
            vocabulary=parts.engine.backbone.facts.vocabulary,
            context=parts.context,
            has_tokenizer=parts.detokenizer is not None,
            has_chat_template=parts.detokenizer is not None and has_chat_template(config.model),
            emulation=options.emulation,
            sampling=self._sampling,
            format=options.format,
            backbone_dtype=options.backbone_dtype,
            kv_dtype=kv_dtype(options),
        )

    def activity(self, request: int) -> ExpertActivityReply:
        """Returns what happened to each expert. It is recorded for some seconds from now on."""
        seen = self._activity
        seen.look()
        stages = self._parts.engine.stages
        resident: IntArray = np.add.reduce([stage.memory.residency for stage in stages], dtype=np.int32)
        sums = (seen.used.copy(), seen.device.copy(), seen.demanded.copy())  # sent while they change
        return ExpertActivityReply(request, seen.tiles, resident, *sums)

    def stats(self) -> dict[str, Any]:
        """Returns the counters as a JSON-like tree."""
        engine, first = self._parts.engine, self._parts.engine.first
        sockets = dict(self._parts.sockets)  # a copy: the engine's thread may add the prefetcher's
        stats: dict[str, Any] = {
            "policy": engine.policy.name,
            "policy_status": engine.policy.status,
            "policy_options": self._policies.current.options,
            "emulation": self._parts.config.options.emulation,
            "scheduler": self._scheduler.stats(),
            "speculation": self._scheduler.speculation.stats(),
            "engine": engine.counters.snapshot(),
            "counted_tokens": counted_tokens(engine.popularity, engine.shape.top_k),
            "calibrated": self._policies.calibrated,
            "prefetch": {"on": first.driver.prefetch.on, "status": first.driver.prefetch.status},
            "graphs": first.graphs.status,
            "tile_bytes": engine.layout.tile_bytes,
            "peers": [child for socket in sockets.values() for child in socket.stats()],
            "recovery": {role: socket.recovery_stats() for role, socket in sockets.items()},
            "malformed": {role: socket.malformed for role, socket in sockets.items()},
        }
        if (carrier := self._parts.carrier) is not None:
            stats["exchange"] = carrier.stats()
        elif "worker" in sockets:
            stats["exchange"] = {"name": "zmq"}
        if self._parts.tier is not None:
            stats["disk"] = self._parts.tier.stats()
        if self._parts.machines is not None:
            stats["machines"] = self._parts.machines.stats()
        if (costs := first.timing.costs or self._policies.costs) is not None:
            stats["costs"] = costs.to_json()
        if (corrections := first.timing.corrections) is not None:
            stats["cost_updates"] = corrections.report()
        caches = [(_cache(stage), slab) for stage in engine.stages if (slab := stage.memory.slab) is not None]
        if caches:
            stats["cache"] = {name: sum(cache[name] for cache, _ in caches) for name in caches[0][0]}
            links = [slab.link.stats() | slab.copier.stats() for _, slab in caches]
            stats["prefetcher"] = links[0] | {"up": all(link["up"] for link in links)}
        if len(engine.stages) > 1:
            cards = self._parts.config.options.cards
            stats["devices"] = [
                {"device": str(card), "layers": [stage.layers.start, stage.layers.stop]}
                | ({} if stage.timing.costs is None else {"costs": stage.timing.costs.to_json()})
                | (_cache(stage) if stage.memory.slab else {})
                for card, stage in zip(cards, engine.stages, strict=True)
            ]
        return stats


def _cache(stage: EngineStage) -> dict[str, int]:
    """Returns the counters of a device's cache."""
    mover, cache = stage.memory.mover, stage.memory.mover.cache
    return {
        "capacity_tiles": cache.capacity,
        "all_tiles": stage.tiles,
        "resident_tiles": int(cache.residency.sum()),
        "demanded_tiles": mover.demanded,
        "placed_tiles": mover.placed,
    }
