"""Opens an engine's device memory for experts: the slab, the link to the prefetcher, and the tile mover."""

from __future__ import annotations

from pipeline.errors import PeerLost
from pipeline.experts.channel_share import ChannelMemory
from pipeline.experts.copy_thread import start_copy_thread
from pipeline.experts.device_share import DeviceMemory
from pipeline.experts.expert_cache import ExpertCache
from pipeline.experts.fetch_link import FetchLink
from pipeline.experts.tile_mover import TileMover
from pipeline.memory.limits import cache_tiles, staging_tiles
from pipeline.serving.engine_parts import CHILD_LIMIT, EngineParts
from protocol.messages import Needed
from shm.segment import byte_size, engine_prefix
from workers.copiers import paced


def open_device_memory(parts: EngineParts) -> DeviceMemory:
    """Memory for the configured share of all expert tiles, and slots to stream through. Raises UsageError
    where it does not fit, PeerLost where no prefetcher announces itself."""
    config, device, engine = parts.config, parts.device, parts.engine
    layout, shape = engine.layout, engine.layout.shape
    capacity = cache_tiles(config.options.expert_cache, shape.layers * shape.experts * shape.tiles)
    staging = staging_tiles(shape.tiles, engine.shape.top_k, layout.head_bytes > 0)
    slots = capacity + staging
    beside = engine.backbone.pending_bytes + device.heads_bytes(layout)
    device.check_memory(slots * layout.tile_bytes, parts.kv_bytes, beside)
    name = f"{engine_prefix(config.runtime)}slab-{config.incarnation}"
    slab = device.open_slab(name, slots, layout.tile_bytes, parts.tick)
    parts.closing.callback(slab.close)

    own_process = config.options.prefetcher == "process"
    if "prefetcher" not in parts.sockets:
        parts.bind_socket("prefetcher")
        if own_process:
            parts.to_supervisor(Needed("prefetcher"))
    socket = parts.sockets["prefetcher"]
    if own_process:
        link = FetchLink(socket, slab.address(), parts.control.line("prefetcher", 0))
    else:
        link = FetchLink(socket, None, None)
        copier = paced(slab.local_copier(parts.store), config.options.link_gbps, lambda: None)
        parts.closing.callback(start_copy_thread(config, parts.store, copier, socket, parts.exits))
    if not link.wait_up(CHILD_LIMIT):
        raise PeerLost(f"no prefetcher was ready after {CHILD_LIMIT:.0f} s")

    parts.notes.extend(link.notes)
    parts.notes.append(f"slab: {capacity} tiles and {staging} for streaming")
    cache = ExpertCache(shape.layers, shape.experts, shape.tiles, capacity, slots, device.fence)
    mover = TileMover(cache, link, device)
    if not layout.head_bytes:
        return DeviceMemory(mover, slab, device.expert_kernel(layout))
    heads = device.load_heads(parts.store, parts.tick)
    parts.closing.callback(heads.clear)
    parts.notes.append(f"up matrices: {byte_size(layout.head_stride * len(heads) * shape.experts)} resident")
    return ChannelMemory(mover, slab, device.channel_kernel(layout), heads, layout)
