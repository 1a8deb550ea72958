"""Opens an engine's device memory for experts: the slab, the link to the prefetcher, and the tile mover."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pipeline.device import SlabMemory
from pipeline.errors import NoRoom, PrefetcherLost
from pipeline.experts.channel_share import ChannelMemory
from pipeline.experts.copy_thread import start_copy_thread
from pipeline.experts.device_share import DeviceMemory
from pipeline.experts.expert_cache import ExpertCache
from pipeline.experts.fetch_link import THREAD_STALL_LIMIT, FetchLink
from pipeline.experts.landings import Landings
from pipeline.experts.progress import CopyProgress
from pipeline.experts.tile_mover import TileMover
from pipeline.memory.limits import cache_tiles, staging_tiles
from pipeline.serving.engine_parts import CHILD_LIMIT, EngineParts
from pipeline.serving.prefetcher_kind import prefetcher_kind
from protocol.messages import AttachSlab, Needed
from shm.segment import byte_size, engine_prefix
from workers.copiers import paced
from workers.cuda import CudaError

# Seconds that a restarted coordinator waits for the memory of the engine before it: its prefetcher may take
# so long to unlock its pages after it was killed, and keeps the old slab until then.
ROOM_LIMIT = 90.0

log = logging.getLogger(__name__)


@dataclass
class SlabAndLink:
    """The slab and the link to its prefetcher, which may not be up yet."""

    slab: SlabMemory
    capacity: int  # tiles that may be kept
    link: FetchLink


class DeviceMemoryOpener:
    """Opens one engine's. What a failed attempt has opened serves the next one: memory that another process
    may have mapped cannot be freed."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._opened: SlabAndLink | None = None

    def open(self) -> DeviceMemory:
        """Memory for the configured share of all expert tiles, and slots to stream through. Raises NoRoom
        where it does not fit, CudaError, or PrefetcherLost where no prefetcher announces itself."""
        parts = self._parts
        device, engine = parts.device, parts.engine
        layout, shape = engine.layout, engine.layout.shape
        opened = self._opened = self._opened or _open(parts)
        slab, link = opened.slab, opened.link
        up = link.wait_up(CHILD_LIMIT)
        if link.refusal:
            log.warning(f"the prefetcher is a thread, because a process cannot map the slab: {link.refusal}")
            link = opened.link = _thread_link(parts, slab, index=1)  # 0 is the process, which stays idle
            up = link.wait_up(CHILD_LIMIT)
        if not up:
            raise PrefetcherLost(f"no prefetcher was ready after {CHILD_LIMIT:.0f} s")

        parts.notes.extend(link.notes)
        staging = slab.slots - opened.capacity
        parts.notes.append(f"slab: {opened.capacity} tiles and {staging} for streaming")
        sizes = shape.layers, shape.experts, shape.tiles
        mover = TileMover(ExpertCache(*sizes, opened.capacity, slab.slots, device.fence), link, device)
        if not layout.head_bytes:
            kernel = device.expert_kernel(layout)
            return DeviceMemory(mover, slab, kernel)
        heads = device.load_heads(parts.store, parts.tick)
        parts.closing.callback(heads.clear)
        resident = byte_size(layout.head_stride * len(heads) * shape.experts)
        parts.notes.append(f"up matrices: {resident} resident")
        return ChannelMemory(mover, slab, device.channel_kernel(layout), heads, layout)


def _open(parts: EngineParts) -> SlabAndLink:
    config, device, engine = parts.config, parts.device, parts.engine
    layout, shape = engine.layout, engine.layout.shape
    capacity = cache_tiles(config.options.expert_cache, shape.layers * shape.experts * shape.tiles)
    fewest = staging_tiles(shape.tiles, engine.shape.top_k, layout.head_bytes > 0)
    slots = capacity + (config.options.staging or fewest)
    kind = prefetcher_kind(config.options.prefetcher, device, config.cache, parts.tick)
    own_process = kind != "thread"
    beside = engine.backbone.pending_bytes + device.heads_bytes(layout) + own_process * device.process_bytes
    beside += engine.graphs.planned_bytes

    def check() -> None:
        device.check_memory(slots * layout.tile_bytes, parts.kv_bytes, beside)

    wait_for_room(check, ROOM_LIMIT if config.incarnation > 0 else 0.0, parts.tick)
    name = f"{engine_prefix(config.runtime)}slab-{config.incarnation}"
    slab = device.open_slab(name, slots, layout.tile_bytes, parts.tick)
    parts.closing.callback(slab.close)
    address: AttachSlab | None = None
    if own_process:
        try:
            address = slab.address()
            if config.options.landings == "messages":
                address = replace(address, flags="")
        except CudaError as e:
            log.warning(f"the prefetcher is a thread, because the slab cannot be shared: {e}")
    known = "prefetcher" in parts.sockets
    if not known:
        parts.bind_socket("prefetcher")
    if address is None:
        started = config.slab and config.options.prefetcher != "thread"  # a process, which stays idle
        return SlabAndLink(slab, capacity, _thread_link(parts, slab, index=int(started)))
    if not known:
        parts.to_supervisor(Needed("prefetcher"))
    line, landings = parts.control.line("prefetcher", 0), _landings(parts, slab)
    link = FetchLink(parts.sockets["prefetcher"], address, line, kind=kind, landings=landings)
    return SlabAndLink(slab, capacity, link)


def _thread_link(parts: EngineParts, slab: SlabMemory, index: int) -> FetchLink:
    socket, exits = parts.sockets["prefetcher"], parts.exits
    progress = CopyProgress()
    copier = paced(slab.local_copier(parts.store), parts.config.options.link_gbps, progress.tick)
    locks = slab.locks
    # Page-locking may wait for the device, and hold up the driver's calls of this process meanwhile: also the
    # copies that the device waits for.
    landings = _landings(parts, slab, lambda: locks is None or locks.ended) if copier.flags else None
    stop = start_copy_thread(parts.config, parts.store, copier, socket, exits, progress, index)
    parts.closing.callback(stop)
    limit = THREAD_STALL_LIMIT
    return FetchLink(socket, None, progress, index=index, landings=landings, stall_limit=limit)


def _landings(
    parts: EngineParts, slab: SlabMemory, ready: Callable[[], bool] = lambda: True
) -> Landings | None:
    if slab.flags is None or parts.config.options.landings == "messages":
        return None
    landings = Landings(slab.flags, slab.wait_landing, ready=ready)
    parts.closing.callback(landings.close)
    return landings


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
