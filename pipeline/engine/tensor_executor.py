"""Carries out a policy's decisions with tensors, on the device and on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from pipeline.arrays import FloatArray, Phase
from pipeline.counters import PhaseCounters, StepClock
from pipeline.device import Device
from pipeline.engine.driver import LayerDecision
from pipeline.engine.layers import Attended, StepLayers
from pipeline.engine.observer import Observer, with_observers
from pipeline.engine.timing import Timing
from pipeline.experts.device_share import DeviceMemory
from pipeline.experts.device_work import DeviceWork
from pipeline.experts.empty_memory import EmptyDeviceMemory
from pipeline.experts.host_pool import HostPool, Ticket
from pipeline.experts.host_shards import divide_into_shards
from pipeline.experts.shares import Share, Split, split_layer
from pipeline.policies.view import Ahead, Routing, Signals, Target
from shm.mask import DENSE, Mask, Tally


@dataclass
class TensorExecutor:
    """The expert layers of one step: a `LayerExecutor`, called in the order of `PolicyDriver.layer`."""

    layers: StepLayers
    device: Device
    memory: DeviceMemory | EmptyDeviceMemory
    pool: HostPool
    timing: Timing
    observers: Sequence[Observer]
    tiles: int  # of an expert
    phase: Phase
    counters: PhaseCounters
    clock: StepClock
    h: Tensor  # float32 [R, H], the residual stream; `end` adds the experts' output
    only_waits: list[bool]  # by layer, in the latest step: the host's share is all of it

    # of the layer that is being computed:
    _attended: Attended = field(init=False)
    _x_host: FloatArray = field(init=False)
    _split: Split = field(init=False)
    _ticket: Ticket = field(init=False)
    _device_work: DeviceWork = field(init=False)
    _outputs: list[Tensor] = field(init=False)  # float32 [R, H] each: their sum is added to h

    def read(self, layer: int, probes: Sequence[int], own: bool) -> Signals:
        """Computes the layer up to its experts. Copies x, the router's logits and the probes' to the host
        together."""
        wanted = with_observers(layer, probes, self.observers)
        self._attended = self.layers.attend(layer, self.h, own, wanted)
        self.h = self._attended.h
        self.clock.mark("attention")
        self._x_host, *read = self.layers.read()
        self.clock.mark("read")
        if self.only_waits[layer] and self.phase == "decode" and self.device.on_host:
            self.pool.announce()  # this layer is probably planned as in the step before
        self.memory.collect_landings()
        return Signals(read.pop(0) if own else None, dict(zip(wanted, read, strict=True)))

    def begin(self, decision: LayerDecision[Ticket]) -> None:
        layer = decision.layer
        for observer in self.observers:
            observer.layer(decision, self._x_host)
        active = decision.gated.routing.active.experts
        self.counters.book_hits(layer, decision.resident.take(active).tolist(), self.tiles)
        self.memory.retarget(decision.targets)
        self._split = split = split_layer(decision.gated.routing, decision.cut, decision.resident, self.tiles)
        self.counters.fidelity.book(decision.gated, decision.cut, self.tiles, decision.stale)
        self.clock.mark("plan")

        self._outputs = []
        if self.device.on_host:  # the device shares the workers' cores: computing beside them gains nothing
            self._compute_shared_experts()
        begun = decision.begun
        if begun is None:
            self.only_waits[layer] = waits = not len(split.device.items)
            begun = self._submit(layer, split.host, self._x_host, decision.mask, waits)
        self._ticket = begun
        x, mask = self._attended.x, decision.mask
        self._device_work = self.memory.begin(layer, split.device, x, mask, self.clock)
        self.clock.mark("submit")

    def begin_early(self, layer: int, ahead: Ahead, mask: Mask) -> Ticket:
        share = split_layer(ahead.gated.routing, ahead.cut, self.memory.residency[layer], self.tiles).host
        # a copy: this layer's x is overwritten before the next layer's result is read
        ticket = self._submit(layer, share, self._x_host.copy(), mask, False)
        self.clock.mark("submit")
        return ticket

    def prefetch(self, targets: Sequence[Target], no_room: int) -> None:
        self.counters.wanted_experts += no_room
        self.memory.prefetch(targets)

    def prefetch_channels(self, layer: int, routing: Routing, mask: Mask) -> None:
        target = self.memory.target[layer]
        share = split_layer(routing, np.full_like(target, self.tiles), target, self.tiles).device
        self.memory.prefetch_channels(layer, share, self._attended.x, mask)

    def compute(self, decision: LayerDecision[Ticket]) -> None:
        self.clock.mark("plan")
        layer, split = decision.layer, self._split
        if not self.device.on_host:
            self._compute_shared_experts()
        if len(split.device.items):
            self._outputs.append(self.memory.compute(self._device_work, self._attended.x, self.clock))
            self.timing.device_began(split.device)
        host = [(split.host, self._ticket)]
        if missing := self._device_work.missing:  # the prefetcher is down: the workers compute them
            late = split.host_share_of(missing)
            host.append((late, self._submit(layer, late, self._x_host, decision.mask, True)))
        for share, ticket in host:
            if ticket.shards:
                self._outputs.append(ticket.result_on(self.device))
                self.timing.host_ends(ticket.busy)
                self.clock.mark("wait")
            self.counters.host_tiles += share.tiles
            self.counters.host_busy += ticket.busy
        if decision.mask != DENSE:
            on_device = self.memory.tally(self._device_work)
            tally = Tally.of([on_device, *(ticket.tally for _, ticket in host)])
            self.counters.book_mask(decision.gated.routing.total_weight, tally)

    def end(self, targets: Sequence[Target]) -> None:
        self.memory.end_layer(targets)
        if self._outputs:
            for output in self._outputs[1:]:
                self._outputs[0].add_(output)
            self.h.add_(self._outputs[0])  # in place: a graph reads it there
        self.clock.mark("combine")

    def abandon(self, early: Ticket | None) -> None:
        """The step fails: end what its layer has begun, and the next one's early share."""
        for _ in self._device_work.landing if hasattr(self, "_device_work") else ():
            pass  # orders end, and slots become free
        for ticket in filter(None, (early, getattr(self, "_ticket", None))):
            ticket.abandon()

    def _compute_shared_experts(self) -> None:
        if (y := self._attended.shared()) is not None:
            self._outputs.append(y)
        self.clock.mark("shared")

    def _submit(self, layer: int, share: Share, x: FloatArray, mask: Mask, waits: bool) -> Ticket:
        self.timing.host_begins(share, waits)
        shards = divide_into_shards(share, self.pool.cores, self.phase, len(x))
        return self.pool.submit(layer, shards, x, waits, mask)
