"""Puts an engine together inside the coordinator: model, device, slab, sockets, policy, scheduler.

Runs in the engine's thread, which then owns all of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np

from pipeline.backbone.backbone import Backbone
from pipeline.backbone.batch import TokenSpan
from pipeline.backbone.disk_cache import BackboneCache, backbone_fingerprint
from pipeline.backbone.kv_cache import KVCache
from pipeline.backbone.linear import Precision
from pipeline.backbone.materialize import start_moving
from pipeline.backbone.step_input import StepInput
from pipeline.checkpoint.model_source import ModelSource
from pipeline.checkpoint.open import open_model
from pipeline.coordinator_config import CoordinatorConfig
from pipeline.device import Device, open_device
from pipeline.engine.engine import DeviceMemory, Engine
from pipeline.errors import PeerLost
from pipeline.experts.copy_thread import start_copy_thread
from pipeline.experts.expert_cache import ExpertCache
from pipeline.experts.fetch_link import FetchLink
from pipeline.experts.host_pool import HostPool
from pipeline.experts.inline_pool import InlineExpertPool
from pipeline.experts.peers import ChildServerSocket, ExitEvents, SendToSupervisor
from pipeline.experts.tile_mover import TileMover
from pipeline.experts.worker_pool import WorkerPool
from pipeline.memory.limits import (
    CHUNK_MAX,
    STAGING_TILES,
    cache_tiles,
    choose_context,
    full_memory_in_one_line,
    kv_budget,
)
from pipeline.models.registry import model_spec
from pipeline.policies.presets import make_policy
from pipeline.policies.view import Policy, PolicyRequest
from pipeline.scheduling.job_factory import JobFactory
from pipeline.scheduling.scheduler import Scheduler, Send
from pipeline.serving.policy_inputs import PolicyInputs
from pipeline.text.generation_defaults import sampling_defaults
from pipeline.text.tokenizer import Tokenizer, eos_ids
from pipeline.traces.recorder import recorder_of
from protocol.messages import Needed
from shm.cache_record import CacheRecord
from shm.control import ControlSegment
from shm.layout import FORMATS, BlockFormat, StoreLayout
from shm.pinned import lock_pages
from shm.segment import engine_prefix
from shm.store import Store
from workers.copiers import paced
from workers.kernels.native import VARIANTS, best

log = logging.getLogger(__name__)

PEER_LIMIT = 60.0  # seconds for workers and prefetcher to announce themselves
CHUNK_SECONDS = 0.25  # a prefill chunk should take about this long
ALONE = 8  # as many tokens for a request that is the only one: a newcomer waits a second or two at most
CHUNK_TRIAL = 64  # tokens of the prefill that is timed for it
TRIAL_SECONDS = 1.0  # of trials, after which there is no other: the first request waits for them


class Assembly:
    """A running engine's parts. Everything but `stats` and `give_up` is for the engine's thread."""

    @full_memory_in_one_line()
    def __init__(
        self,
        told: CoordinatorConfig,
        send: Send,
        congested: Callable[[bytes], bool],
        deaths: ExitEvents,
        tell: SendToSupervisor,
    ) -> None:
        """`deaths`: of workers and prefetcher, as the supervisor sees them; `tell` sends to the supervisor.
        Raises UsageError, ShmError, PeerLost or CudaError, each one line."""
        config = told.config
        self.told = told
        self.notes: list[str] = []
        self._deaths, self._tell = deaths, tell
        self._closing = ExitStack()
        self._options: dict[str, str] = {}  # of the policy, as they were given
        self.source = source = open_model(told.model)
        spec = model_spec(source.config)
        self.context = choose_context(config.context, spec)
        self._knowledge = PolicyInputs(told, source, self.context)
        self.device: Device = open_device(config.device)
        self._closing.callback(self.device.close)
        # Bound before anything slow, so that the peers find it.
        self._peers: dict[str, ChildServerSocket] = {}
        rows = max(config.chunk or CHUNK_MAX, config.max_sequences)
        workers = None
        if told.workers:
            workers = self._bind("work.sock", "worker", largest=4 * rows * spec.hidden)
        if told.slab:
            self._bind("fetch.sock", "prefetcher")
        self._control = ControlSegment.attach(told.control)
        self._closing.callback(self._control.close)
        self.store = Store.attach(told.store, told.fingerprint, writable=True)
        self._closing.callback(self.store.close)
        layout = self.store.layout
        cache = backbone_cache(told, source)
        precision = Precision(config.backbone_dtype, self.device, cache)
        with ThreadPoolExecutor(1, "locking") as beside:
            locked = beside.submit(lock_pages, self.store.segment.array)
            self._backbone = backbone = Backbone(source, spec, precision, self.context)
        self.notes.append(f"store: {locked.result()}")
        if cache is not None:
            cache.finish()
        pool: HostPool
        if workers is None:
            pool = InlineExpertPool(self.store, self.device.team, config.host_slowdown)
        else:
            pool = WorkerPool(workers, self._control, told.workers, layout.shape.hidden)
        pool.wait_ready(PEER_LIMIT)  # they make themselves ready, while this process reads the tokenizer
        self.tokenizer = Tokenizer.load(told.model)
        self.sampling = sampling_defaults(told.model)
        held = kv_budget(config.kv_tokens, self.context)
        kv = KVCache(spec, precision.dtype, self.device.torch_device, held)
        self._kv_bytes = kv.budget * spec.kv_numbers_per_token * precision.dtype.itemsize
        memory = self._device_memory(layout) if told.slab else None
        self.engine = Engine(backbone, layout, self.device, pool, memory)
        size = f"{backbone.bytes / 1e6:.1f} MB {config.backbone_dtype}"
        self.notes.append(f"backbone: {size} on {self.device.describe()}")
        library = best()
        missing = "torch; none were compiled: see launch.py doctor"
        self.notes.append(f"kernels: {missing if library is None else VARIANTS[library.variant]}")
        self.notes.append(
            f"experts: {layout.shape.layers} x {layout.shape.experts}, {layout.shape.tiles} tiles of"
            f" {layout.tile_bytes / 1e6:.2f} MB each"
        )
        self._first = PolicyRequest(config.policy or "all-host", config.policy_options)
        self.notes.extend(self.set_policy(self._first))
        self.notes.append(f"context: {self.context} tokens; the KV cache holds {kv.budget}")
        requests = JobFactory(
            self.tokenizer,
            eos_ids(told.model) if self.tokenizer is None else self.tokenizer.eos_ids,
            vocabulary=spec.vocabulary,
            context=self.context,
            seed=config.seed,
        )
        self.scheduler = Scheduler(
            self.engine,
            kv,
            requests,
            max_sequences=config.max_sequences,
            chunk=config.chunk or CHUNK_TRIAL,
            send=send,
            congested=congested,
        )

    def warm_up(self) -> None:
        """What is measured once and needs the workers' kernels: the size of a prefill chunk. After Ready and
        before the first request. Then what the start left in files begins to move into memory."""
        if self.told.config.chunk is None:
            self.scheduler.chunk = chunk = self._measured_chunk(self.scheduler.kv)
            self.scheduler.chunk_alone = min(ALONE * chunk, CHUNK_MAX, self.context)
            self.engine.forget_trials()
            self.set_policy(self._first)  # a new one: the trials are not in its memory
        if self.told.config.record is not None:
            recorder = recorder_of(self.told, self.source, self.engine, self.told.config.record)
            self._closing.callback(recorder.close)
            self.engine.observers.append(recorder)
        self._closing.callback(start_moving(self._backbone))
        log.debug("prefill: %d tokens a chunk", self.scheduler.chunk)

    @full_memory_in_one_line()
    def set_policy(self, request: PolicyRequest) -> tuple[str, ...]:
        """Make the policy and use it from the next step on; room for experts on the device is made when a
        policy is the first to need it. Returns its notes. Raises UsageError, and PeerLost where there is no
        prefetcher to be had."""
        policy: Policy = make_policy(request, self.told.config.seed)
        if policy.uses_device and self.engine.memory is None:
            self.engine.memory = self._device_memory(self.engine.layout)
        known = self._knowledge
        calibration = known.calibration_for(policy)
        notes = self.engine.set_policy(policy, known.costs_for(policy, self.engine), calibration)
        self._options = request.options
        return notes

    def stats(self) -> dict[str, Any]:
        """The engine's counters as a JSON-like tree."""
        engine = self.engine
        stats: dict[str, Any] = {
            "policy": engine.policy.name,
            "policy_options": self._options,
            "emulation": self.told.config.emulation,
            "scheduler": self.scheduler.stats(),
            "engine": engine.accounting.snapshot(),
            "prefetch": {"on": engine.prefetch.on, "says": engine.prefetch.says},
            "tiles_per_expert": engine.shape.tiles,
            "tile_bytes": engine.layout.tile_bytes,
            "peers": [peer for socket in list(self._peers.values()) for peer in socket.stats()],
            "recovery": {role: socket.recovery_stats() for role, socket in list(self._peers.items())},
            "malformed": {role: socket.malformed for role, socket in list(self._peers.items())},
        }
        if self._knowledge.costs is not None:
            stats["costs"] = self._knowledge.costs.to_json()
        if engine.memory is not None:
            mover, cache = engine.memory.mover, engine.memory.mover.cache
            stats["cache"] = {
                "capacity_tiles": cache.capacity,
                "resident_tiles": int(cache.residency.sum()),
                "demanded_tiles": mover.demanded,
                "placed_tiles": mover.placed,
            }
        return stats

    def rest(self) -> bool:
        """Between requests: see who has come or gone, keep tiles moving, check the slots' books. True where
        there is more to do, so that it is soon to be called again."""
        self.engine.keep_up()
        moving = False
        if self.engine.memory is not None:
            mover = self.engine.memory.mover
            moving = not mover.idle
            if not moving:
                mover.cache.audit(idle=True)
        return moving or any(socket.behind for socket in self._peers.values())

    def give_up(self, reason: str) -> None:
        """End every wait for a worker or the prefetcher. May be called from any thread."""
        for socket in self._peers.values():
            socket.give_up(reason)

    def close(self) -> None:
        """Release everything, in reverse order."""
        self._closing.close()

    def _bind(self, socket: str, role: str, largest: int = 0) -> ChildServerSocket:
        told = self.told
        peers = ChildServerSocket(
            told.runtime,
            socket,
            role,
            told.fingerprint,
            told.key,
            self._deaths,
            self._tell,
            largest=largest,
        )
        self._closing.callback(peers.close)
        self._peers[role] = peers
        return peers

    def _device_memory(self, layout: StoreLayout) -> DeviceMemory:
        told, shape = self.told, layout.shape
        capacity = cache_tiles(told.config.expert_cache, shape.layers * shape.experts * shape.tiles)
        slots = capacity + STAGING_TILES
        self.device.check_memory(slots * layout.tile_bytes, self._kv_bytes, self._backbone.unmoved)
        name = f"{engine_prefix(told.runtime)}slab-{told.incarnation}"
        slab = self.device.open_slab(name, slots, layout.tile_bytes)
        self._closing.callback(slab.close)
        peers = self._peers.get("prefetcher")
        if peers is None:
            peers = self._bind("fetch.sock", "prefetcher")
            if told.prefetcher == "process":
                self._tell(Needed("prefetcher"))
        if told.prefetcher == "process":
            link = FetchLink(peers, slab.address(), self._control.line("prefetcher", 0))
        else:
            link = FetchLink(peers, None, None)
            copier = paced(slab.local_copier(self.store), told.config.link_gbps, lambda: None)
            self._closing.callback(start_copy_thread(told, self.store, copier, peers))
        if not link.wait_up(PEER_LIMIT):
            raise PeerLost(f"no prefetcher was ready after {PEER_LIMIT:.0f} s")
        self.notes.extend(link.notes)
        self.notes.append(f"slab: {capacity} tiles and {STAGING_TILES} for streaming")
        cache = ExpertCache(shape.layers, shape.experts, shape.tiles, capacity, slots, self.device.fence)
        return DeviceMemory(TileMover(cache, link, self.device), slab)

    def _measured_chunk(self, kv: KVCache) -> int:
        """Prefill tokens that take about CHUNK_SECONDS: the best of three trials or fewer, then fixed, and a
        power of two so that a little noise does not change it from start to start."""
        count = min(CHUNK_TRIAL, self.context)
        tokens = np.linspace(0, self.engine.backbone.spec.vocabulary - 1, count).astype(int).tolist()
        seconds: list[float] = []
        while len(seconds) < 3 and sum(seconds) < TRIAL_SECONDS:
            sequence = kv.allocate(count)
            started = time.perf_counter()
            self.engine.step([StepInput(TokenSpan(sequence, tokens), "none")], "prefill")
            seconds.append(time.perf_counter() - started)
            kv.release(sequence)
        wanted = count * CHUNK_SECONDS / min(seconds)
        return int(min(max(2 ** int(np.log2(wanted)), 16), CHUNK_MAX, self.context))


def backbone_cache(told: CoordinatorConfig, source: ModelSource) -> BackboneCache | None:
    """Where a quantized backbone is kept; None where quantizing it again costs nothing."""
    name = told.config.backbone_dtype
    if not isinstance(FORMATS[name], BlockFormat) or not source.worth_keeping(name):
        return None
    record = CacheRecord("backbone", source.name, name)
    return BackboneCache(told.cache, backbone_fingerprint(source, name), record)
