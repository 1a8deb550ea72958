"""One step through the model: the heart of the project (DESIGN.md section 5).

The engine executes plans and decides nothing: what is resident and who computes what comes from the
policy, as arrays. It knows no requests, no clients and no text. Used by one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.accounting import Accounting, PhaseCounters, StepClock
from pipeline.device import Device, SlabMemory
from pipeline.errors import PlanError, PolicyError
from pipeline.host_pool import HostPool
from pipeline.models.backbone import Backbone
from pipeline.models.batch import Slice
from pipeline.policies.costs import Costs
from pipeline.policies.view import FloatArray, IntArray, ModelShape, Phase, Policy, Routing, Target, View
from pipeline.split import Missing, Split, split_layer
from pipeline.tile_mover import TileMover
from shm.layout import StoreLayout

Wanted = Literal["none", "last", "all"]
Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True)
class Piece:
    """Consecutive new tokens of one sequence, and which rows' logits are wanted."""

    slice: Slice
    wanted: Wanted


@dataclass(frozen=True)
class DeviceMemory:
    """What an engine has that can keep experts on its device."""

    mover: TileMover
    slab: SlabMemory


class Engine:
    """The model on one device with its workers, under one policy at a time."""

    def __init__(
        self,
        backbone: Backbone,
        layout: StoreLayout,
        device: Device,
        pool: HostPool,
        memory: DeviceMemory | None,
    ) -> None:
        """`memory` None: no slab yet; only policies with `uses_device` False can be set before there is."""
        s = layout.shape
        self.backbone = backbone
        self.layout = layout
        self.device = device
        self.pool = pool
        self.memory = memory
        self.shape = ModelShape(s.layers, s.experts, s.tiles, backbone.spec.top_k)
        self.accounting = Accounting(layout.tile_bytes)
        self.policy: Policy
        self.kernel = device.expert_kernel(layout)
        self._popularity = np.zeros((s.layers, s.experts), np.int64)
        self._nothing: IntArray = np.zeros((s.layers, s.experts), np.int32)
        self._costs: Costs | None = None
        self._step = 0

    def set_policy(self, policy: Policy, costs: Costs | None) -> tuple[str, ...]:
        """Use a policy from the next step on: its placement is resident when this returns, unless there is
        no prefetcher. Returns its notes. Raises PolicyError where it needs a slab and there is none."""
        if policy.uses_device and self.memory is None:
            raise PolicyError(f"policy {policy.name} keeps experts on the device, and has no room there")
        self.policy, self._costs, self._step = policy, costs, 0
        view = self._view("decode")
        placement = policy.placement(view)
        if self.memory is not None:
            every = np.ndindex(placement.shape)
            self.memory.mover.retarget(Target(i, e, int(placement[i, e])) for i, e in every)
            if not self.memory.mover.settle():
                return *policy.notes(view), "the prefetcher is away: experts are placed when it is back"
        return policy.notes(view)

    def forget_trials(self) -> None:
        """Start counting anew: what ran so far were trials, not requests."""
        self.accounting = Accounting(self.layout.tile_bytes)
        self._popularity[:] = 0

    def keep_up(self) -> None:
        """Take in who has come and who has died, whether the next layer needs them or not."""
        self.pool.update(0)
        if self.memory is not None:
            self.memory.mover.keep_up()

    @torch.inference_mode()
    def step(self, pieces: Sequence[Piece], phase: Phase) -> list[FloatArray]:
        """Run the pieces' tokens through the model. Returns each piece's wanted logits, float32 [n,
        vocabulary], and leaves the sequences' KV advanced. Raises RunFailed where the workers cannot compute
        it: the sequences are then as they were."""
        self.keep_up()
        model, device, policy = self.backbone, self.device, self.policy
        counters = self.accounting.phases[phase]
        clock = StepClock(counters)
        view = self._view(phase)
        batch = model.batch([p.slice for p in pieces])
        device.prepare(model.largest_product(batch.rows))
        h = model.embed(batch)
        for layer in range(self.shape.layers):
            h = model.attention(layer, h, batch)
            x = model.moe_input(layer, h)
            logits = model.router(layer, x)
            clock.mark("attention")

            x_host, logits_host = device.to_host(x, logits)
            clock.mark("read")

            routing = model.spec.router(logits_host)
            split = self._plan(layer, routing, view)
            clock.mark("plan")

            # On the workers' own cores nothing is gained by computing beside them.
            y = model.shared_experts(layer, x) if device.on_host else None
            clock.mark("shared")

            ticket = self.pool.submit(layer, split.host, x_host, phase)
            clock.mark("submit")

            if not device.on_host:
                y = model.shared_experts(layer, x)
                clock.mark("shared")

            routed, left = self._run_on_device(layer, split, x, counters)
            y = _sum(y, routed)
            clock.mark("device")

            tickets = [(split.host, ticket)]
            if left:  # the prefetcher is gone: what it was to bring is the workers' now
                late = split.handed_over(left)
                tickets.append((late, self.pool.submit(layer, late, x_host, phase)))
            for share, ticket in tickets:
                if ticket.runs:
                    partial = device.from_host(self.pool.result(ticket))
                    clock.mark("wait")
                    y = _sum(y, partial)
                counters.host_tiles += share.total
                counters.host_busy += ticket.busy
            if y is not None:
                h = h + y
            if self.memory is not None:
                self.memory.mover.retarget(policy.after(layer, routing, view))
                self.memory.mover.update()
            clock.mark("combine")

        h = model.finish(h, batch)
        for piece in batch.slices:
            piece.kv.advance(len(piece.tokens))
        self._step += 1
        counters.steps += 1
        counters.rows += batch.rows
        answers = self._head(h, pieces)
        clock.mark("head")
        return answers

    def _plan(self, layer: int, routing: Routing, view: View) -> Split:
        """Ask the policy, apply its targets, and divide the layer's work by its cuts."""
        plan = self.policy.plan(layer, routing, view)
        if self.memory is not None:
            self.memory.mover.retarget(plan.targets)
        elif plan.cut.any():
            raise PlanError(f"policy {self.policy.name} gave work to a device without a slab")
        split = split_layer(routing, plan.cut, self._residency[layer], self.shape.tiles)
        self._popularity[layer] += split.workload
        return split

    def _run_on_device(
        self, layer: int, split: Split, x: Tensor, counters: PhaseCounters
    ) -> tuple[Tensor | None, list[Missing]]:
        """The device's share, float32 [R, H], None where it has none; and what of it is missing because there
        is no prefetcher. Resident tiles are computed while the missing ones are on their way, and those as
        they land. Resident ones are an expert's first, so each expert sums its tiles in tile order, and then
        experts are added in theirs: the bits depend on the cuts and not on what happened to be resident."""
        left: list[Missing] = []
        if self.memory is None or not split.device:
            return None, left
        slab, mover = self.memory.slab, self.memory.mover
        missing = [Missing(s.expert, s.resident, s.cut) for s in split.device if s.resident < s.cut]
        landing = mover.stream(layer, missing, left)
        inputs = self.kernel.activations(x)
        y = torch.zeros_like(x)
        rows = {s.expert: torch.from_numpy(s.rows.astype(np.int64)).to(x.device) for s in split.device}
        sums: dict[int, Tensor] = {}

        def add(expert: int, slot: int) -> None:
            part = self.kernel.run(slab.slot(slot), inputs, rows[expert])
            sums[expert] = sums[expert].add_(part) if expert in sums else part

        for share in split.device:
            for slot in mover.cache.slots_of(layer, share.expert)[: share.resident]:
                add(share.expert, slot)
                counters.resident_tiles += 1
        for expert, slot in landing:
            add(expert, slot)
            counters.fetched_tiles += 1
        for share in split.device:
            if share.expert in sums:
                weights = torch.from_numpy(share.weights[:, None]).to(x.device)
                y.index_add_(0, rows[share.expert], sums[share.expert] * weights)
        return y, left

    def _head(self, h: Tensor, pieces: Sequence[Piece]) -> list[FloatArray]:
        """The wanted logits of each piece; rows nobody wants do not go through the head."""
        wanted: list[int] = []
        counts = []
        start = 0
        for piece in pieces:
            end = start + len(piece.slice.tokens)
            chosen = {"none": range(0), "last": range(end - 1, end), "all": range(start, end)}[piece.wanted]
            wanted.extend(chosen)
            counts.append(len(chosen))
            start = end
        if not wanted:
            return [np.empty((0, self.backbone.spec.vocabulary), np.float32) for _ in pieces]
        rows = h if len(wanted) == len(h) else h[torch.tensor(wanted, device=h.device)]
        (logits,) = self.device.to_host(self.backbone.head(rows))
        return np.split(logits, np.cumsum(counts)[:-1])

    def _view(self, phase: Phase) -> View:
        cache = None if self.memory is None else self.memory.mover.cache
        return View(
            shape=self.shape,
            phase=phase,
            capacity=0 if cache is None else cache.capacity,
            residency=_read_only(self._residency),
            target=_read_only(self._residency if cache is None else cache.target),
            popularity=_read_only(self._popularity),
            step=self._step,
            costs=self._costs,
        )

    @property
    def _residency(self) -> IntArray:
        return self._nothing if self.memory is None else self.memory.mover.cache.residency


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """a + b, in a's place; None is nothing."""
    if a is None or b is None:
        return b if a is None else a
    return a.add_(b)


def _read_only(array: NDArray[Scalar]) -> NDArray[Scalar]:
    view = array.view()
    view.flags.writeable = False
    return view
