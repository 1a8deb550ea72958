"""Replays a trace under one policy, on the clock of a cost model.

The engine's `PolicyDriver` calls the policy, and three resources that work at the same time execute its
decisions:

- the device: of each layer all but its routed experts (`other`), then, where it computes any tile, the start
  of its share (`launch`), its resident tiles, and fetched tiles as they land;
- the link: tile after tile, each order with its start (`fetch`), see `cache.py`;
- the host: one layer's share after the other; a Work arrives a round trip after it was sent, and that of a
  layer that was decided early is sent one layer earlier.

A layer ends when its device and host shares are computed. Embedding and
head cost nothing here. Where channels are left out, a tile on the host or the device takes the share of its
time that is the share of its bytes which are read, as if each row's channels were drawn independently of the
others', and the link moves that share of it (`channels.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import nan

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import PHASES, FloatArray, IntArray, Phase
from pipeline.engine.driver import LayerDecision, PolicyDriver
from pipeline.engine.prefetch_meter import pause_note
from pipeline.errors import PlanError, TraceError
from pipeline.memory.limits import STAGING_TILES
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import Costs
from pipeline.policies.view import Active, Ahead, Policy, Routing, Signals, Target, View
from pipeline.replay.channels import NOTE, RIGHT, ChannelLink, Chosen, MaskedTile
from pipeline.replay.compiled_cache import simulated_cache
from pipeline.replay.outcome import Outcome, PhaseOutcome
from pipeline.replay.step_inputs import inputs_of
from pipeline.traces.header import Header
from pipeline.traces.steps import TracedStep
from shm.mask import DENSE, Mask


class Replay:
    """A policy, its cache and the clock: a `LayerExecutor`. Its handle of an
    early host share is the time at which the share is done."""

    def __init__(
        self,
        header: Header,
        policy: Policy,
        costs: Costs,
        capacity: int,
        *,
        calibration: Calibration | None = None,
        popularity: NDArray[np.int64] | None = None,
        last_steps: Mapping[int, int] | None = None,
        right: float = RIGHT,
    ) -> None:
        """`capacity`: tiles. `last_steps`: the number of each sequence's last step, with which it ends;
        without it, sequences end with each step. `calibration`: as in an engine, but without the gate for the
        next token's first layer where the trace has no logits of it. `popularity` [L, E]: the counts of
        earlier requests. `right`: as in ChannelLink. Raises PolicyError where the policy lacks an input."""
        shape = header.shape
        self._header = header
        self._policy = policy
        self._costs = costs.for_tiles(shape.tiles)
        self._last_steps = last_steps or {}
        self._live: set[int] = set()  # sequences that have begun and not ended
        self._choices: dict[int, Routing] = {}  # of the logits of this layer's probes, by identity
        self._phases: dict[Phase, PhaseOutcome] = {phase: PhaseOutcome(shape.layers) for phase in PHASES}
        self._counters = self._phases["decode"]
        self._seconds: dict[int, tuple[float, float, float]] = {}  # by rows: see _tile
        capacity = capacity if policy.uses_device else 0
        self.cache = simulated_cache(shape, capacity, self._costs.link, self._costs.fetch)
        self._channels = ChannelLink(self.cache, self._costs.link, self._costs.fetch, right)
        self.cache.counters = self._channels.counters = self._counters
        self.now = 0.0  # seconds
        self._host_free = 0.0
        counted = np.zeros((shape.layers, shape.experts), np.int64)
        view = View(
            shape=shape,
            phase="decode",
            capacity=capacity,
            residency=self.cache.residency,
            target=self.cache.target,
            popularity=counted if popularity is None else counted + popularity,
            step=0,
            costs=self._costs if policy.needs_costs else None,
            router=self._route,
            calibration=calibration,
            staging=STAGING_TILES if policy.uses_device else 0,
            up=header.up,
        )
        self._driver = PolicyDriver[float](policy, view)
        self.cache.place(self._driver.placement)
        self._notes = list(self._driver.notes)
        self._left = policy.sparsity.left(header.up, calibration)
        self._named = False  # channels were predicted
        sparsity = 0.0 if policy.sparsity.dense else policy.sparsity.share(calibration)
        self._read = MaskedTile(header.up_bytes, header.tile_bytes, sparsity)

    def run(self, steps: Iterable[TracedStep]) -> Outcome:
        """Replay all steps. Raises PlanError for decisions that break a policy's contract."""
        for step in steps:
            self.step(step)
        return self.outcome

    @property
    def outcome(self) -> Outcome:
        """The result of the steps so far."""
        prefill, decode = self._phases["prefill"], self._phases["decode"]
        notes = list(self._notes)
        if paused := pause_note(decode.paused_steps, decode.steps):
            notes.append(f"{self._policy.name}: {paused}")
        if self._named:
            notes.append(f"{self._policy.name}: {NOTE}")
        return Outcome(prefill, decode, self._policy.exact, notes)

    def step(self, step: TracedStep) -> None:
        """One step of the engine."""
        driver, began = self._driver, self.now
        counters = self._counters = self.cache.counters = self._phases[step.phase]
        self._channels.counters = counters
        self.cache.update(self.now)
        self._live.update(step.sequences)
        driver.begin_step(step.phase, step.sequences, self._live)
        self._live -= {s for s in step.sequences if self._last_steps.get(s, step.number) <= step.number}
        counters.paused_steps += not driver.view.prefetching
        self._inputs = inputs_of(step, self._header.router)
        self._other = (self._seconds.get(len(step.sequences)) or self._tile(len(step.sequences)))[2]
        for index, layer in enumerate(step.layers):
            self._traced = layer
            driver.layer(index, self)
        counters.steps += 1
        counters.rows += len(step.sequences)
        counters.seconds += self.now - began
        driver.end_step(counters.predicted, counters.useful)

    def read(self, layer: int, probes: Sequence[int], own: bool) -> Signals:
        self._counters.device_busy += self._other
        self.now += self._other
        self._advance()
        self._logits = logits = self._inputs.own[layer] if own else None
        found = {}
        self._choices.clear()
        for target in probes:
            if target > layer and (ahead := self._inputs.ahead(layer, target - layer)) is not None:
                found[target], self._choices[id(ahead[0])] = ahead
            else:
                found[target] = self._first_gate(layer, target)
        return tuple.__new__(Signals, (logits, found))  # in half the time

    def _route(self, logits: FloatArray) -> Routing:
        """The model's router. For a layer's own logits it returns the recorded routing: the logits are
        recorded as float16, and their rounding could exchange two experts that are nearly equal."""
        if logits is self._logits:
            return self._traced.router_routing
        return self._choices.get(id(logits)) or self._header.router(logits)

    def begin(self, decision: LayerDecision[float]) -> None:
        layer, counters, tiles = decision.layer, self._counters, self._header.shape.tiles
        active = decision.gated.routing.active
        resident: list[int] = decision.resident[active.indices].tolist()
        counters.book_hits(layer, resident, tiles)
        counters.fidelity.book(decision.gated, decision.cut, tiles, decision.stale)
        if decision.targets:
            self.cache.retarget(decision.targets)
        cuts, rows = self._checked(decision.cut, active), active.counts.tolist()
        begun = decision.begun
        self._host_done = self._submit(rows, cuts, decision.mask) if begun is None else begun
        if decision.mask is not DENSE:
            weight = decision.gated.routing.total_weight
            counters.fidelity.left += weight * (nan if self._left is None else self._left[layer])
        self._demand(layer, active.experts.tolist(), rows, cuts, decision.mask)

    def begin_early(self, layer: int, ahead: Ahead, mask: Mask) -> float:
        active = ahead.gated.routing.active
        return self._submit(active.counts.tolist(), self._checked(ahead.cut, active), mask)

    def prefetch(self, targets: Sequence[Target], no_room: int) -> None:
        self._counters.wanted_experts += no_room
        self.cache.retarget(targets, predicted=True)
        self.cache.update(self.now)

    def prefetch_channels(self, layer: int, routing: Routing, mask: Mask) -> None:
        if mask is DENSE:
            return
        active, chosen = routing.active, []
        for expert, row in zip(active.experts.tolist(), active.counts.tolist(), strict=True):
            if missing := self._header.shape.tiles - int(self.cache.target[layer, expert]):
                chosen.append(Chosen(expert, missing, missing * self._read.kept(row)))
                self._begun_seconds += (
                    (self._seconds.get(row) or self._tile(row))[1] * missing * self._read.up
                )
        self._channels.predict(layer, chosen, self.now + self._begun_seconds)
        self._named = True

    def compute(self, decision: LayerDecision[float]) -> None:
        """End the layer when both the device and the host are done."""
        counters, of_tile = self._counters, self._device_seconds
        if self._device is not None:
            at, counters.device_busy, counters.wait_link = self._device
        else:
            at = self.now + self._begun_seconds
            counters.device_busy += self._begun_seconds
            for expert, landing in self._landings:
                if landing > at:
                    counters.wait_link += landing - at
                    at = landing
                at += of_tile[expert]
                counters.device_busy += of_tile[expert]
        if self._host_done > at:
            counters.wait_host += self._host_done - at
        self.now = max(at, self._host_done)

    def end(self, targets: Sequence[Target]) -> None:
        if targets or self._named:
            self._advance()
            self.cache.retarget(targets)
        self.cache.update(self.now)

    def _checked(self, cut: IntArray, active: Active) -> list[int]:
        """The active experts' cuts. Raises PlanError."""
        cuts: list[int] = cut[active.indices].tolist()
        tiles = self._header.shape.tiles
        if cuts and not 0 <= min(cuts) <= max(cuts) <= tiles:
            raise PlanError(f"a cut of policy {self._policy.name} is outside 0..{tiles}")
        if not self._policy.uses_device and any(cuts):
            raise PlanError(f"policy {self._policy.name} gave work to a device without a slab")
        return cuts

    def _submit(self, rows: list[int], cuts: list[int], mask: Mask) -> float:
        """Send the host its share: `rows` and `cuts` of each active expert. Returns the time at which the
        share is computed, 0 for an empty share."""
        tiles, known = self._header.shape.tiles, self._seconds
        count = tiles * len(cuts) - sum(cuts)
        if not count:
            return 0.0
        for row in rows:
            if row not in known:
                self._tile(row)
        if mask is DENSE:
            seconds = self.cache.host_seconds(rows, cuts, known)
        else:
            parts = zip(rows, cuts, strict=True)
            seconds = sum(known[row][0] * (tiles - p) * self._read.share(row) for row, p in parts)
        self._host_free = max(self._host_free, self.now + self._costs.round_trip) + seconds
        self._counters.host_busy += seconds
        self._counters.host_tiles += count
        return self._host_free

    def _advance(self) -> None:
        self.cache.advance(self.now)
        if self._named:
            self._channels.advance(self.now)

    def _demand(
        self,
        layer: int,
        experts: list[int],
        rows: list[int],
        cuts: list[int],
        mask: Mask,
    ) -> None:
        """Begin the device's share. Without a mask it is known at once when that ends."""
        self._device: tuple[float, float, float] | None = None  # end, seconds busy and waited in all
        self._device_seconds: dict[int, float] = {}  # a tile of each expert that lacks one
        self._begun_seconds = 0.0  # of the launch and the resident tiles
        self._landings: list[tuple[int, float]] = []
        self._on_device = any(cuts)
        if not self._on_device:
            return
        counters, known = self._counters, self._seconds
        counters.device_tiles += sum(cuts)
        if mask is not DENSE:
            self._demand_masked(layer, experts, rows, cuts)
            return
        for row in rows:
            if row not in known:
                self._tile(row)
        given = layer, experts, rows, cuts, known, self._costs.launch, self.now
        self._device = self.cache.compute(*given, counters.device_busy, counters.wait_link)

    def _demand_masked(self, layer: int, experts: list[int], rows: list[int], cuts: list[int]) -> None:
        """Fetch the missing tiles of a layer with a mask: the device computes u of all tiles first, and tiles
        beyond their target are fetched as channels."""
        read, cache, launch = self._read, self.cache, self._costs.launch
        missing, chosen, begun, ups = [], [], launch, 0.0
        for expert, row, p in zip(experts, rows, cuts, strict=True):
            there = int(cache.residency[layer, expert])
            tile, kept = self._tile(row)[1], read.kept(row)
            here = min(p, there)
            whole = max(here, min(p, int(cache.target[layer, expert])))
            ups += tile * p * read.up
            tile *= kept * (1 - read.up)
            begun += tile * here
            if here:
                cache.used((layer, expert), here)
            if here < p:
                self._device_seconds[expert] = tile
            if here < whole:
                missing.append((expert, here, whole))
            if whole < p:
                chosen.append(Chosen(expert, p - whole, (p - whole) * kept))
        self._begun_seconds = begun + ups
        if missing:
            self._landings = cache.demand(layer, missing, self.now)
        self._landings += self._channels.demand(layer, chosen, self.now + launch + ups)

    def _first_gate(self, layer: int, target: int) -> FloatArray:
        """The recorded logits of the gate for the next token's first layer: what no router ahead has."""
        found = self._traced.first if layer == self._header.shape.layers - 1 and target == 0 else None
        if found is None:
            raise TraceError(
                f"policy {self._policy.name} asks at layer {layer} for a prediction of layer {target}, which"
                f" is not in the trace: it has {self._header.depth} layers ahead"
            )
        return found.astype(np.float32)

    def _tile(self, rows: int) -> tuple[float, float, float]:
        """Seconds at `rows` rows: of a tile on the host, of a tile on the device, of a layer's other work."""
        costs = self._costs
        found = self._seconds[rows] = (
            float(costs.host_seconds(rows, 1)),
            float(costs.device_seconds(rows, 1)),
            float(costs.other_seconds(rows)),
        )
        return found
