"""Builds an engine inside the coordinator: model, device, sockets, store, backbone, expert pool, KV cache.
Device memory is opened by the first policy that needs it (`policy_switch.py`)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import accumulate, pairwise

import numpy as np

from pipeline.backbone.backbone import Backbone
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.disk_cache import BackboneCache, backbone_fingerprint
from pipeline.backbone.draft_layer import DraftLayer
from pipeline.backbone.kv_cache import KVCache
from pipeline.backbone.linear import Precision
from pipeline.backbone.protocol import AnyBackbone
from pipeline.backbone.stages import StagedBackbone, devices_of
from pipeline.calibration.cost_probe import ROWS
from pipeline.checkpoint.open import open_model
from pipeline.cluster.machines import WAIT_LIMIT, Machines
from pipeline.cluster.pool import LanesPool
from pipeline.config import DRAFT_RECENT, DRAFT_TOKENS, CoordinatorConfig, WorkerCores
from pipeline.device import open_devices
from pipeline.engine.drafter import Drafter
from pipeline.engine.engine import Engine
from pipeline.errors import PeerLost, UsageError
from pipeline.experts.carriers import ArenaCarrier, SocketCarrier
from pipeline.experts.disk_tier import DiskTier
from pipeline.experts.division import Divider, largest
from pipeline.experts.peers import ChildServerSocket, ExitEvents, SendToSupervisor
from pipeline.experts.pool import Compute, HostPool, computing
from pipeline.memory.needs import (
    CHUNK_MAX,
    choose_context,
    drafts,
    full_memory_in_one_line,
    kv_budget,
    kv_dtype,
    kv_sequences,
    kv_token_bytes,
    needs,
    state_bytes,
)
from pipeline.models.facts import facts_of, is_own
from pipeline.models.registry import model_spec
from pipeline.scheduling.suspects import Suspects
from pipeline.text.detokenizer import DECODER, Detokenizer
from pipeline.text.tokenizer import has_tokenizer
from protocol.machines import HostHello
from protocol.messages import Progress
from shm.control import ControlSegment
from shm.disk_cache import CacheRecord
from shm.lane import LaneShape, library
from shm.layout import FORMATS, MatrixFormat
from shm.segment import byte_size, engine_prefix, lock_pages
from shm.store import Store
from workers.kernels.native import VARIANTS, best, store_kernel
from workers.kernels.native import VERSION as KERNELS

log = logging.getLogger(__name__)

CHILD_LIMIT = 60.0  # seconds for workers and prefetcher to announce themselves
# Seconds in which a machine of other lanes must have come further at a start: enough for all that mends
# itself, an actor that is placed anew after one minute, or a spare machine that loads after half of one.
MACHINES_LIMIT = 120.0
TEXT_LIMIT = 300.0  # seconds for the text process, which loads a tokenizer
NARROW_ROWS = 32  # of the slots of a lane of which there are several
# Nanoseconds for which this process's team spins for its next computation, where no worker needs the cores:
# longer than what lies between two of a step. Waking a thread takes as long as the products of a small layer.
LINGER_NS = 300_000
STAGE = "loading the other weights"  # beside the experts
CHUNK_SECONDS = 0.25  # target duration of a prefill chunk
ALONE = 8  # factor of the chunk of a lone request: a second request waits a second or two at most
TRIAL_TOKENS = 64
TRIAL_SECONDS = 1.0  # no trial begins after this: the first request waits for them
SOCKET_FILES = {"worker": "work.sock", "prefetcher": "fetch.sock", "reader": "read.sock"}


class EngineParts:
    """An engine and its parts. `notes`: lines about it for a person; `tick`: counts progress of the engine's
    thread, which the supervisor watches. Used by the engine's thread."""

    @full_memory_in_one_line()
    def __init__(
        self,
        config: CoordinatorConfig,
        exits: ExitEvents,
        to_supervisor: SendToSupervisor,
        closing: ExitStack,
        text_up: threading.Event,
    ) -> None:
        """`text_up`: set once the text process is ready. `closing` releases the parts. Raises UsageError,
        ShmError, PeerLost or CudaError, each one line."""
        self.config = config
        self.to_supervisor = to_supervisor
        self.closing = closing
        self.sockets: dict[str, ChildServerSocket] = {}  # the sockets to the children, by role
        self.exits = exits
        self.carrier: ArenaCarrier | SocketCarrier | None = None  # of Works to workers
        self._draft_layer: DraftLayer | None = None
        options = config.options
        self.source = open_model(config.model)
        self.facts = facts = facts_of(self.source.config)
        # Tokens of prompt and answer together.
        self.context = choose_context(options.context, facts, options.chunk)
        self.devices = open_devices(options, config.cache)
        self.device = device = self.devices[0]
        for opened in dict.fromkeys(self.devices):
            closing.callback(opened.close)
        device.use()
        self.control = ControlSegment.attach(config.control)
        closing.callback(self.control.close)
        self.tick = self.control.line("coordinator", 0).tick
        self.suspects = Suspects(self.control, config.suspects)
        # Bound before any slow part, so that the children can connect.
        if config.workers:
            chunk = min(options.chunk or CHUNK_MAX, self.context)
            self._rows = max(chunk, options.max_sequences, *ROWS)  # of a step
            self.bind_socket("worker", largest=4 * self._rows * facts.hidden)
        if config.slab:
            self.bind_socket("prefetcher")
        if options.host_memory is not None:
            self.bind_socket("reader")
        self.store = Store.attach(config.store, config.fingerprint, writable=True)
        closing.callback(self.store.close)
        self.machines = self._open_machines()
        with self.leases_kept(), ThreadPoolExecutor(1, "locking") as beside:
            locked = beside.submit(self._lock_store)
            backbone = self._load_backbone()
            self.detokenizer = self._detokenizer(text_up)
        chunk = options.chunk or CHUNK_MAX
        if not backbone.chunks and chunk < self.context:  # a prompt is one chunk
            log.warning(
                f"this family's prompts are computed whole: the context is {chunk} tokens;"
                " --chunk N makes it longer, in more memory"
            )
            self.context = chunk
        self.tier = self._open_tier(facts.top_k)
        pool = self._open_pool(facts.top_k)
        held = kv_budget(options.kv_tokens, self.context)
        sequences = kv_sequences(held, options.max_sequences)
        self.kv = KVCache(facts, backbone.dtype, devices_of(backbone), held, sequences)
        # that the KV cache will take: on the host its slabs' memory is touched as it fills
        self.kv_bytes = sequences * state_bytes(facts)
        if device.torch_device.type == "cpu":
            self.kv_bytes += self.kv.budget * kv_token_bytes(facts, kv_dtype(options))
        layout = self.store.layout
        self.engine = Engine(backbone, layout, pool, options.graphs)
        self.engine.tick = self.tick
        recent = min(DRAFT_RECENT, options.chunk or CHUNK_MAX, self.context)
        layer = self._draft_layer
        self.drafter = None if layer is None else Drafter(self.engine, layer, recent)
        self.engine.tier = pool.tier = self.tier
        if self.tier is not None:
            self.tier.probing = self.engine.first.can_probe
        self.notes = [
            f"store: {locked.result()}",
            *self._backbone_notes(backbone),
            f"kernels: {VARIANTS[best().variant]}",
            f"experts: {layout.shape.layers} layers of {layout.shape.experts}; tiles of an expert:"
            f" {layout.shape.tiles}, {byte_size(layout.expert_bytes // layout.shape.tiles)} each",
            f"context: {self.context} tokens; the KV cache holds {self.kv.budget} in {kv_dtype(options)}"
            + (", an approximation" if self.engine.kv_cache else ""),
        ]
        if self.drafter is not None:
            self.notes.append("guesses of next tokens: also by the checkpoint's own layer for that")

    def leases_kept(self) -> AbstractContextManager[None]:
        """Hosts on other machines know that this engine is there, while the block does something else."""
        return nullcontext() if self.machines is None else self.machines.kept()

    def _backbone_notes(self, backbone: AnyBackbone) -> list[str]:
        """Returns what each device has of the backbone, in a line each."""
        dtype = self.config.options.backbone_dtype
        if not isinstance(backbone, StagedBackbone):
            return [f"backbone: {byte_size(backbone.bytes)} {dtype} on {self.device.describe()}"]
        return [
            f"{card}: layers {part.decoder_layers.start + 1} to {part.decoder_layers.stop},"
            f" {byte_size(part.bytes)} {dtype} on {part.device.describe()}"
            for card, part in zip(self.config.options.cards, backbone.parts, strict=True)
        ]

    def _detokenizer(self, text_up: threading.Event) -> Detokenizer | None:
        """Returns the decoding half of the model's tokenizer, which a text process of this engine has loaded
        under limits; to a restarted coordinator the present one may come later."""
        if not has_tokenizer(self.config.model):
            return None
        if not ((self.config.runtime / DECODER).exists() or text_up.wait(TEXT_LIMIT)):
            raise PeerLost(f"the text process was not ready after {TEXT_LIMIT:.0f} s")
        return Detokenizer.read(self.config.runtime / DECODER)

    def _lock_store(self) -> str:
        """Lock the store's pages; the result in one line."""
        of = f" for the experts of {self.store.manifest.file}" if self.store.partial else ""
        return lock_pages(self.store.segment.array) + of

    def _open_tier(self, top_k: int) -> DiskTier | None:
        """Returns what has experts read that are not in memory; None where all are."""
        if not self.store.partial:
            return None
        layers, line = len(self.facts.moe_layers), self.control.line("reader", 0)
        nodes = self.config.workers.nodes if self.config.workers else 1
        return DiskTier(self.store, top_k, layers, self.sockets["reader"], line, nodes)

    def _load_drafter(
        self, model: Backbone, precision: Precision, progress: Callable[[int], None]
    ) -> DraftLayer | None:
        """Load the layer that drafts; None where there is none, or it is not used."""
        if not (self.facts.drafts and drafts(self.config.options, self.store.partial)):
            return None
        return DraftLayer(model, self.source, precision, DRAFT_TOKENS, progress)

    def bind_socket(self, role: str, largest: int = 0) -> None:
        """Open the socket to the children of a role. `largest`: bytes of the largest array that they send."""
        config, file = self.config, SOCKET_FILES[role]
        identity = (config.runtime, file, role, config.fingerprint, config.key)
        socket = ChildServerSocket(*identity, self.exits, self.to_supervisor, largest=largest, tick=self.tick)
        self.closing.callback(socket.close)
        self.sockets[role] = socket

    def _load_backbone(self) -> AnyBackbone:
        """Load the backbone from the checkpoint, or the disk cache where quantizing again would take long."""
        dtype, cache = self.config.options.backbone_dtype, None
        if isinstance(FORMATS.get(dtype), MatrixFormat) and self.source.worth_keeping(dtype):
            record = CacheRecord("backbone", self.source.name, dtype)
            cache = BackboneCache(self.config.cache, backbone_fingerprint(self.source, dtype), record)
        total = needs(self.source, self.config.options, self.config.options.format).backbone

        def progress(done: int) -> None:
            self.to_supervisor(Progress(STAGE, min(done, total), total))

        progress(0)
        kv = self.config.options.kv_dtype
        own = self.source.own_matrices
        precisions = [Precision(dtype, device, cache, own, kv) for device in self.devices]
        if len(precisions) > 1:
            backbone: AnyBackbone = self._staged_backbone(precisions, progress)
        else:
            backbone = self._backbone_of(precisions[0], progress)
        if cache is not None:
            cache.finish()
        return backbone

    def _staged_backbone(
        self, precisions: Sequence[Precision], progress: Callable[[int], None]
    ) -> StagedBackbone:
        """Load each device's layers."""
        spec, parts = model_spec(self.source.config), list[Backbone]()
        ends = list(accumulate(self.config.options.stages, initial=0))
        for precision, (start, end) in zip(precisions, pairwise(ends), strict=True):
            precision.device.use()
            before = sum(part.bytes for part in parts)
            further = partial(_further, progress, before)
            layers = range(start, end)
            parts.append(Backbone(self.source, spec, precision, self.context, further, layers))
        self.device.use()
        return StagedBackbone(parts)

    def _backbone_of(self, precision: Precision, progress: Callable[[int], None]) -> AnyBackbone:
        config = self.source.config
        if is_own(config):
            model = Backbone(self.source, model_spec(config), precision, self.context, progress)
            self._draft_layer = self._load_drafter(model, precision, partial(_further, progress, model.bytes))
            return model
        # here, because importing transformers' models takes seconds
        from pipeline.checkpoint.decoder import decoder_of
        from pipeline.checkpoint.tables import Parameters
        from pipeline.generic.backbone import GenericBackbone

        weights = self.closing.enter_context(self.source.tensors())
        assert isinstance(weights, Parameters)  # of a family without names of ours
        return GenericBackbone(facts_of(config), *decoder_of(config), weights, precision, progress)

    def _open_carrier(self, top_k: int) -> ArenaCarrier | SocketCarrier:
        """Open what carries Works to the workers and their answers back."""
        socket, shape, workers = self.sockets["worker"], self.store.layout.shape, self.config.workers
        if self.config.options.exchange == "zmq":
            return SocketCarrier(socket, shape.hidden)
        slots = [
            (rows, largest(workers, shape.experts, shape.tiles, rows, top_k))
            for rows in (min(NARROW_ROWS, self._rows), self._rows)
        ]
        prefix = engine_prefix(self.config.runtime)
        lanes = LaneShape(shape.hidden, *slots)
        reader = self.device if len(self.devices) == 1 else None  # of several none reads all answers
        carrier = ArenaCarrier(socket, library(), prefix, lanes, reader)
        self.closing.callback(carrier.close)
        return carrier

    def _own_compute(self) -> Compute | None:
        """Returns what computes Works of the workers in this process; None where workers are slowed down."""
        if self.config.options.host_slowdown > 1:
            return None
        return computing(store_kernel(self.store, guarded=True))

    def _open_pool(self, top_k: int) -> HostPool:
        config, store, shape = self.config, self.store, self.store.layout.shape
        cores = config.workers if config.workers else WorkerCores.equal(1)
        division, plan = Divider(cores, shape.experts, shape.tiles), config.options.lanes
        kind = HostPool if plan is None else LanesPool
        if config.workers:
            carrier = self.carrier = self._open_carrier(top_k)
            compute = self._own_compute()
            pool = kind(division, cores, compute, self.sockets["worker"], carrier, self.control)
        else:
            team = self.device.team
            if team is not None:
                team.linger(LINGER_NS)
            pool = kind(division, cores, computing(store_kernel(store, team), config.options.host_slowdown))
        if plan is not None and isinstance(pool, LanesPool):
            pool.use_lanes(plan, store.layout, self.machines)
            # A restarted one has clients, which wait as they would for an answer.
            pool.wait_machines(MACHINES_LIMIT if config.generation == 0 else WAIT_LIMIT)
        pool.wait_ready(CHILD_LIMIT)
        return pool

    def _open_machines(self) -> Machines | None:
        """Connect to the machines that hold the other lanes; returns None where there are none. Raises
        UsageError for a format that cannot be divided among machines."""
        config, layout, plan = self.config, self.store.layout, self.config.options.lanes
        if plan is None:
            return None
        if layout.head_bytes:
            raise UsageError(
                f"--format {config.options.format} is for one machine alone: use another, as int4"
            )
        if config.machines is None:
            if plan.part.whole:
                return None
            raise UsageError(
                f"lanes {plan.held} of {len(plan.bounds) - 1} are here, and no other machine is known"
            )
        format = config.options.format
        whole = self.source.fingerprint(format, layout.shape.tile)
        hello = HostHello(KERNELS, best().variant, whole, format, plan.bounds, plan.pieces)
        machines = Machines(config.machines, hello, self.exits, self.tick, plan.copies)
        self.closing.callback(machines.close)
        return machines


def _further(progress: Callable[[int], None], before: int, done: int) -> None:
    """Progress of a part, behind others."""
    progress(before + done)


def measure_chunks(engine: Engine, kv: KVCache, context: int) -> tuple[int, int]:
    """Returns the prefill tokens that take about CHUNK_SECONDS, by the fastest of up to three trials (a power
    of two, so that a little noise does not change it), and the larger chunk of an engine's only request.

    That is ALONE times as long; where experts are moved to the device, which takes as long for twice as many
    tokens, it is doubled for as long as it takes at most ALONE * CHUNK_SECONDS."""

    def trial(count: int) -> float:
        tokens = np.linspace(0, engine.backbone.facts.vocabulary - 1, count).astype(int).tolist()
        sequence = kv.allocate(count)
        started = time.perf_counter()
        engine.step([StepInput(TokenSpan(sequence, tokens), "none")], "prefill")
        seconds = time.perf_counter() - started
        kv.release(sequence)
        return seconds

    count, most = min(TRIAL_TOKENS, context), min(CHUNK_MAX, context)
    seconds: list[float] = []
    while len(seconds) < 3 and sum(seconds) < TRIAL_SECONDS:
        seconds.append(trial(count))
    wanted = count * CHUNK_SECONDS / min(seconds)
    chunk = int(min(max(2 ** int(np.log2(wanted)), 16), most))
    alone = min(ALONE * chunk, most)
    while engine.policy.uses_device and alone < most and 2 * trial(alone) <= ALONE * CHUNK_SECONDS:
        alone = min(2 * alone, most)
    return chunk, alone
