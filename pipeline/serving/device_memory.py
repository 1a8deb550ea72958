"""Opens an engine's device memory for experts: the slab, its copier, and the link to the prefetcher."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pipeline.errors import NoRoom, PrefetcherLost
from pipeline.experts.channel_share import ChannelMemory
from pipeline.experts.device_share import DeviceMemory, Slab
from pipeline.experts.link import PrefetchLink
from pipeline.memory.limits import cache_tiles, staging_tiles
from pipeline.serving.engine_parts import CHILD_LIMIT, EngineParts
from protocol.messages import Needed
from shm.segment import byte_size, engine_prefix
from workers.copiers import EmulatedLink
from workers.cuda import CudaError

# Seconds that a restarted coordinator waits for the memory of the engine before it: its prefetcher may take
# so long to unlock its pages after it was killed, and keeps the old slab until then.
ROOM_LIMIT = 90.0

log = logging.getLogger(__name__)


class DeviceMemoryOpener:
    """Opens one engine's. What a failed attempt has opened serves the next one: memory that another process
    may have mapped cannot be freed."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._opened: Slab | None = None

    def open(self) -> DeviceMemory:
        """Return memory for the configured share of all expert tiles, and slots to stream through. Raises
        NoRoom where it does not fit, CudaError, or PrefetcherLost where no prefetcher announces itself."""
        parts = self._parts
        device, engine = parts.device, parts.engine
        layout = engine.layout
        slab = self._opened = self._opened or _open(parts)
        if not slab.link.wait_up(CHILD_LIMIT):
            if not slab.link.refusal:
                raise PrefetcherLost(f"no prefetcher was ready after {CHILD_LIMIT:.0f} s")
            log.warning(f"no tile is prefetched, because no other process maps the slab: {slab.link.refusal}")
        staging = slab.memory.slots - slab.capacity
        parts.notes.append(f"slab: {slab.capacity} tiles and {staging} for streaming")
        if not layout.head_bytes:
            return DeviceMemory(engine.shape, device, slab, device.expert_kernel(layout))
        heads = device.load_heads(parts.store, parts.tick)
        parts.closing.callback(heads.clear)
        resident = byte_size(layout.head_stride * len(heads) * layout.shape.experts)
        parts.notes.append(f"up matrices: {resident} resident")
        return ChannelMemory(engine.shape, device, slab, device.channel_kernel(layout), heads, layout)


def _open(parts: EngineParts) -> Slab:
    config, device, engine = parts.config, parts.device, parts.engine
    layout, shape = engine.layout, engine.layout.shape
    capacity = cache_tiles(config.options.expert_cache, shape.layers * shape.experts * shape.tiles)
    fewest = staging_tiles(shape.tiles, engine.shape.top_k, layout.head_bytes > 0)
    slots = capacity + (config.options.staging or fewest)
    beside = engine.backbone.pending_bytes + device.heads_bytes(layout) + device.process_bytes
    beside += engine.graphs.planned_bytes

    def check() -> None:
        device.check_memory(slots * layout.tile_bytes, parts.kv_bytes, beside)

    wait_for_room(check, ROOM_LIMIT if config.incarnation > 0 else 0.0, parts.tick)
    name = f"{engine_prefix(config.runtime)}slab-{config.incarnation}"
    memory = device.open_slab(name, slots, layout.tile_bytes, parts.tick)
    parts.closing.callback(memory.close)
    own, prefetcher = parts.control.line("coordinator", 0), parts.control.line("prefetcher", 0)
    gbps = config.options.link_gbps
    emulated = None if gbps is None else EmulatedLink(gbps, own, prefetcher)
    copier = memory.copier(parts.store, emulated)
    parts.closing.callback(copier.close)
    if "prefetcher" not in parts.sockets:
        parts.bind_socket("prefetcher")
        parts.to_supervisor(Needed("prefetcher"))
    try:
        address = memory.address()
    except CudaError as e:
        log.warning(f"the slab cannot be shared: {e}")
        address = None
    return Slab(memory, capacity, PrefetchLink(parts.sockets["prefetcher"], address, prefetcher), copier)


def wait_for_room(check: Callable[[], None], limit: float, tick: Callable[[], None]) -> None:
    """Return when `check` raises no NoRoom any more; raises it after `limit` seconds."""
    deadline = time.monotonic() + limit
    while True:
        try:
            return check()
        except NoRoom as e:
            if time.monotonic() >= deadline:
                raise
            log.info(f"waiting for the engine before this one to release its memory: {e}")
        tick()
        time.sleep(0.5)
