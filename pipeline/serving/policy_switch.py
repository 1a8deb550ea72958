"""Changes an engine's policy, collects its inputs, and opens the device memory for experts that it needs: the
slab, its copier, and the link to the prefetcher. Used by the engine's thread alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from pipeline.arrays import Counts
from pipeline.calibration.cost_probe import costs_for
from pipeline.calibration.file import calibration_path, load
from pipeline.calibration.heat import ENOUGH_TOKENS, Heat
from pipeline.errors import CalibrationError, NoRoom, PolicyError, PrefetcherLost
from pipeline.experts.channel_share import ChannelMemory
from pipeline.experts.device_share import DeviceMemory, Slab
from pipeline.experts.link import PrefetchLink
from pipeline.memory.needs import cache_tiles, full_memory_in_one_line, needs_all, staging_tiles
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import Costs
from pipeline.policies.presets import canonical, make_policy
from pipeline.policies.view import Policy, PolicyRequest
from pipeline.serving.engine_parts import CHILD_LIMIT, EngineParts
from protocol.messages import Needed
from shm.disk_cache import CacheRecord
from shm.segment import byte_size, engine_prefix, new_name
from workers.copiers import EmulatedLink
from workers.cuda import CudaError

# Seconds that a restarted coordinator waits for the memory of the engine before it: its prefetcher may take
# so long to unlock its pages after it was killed, and keeps the old slab until then.
ROOM_LIMIT = 90.0

log = logging.getLogger(__name__)


class PolicySwitch:
    """Gives policies their costs and calibration. `current`: the request for the policy in use."""

    def __init__(self, parts: EngineParts) -> None:
        """Sets the configured policy; errors as in `set`."""
        self._parts, self._opener = parts, DeviceMemoryOpener(parts)
        # What is kept for later starts is of the experts, wherever they lie.
        self._config = replace(parts.config, fingerprint=parts.store.manifest.experts)
        self._costs: list[Costs] = []  # of each device; none until a policy has needed them
        self._calibration_file = calibration_path(parts.config.cache, parts.source)
        self._heat: Heat | None = None  # None until a policy has needed it
        options = parts.config.options
        self.current = PolicyRequest(options.policy or "all-host", options.policy_options)
        parts.notes.extend(self.set(self.current))

    @full_memory_in_one_line()
    def set(self, request: PolicyRequest, counted: bool = True) -> tuple[str, ...]:
        """Use this policy from the next step on; the first that keeps experts on the device opens the memory
        for them. Without `counted` the routing of its steps is not counted. Returns notes. Raises UsageError,
        ShmError, CudaError, PrefetcherLost or DiskFailed; the policy in use is kept then. Raises PeerLost
        where the engine cannot go on."""
        engine = self._parts.engine
        policy: Policy = make_policy(request, self._parts.config.options.seed)
        if policy.runs_ahead and self._parts.machines is not None:
            why = "on other machines, experts of the device's would have another input, too"
            raise PolicyError(f"policy {policy.name} is for one machine alone, unless with early=0: {why}")
        if self._parts.tier is not None and (why := needs_all(policy, engine.layout.format)):
            raise PolicyError(why)
        if not policy.exact:  # before it is asked to be calibrated
            engine.backbone.check_choices(f"policy {policy.name}")
        for index, stage in enumerate(engine.stages):
            if policy.uses_device and stage.memory.slab is None:
                with self._parts.leases_kept():  # it may wait for longer than a lease
                    stage.memory = self._opener.open(index)
                if (tier := self._parts.tier) is not None:
                    stage.memory.mover.stored = tier
                    tier.movers.append(stage.memory.mover)
        costs, calibration = self._costs_for(policy), self._calibration_for(policy)
        follow = self._parts.config.options.costs is None  # those of a file are meant as they are
        heat = self._heat_for(policy)
        notes = engine.set_policy(policy, costs, calibration, heat=heat, counted=counted, follow=follow)
        self.current, self._counted = canonical(request, self._parts.config.options.seed), counted
        return notes

    @property
    def costs(self) -> Costs | None:
        """Returns the costs of the first device."""
        return self._costs[0] if self._costs else None

    @property
    def calibrated(self) -> bool:
        """Returns whether the model has a calibration on this machine."""
        return self._calibration_file.exists()

    def reset(self) -> None:
        """Make the policy in use anew: without state of earlier steps, with the present inputs."""
        self.set(self.current, self._counted)

    def keep_heat(self, least: int | None = None) -> None:
        """Keep how often experts were used for later starts, where the policy in use begins with that and
        `least` tokens were counted since; by default as many as are worth it."""
        engine = self._parts.engine
        if self._heat is not None and engine.policy.keeps_heat:
            self._heat.keep(engine.popularity, ENOUGH_TOKENS if least is None else least)

    def _heat_for(self, policy: Policy) -> Counts | None:
        """Returns the counts of earlier starts, None without any and where they are not needed."""
        if not policy.keeps_heat:
            return None
        if self._heat is None:
            config, engine = self._config, self._parts.engine
            record = CacheRecord("store", self._parts.source.name, config.options.format)
            self._heat = Heat(config.cache / config.fingerprint, record, engine.shape)
            self._parts.closing.callback(self.keep_heat, least=1)
        return self._heat.earlier

    def _costs_for(self, policy: Policy) -> list[Costs] | None:
        """Returns each device's costs, from a file, or measured now or earlier; None if not needed. Raises
        PolicyError."""
        if not policy.needs_costs:
            return None
        parts = self._parts
        for index in range(len(self._costs), len(parts.engine.stages)):
            self._costs.append(costs_for(parts.engine, self._config, parts.context, index))
        return self._costs

    def _calibration_for(self, policy: Policy) -> Calibration | None:
        """Returns the calibration, None without a usable file. Raises CalibrationError where the policy needs
        it."""
        if not self.calibrated:
            return None
        try:
            return load(self._calibration_file)
        except CalibrationError as e:
            if policy.needs_calibration:
                raise
            log.warning("%s", e)
            return None


class DeviceMemoryOpener:
    """Opens the device memory for one engine's experts. What a failed attempt has opened serves the next one:
    memory that another process may have mapped cannot be freed."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._opened: dict[int, Slab] = {}

    def open(self, index: int) -> DeviceMemory:
        """Return a device's memory for the configured share of the tiles of its layers' experts, and slots to
        stream through. Raises NoRoom where it does not fit, CudaError, or PrefetcherLost where no prefetcher
        announces itself."""
        parts = self._parts
        engine, stage = parts.engine, parts.engine.stages[index]
        device, layout = stage.device, engine.layout
        device.use()
        slab = self._opened[index] = self._opened.get(index) or _open(parts, index)
        if not slab.link.wait_up(CHILD_LIMIT):
            if not slab.link.refusal:
                raise PrefetcherLost(f"no prefetcher was ready after {CHILD_LIMIT:.0f} s")
            log.warning(f"no tile is prefetched, because no other process maps the slab: {slab.link.refusal}")
        staging = slab.memory.slots - slab.capacity
        of = f" of {parts.config.options.cards[index]}" if len(engine.stages) > 1 else ""
        parts.notes.append(f"slab{of}: {slab.capacity} tiles and {staging} for streaming")
        if not layout.head_bytes:
            return DeviceMemory(engine.shape, device, slab, device.expert_kernel(layout))
        heads = device.load_heads(parts.store, stage.layers, parts.tick)
        parts.closing.callback(heads.clear)
        resident = byte_size(layout.head_stride * len(heads) * layout.shape.experts)
        parts.notes.append(f"up matrices: {resident} resident")
        return ChannelMemory(engine.shape, device, slab, device.channel_kernel(layout), heads, layout)


def _open(parts: EngineParts, index: int) -> Slab:
    config, engine, stage = parts.config, parts.engine, parts.engine.stages[index]
    device, layout = stage.device, engine.layout
    capacity = cache_tiles(config.options.expert_cache, stage.tiles)
    fewest = staging_tiles(layout.shape.tiles, engine.shape.top_k, layout.head_bytes > 0)
    slots = capacity + (config.options.staging or fewest)
    beside = len(stage.layers) * device.heads_bytes(layout) + device.process_bytes
    beside += stage.graphs.planned_bytes

    def check() -> None:
        device.check_memory(slots * layout.tile_bytes, parts.kv_bytes, beside)

    wait_for_room(check, ROOM_LIMIT if config.generation > 0 else 0.0, parts.tick)
    name = new_name(engine_prefix(config.runtime), "slab")
    memory = device.open_slab(name, slots, layout.tile_bytes, parts.tick)
    parts.closing.callback(memory.close)
    own, prefetcher = parts.control.line("coordinator", index), parts.control.line("prefetcher", index)
    gbps = config.options.link_of(index)
    emulated = None if gbps is None else EmulatedLink(gbps, own, prefetcher, parts.tick)
    other = engine.first.memory.slab
    copier = memory.copier(parts.store, emulated, None if other is None else other.copier)
    parts.closing.callback(copier.close)
    if "prefetcher" not in parts.sockets:
        parts.bind_socket("prefetcher")
        parts.to_supervisor(Needed("prefetcher"))
    try:
        address = memory.address()
    except CudaError as e:
        log.warning(f"the slab cannot be shared: {e}")
        address = None
    link = PrefetchLink(parts.sockets["prefetcher"], address, prefetcher, index, parts.store.place)
    return Slab(memory, capacity, link, copier)


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
