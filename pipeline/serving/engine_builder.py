"""Builds an engine inside the coordinator: model, device, sockets, store, backbone, expert pool, KV cache.

Runs in the engine's thread, which then owns everything that was built. Device memory for experts is opened by
the first policy that needs it (`device_memory.py`)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from pipeline.backbone.backbone import Backbone
from pipeline.backbone.disk_cache import BackboneCache
from pipeline.backbone.kv_cache import KVCache
from pipeline.backbone.linear import Precision
from pipeline.checkpoint.model_source import ModelSource
from pipeline.checkpoint.open import open_model
from pipeline.coordinator_config import CoordinatorConfig
from pipeline.device import Device, open_device
from pipeline.engine.engine import Engine
from pipeline.experts.host_pool import HostPool
from pipeline.experts.inline_pool import InlineExpertPool
from pipeline.experts.peers import ExitEvents, Tell
from pipeline.experts.worker_pool import WorkerPool
from pipeline.memory.limits import CHUNK_MAX, choose_context, full_memory_in_one_line, kv_budget
from pipeline.models.registry import model_spec
from pipeline.models.spec import ModelSpec
from pipeline.serving.child_sockets import ChildSockets
from pipeline.text.tokenizer import Tokenizer
from shm.control import ControlSegment
from shm.layout import FORMATS, BlockFormat
from shm.pinned import lock_pages
from shm.store import Store
from workers.kernels.native import VARIANTS, best

CHILD_LIMIT = 60.0  # seconds for workers and prefetcher to announce themselves


@dataclass(frozen=True)
class EngineParts:
    """An engine and what it was built from. `notes`: lines for a person; `closing` releases everything, in
    reverse order."""

    config: CoordinatorConfig
    source: ModelSource
    context: int  # tokens of prompt and answer together
    device: Device
    sockets: ChildSockets
    control: ControlSegment
    store: Store
    tokenizer: Tokenizer | None
    engine: Engine
    kv: KVCache
    to_supervisor: Tell
    closing: ExitStack
    notes: list[str]

    @property
    def kv_bytes(self) -> int:
        """What the KV cache takes when it is full."""
        backbone = self.engine.backbone
        return self.kv.budget * backbone.spec.kv_numbers_per_token * backbone.dtype.itemsize


@full_memory_in_one_line()
def build_engine(
    config: CoordinatorConfig, exit_events: ExitEvents, to_supervisor: Tell, closing: ExitStack
) -> EngineParts:
    """`exit_events`: of workers and prefetcher, as the supervisor reports them. Raises UsageError, ShmError,
    PeerLost or CudaError, each one line."""
    options = config.options
    source = open_model(config.model)
    spec = model_spec(source.config)
    context = choose_context(options.context, spec)
    device = open_device(options.device)
    closing.callback(device.close)
    # Bound before anything slow, so that the children find them.
    sockets = ChildSockets(config, exit_events, to_supervisor)
    closing.callback(sockets.close)
    if config.workers:
        rows = max(options.chunk or CHUNK_MAX, options.max_sequences)
        sockets.bind("worker", largest=4 * rows * spec.hidden)
    if config.slab:
        sockets.bind("prefetcher")
    control = ControlSegment.attach(config.control)
    closing.callback(control.close)
    store = Store.attach(config.store, config.fingerprint, writable=True)
    closing.callback(store.close)
    layout = store.layout

    with ThreadPoolExecutor(1, "locking") as beside:
        locked = beside.submit(lock_pages, store.segment.array)
        backbone = _load_backbone(config, source, spec, device, context)
    pool: HostPool
    if config.workers:
        pool = WorkerPool(sockets["worker"], control, config.workers, layout.shape.hidden)
    else:
        pool = InlineExpertPool(store, device.team, options.host_slowdown)
    pool.wait_ready(CHILD_LIMIT)  # workers load their kernels while this process reads the tokenizer
    tokenizer = Tokenizer.load(config.model)
    kv = KVCache(spec, backbone.dtype, device.torch_device, kv_budget(options.kv_tokens, context))
    engine = Engine(backbone, layout, device, pool, None)

    library = best()
    missing = "torch; none were compiled: see launch.py doctor"
    size = f"{backbone.bytes / 1e6:.1f} MB {options.backbone_dtype}"
    notes = [
        f"store: {locked.result()}",
        f"backbone: {size} on {device.describe()}",
        f"kernels: {missing if library is None else VARIANTS[library.variant]}",
        f"experts: {layout.shape.layers} x {layout.shape.experts}, {layout.shape.tiles} tiles of"
        f" {layout.tile_bytes / 1e6:.2f} MB each",
        f"context: {context} tokens; the KV cache holds {kv.budget}",
    ]
    return EngineParts(
        config=config,
        source=source,
        context=context,
        device=device,
        sockets=sockets,
        control=control,
        store=store,
        tokenizer=tokenizer,
        engine=engine,
        kv=kv,
        to_supervisor=to_supervisor,
        closing=closing,
        notes=notes,
    )


def _load_backbone(
    config: CoordinatorConfig, source: ModelSource, spec: ModelSpec, device: Device, context: int
) -> Backbone:
    """From the checkpoint, or from this machine's disk cache where quantizing it again would take long."""
    dtype = config.options.backbone_dtype
    cache = None
    if isinstance(FORMATS[dtype], BlockFormat) and source.worth_keeping(dtype):
        cache = BackboneCache(config.cache, source.fingerprint(f"backbone {dtype}", 0))
    backbone = Backbone(source, spec, Precision(dtype, device, cache), context)
    if cache is not None:
        cache.finish()
    return backbone
