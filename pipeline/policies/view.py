"""The contract between the engine and a policy: the inputs of a policy and its decisions.

A policy plans with numpy arrays. It does no I/O, holds no tensor and starts no process, so it can be tested
with arrays alone. The engine executes a policy's decisions and decides nothing itself.

Terms (docs/architecture.md): an expert has n tiles. Its *residency* r is how many leading tiles are in
device memory; its *cut* p divides it in this step: the device computes tiles [0, p) and the host [p, n).
Tiles [r, p) are fetched first. A *target* is the residency that the policy sets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import Counts, FloatArray, IntArray, Phase, one_row
from pipeline.policies.calibration import Calibration, Sparsity
from pipeline.policies.costs import Costs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of the model's experts."""

    layers: int
    experts: int  # E, a layer
    tiles: int  # n, an expert
    top_k: int  # k, experts a token


class Active(NamedTuple):
    """The active experts of a routing, and the rows that use each: expert i has rows[offsets[i]:offsets[i +
    1]]."""

    experts: IntArray  # [m], ascending
    offsets: IntArray  # [m + 1]
    rows: IntArray  # [n], ascending for each expert
    weights: FloatArray  # [n], none of them 0
    counts: IntArray  # [m], rows of each expert
    indices: NDArray[np.intp]  # [m], the experts as numpy indexes with them soonest


@dataclass(frozen=True)
class Routing:
    """The experts that a batch of R rows uses in one layer."""

    experts: IntArray  # [R, k]
    weights: FloatArray  # [R, k]; a weight of 0 computes nothing

    @property
    def pairs(self) -> tuple[IntArray, FloatArray]:
        """The experts and their weights."""
        return self.experts, self.weights

    def workload(self, num_experts: int) -> IntArray:
        """Rows routed to each expert, int32 [E]; the active experts are those above 0."""
        used = self.experts[self.weights != 0]
        return np.bincount(used, minlength=num_experts).astype(np.int32)

    @cached_property
    def active(self) -> Active:
        """Returns the routing by expert, without weights of 0."""
        chosen, weights = self.experts.ravel(), self.weights.ravel()
        if np.count_nonzero(weights) == len(weights):
            order = chosen.argsort(kind="stable")  # by expert, and of one expert by row
        else:
            used = np.flatnonzero(weights)
            order = used[chosen[used].argsort(kind="stable")]
        ranked = chosen.take(order)
        if len(self.experts) == 1:  # which uses each of its experts once
            every, first, once = one_row(len(order))
            return Active(ranked, every, first, weights.take(order), once, ranked.astype(np.intp))
        rows = (order // self.experts.shape[1]).astype(np.int32)
        workload = np.bincount(ranked)
        experts = np.flatnonzero(workload)
        offsets = np.zeros(len(experts) + 1, np.int32)
        workload.take(experts).cumsum(out=offsets[1:], dtype=np.int32)
        counts = offsets[1:] - offsets[:-1]
        return Active(experts.astype(np.int32), offsets, rows, weights.take(order), counts, experts)

    @cached_property
    def total_weight(self) -> float:
        """The sum of all weights."""
        return float(np.add.reduce(self.weights, axis=None))


Layer = int | NDArray[np.intp]  # of logits, of those with experts; or the layer of each row, [R]


class Router(ABC):
    """Chooses the experts of each token and their weights."""

    @abstractmethod
    def __call__(self, logits: FloatArray, layer: Layer) -> Routing:
        """logits float32 [R, E]: experts int32 [R, k] and weights float32 [R, k]."""

    @abstractmethod
    def scores(self, logits: FloatArray, layer: Layer) -> FloatArray:
        """How much each expert is asked for, float32 [R, E]: by these the best are chosen. None is negative,
        and a row's sum is 1."""

    @abstractmethod
    def weights_of(self, logits: FloatArray, experts: IntArray, layer: Layer) -> FloatArray:
        """The weights float32 [R, k] that the router would give these experts [R, k] as its choice."""

    @abstractmethod
    def differentiable(self, logits: Tensor, routing: Routing, layer: int) -> Tensor:
        """The weights [R, k] of `routing`, which these logits gave, as a differentiable function of the
        logits. The choice of experts is constant, and the gradient of a weight of 0 is 0."""


class Signals(NamedTuple):
    """Logits that the device computed for a policy in one layer, from x, the input of its router: float32 [R,
    E]."""

    logits: FloatArray | None  # of the layer's own router; None where a prediction took its place
    probes: Mapping[int, FloatArray]  # of the layers that `Policy.probes` named, their routers on this x; a
    # target 0 or below is a trained gate of the calibration


class Gated(NamedTuple):
    """A gate's decision. `routing` is computed; `router_routing` is the router's choice, of the same [R, k]:
    the counters measure the difference. A weight of 0 in place of a positive one is a skipped expert, another
    expert in its place a substituted one."""

    routing: Routing
    router_routing: Routing
    predicted: bool = False  # by the layer before: the layer's own router was not run

    @classmethod
    def from_router(cls, routing: Routing) -> Gated:
        """The router's choice, unchanged."""
        return tuple.__new__(cls, (routing, routing, False))  # in half the time


class Ahead(NamedTuple):
    """The next layer's routing and cuts, decided one layer early (DAOP). The host's share of it is computed
    from this layer's hidden state, the device's from the next layer's own."""

    gated: Gated
    cut: IntArray  # [E], as in Plan
    early: bool = True  # False: the host begins with the layer itself, from that layer's own hidden state


class Target(NamedTuple):
    """Keep the leading `tiles` tiles of an expert resident from now on (0: evict it)."""

    layer: int
    expert: int
    tiles: int


class Plan(NamedTuple):
    """One layer's step. `cut` [E] int32 in 0..n, read only for active experts. `targets` are applied before
    any fetch: smaller ones free their slots at once; larger ones are reached by this step's own fetches as
    far as these go, then by background fetches."""

    cut: IntArray
    targets: tuple[Target, ...] = ()


@dataclass(frozen=True)
class View:
    """The inputs of a policy at each call. The arrays are read-only."""

    shape: ModelShape
    phase: Phase
    capacity: int  # tiles that the cache may keep resident over all layers
    residency: IntArray  # [L, E]: leading tiles that have landed
    target: IntArray  # [L, E]: leading tiles to keep; sum <= capacity
    popularity: Counts  # [L, E]: rows routed to each expert by the counted steps
    step: int  # engine steps since the policy was set; one step visits every layer once
    costs: Costs | None  # in force: may change between steps; None unless the policy's `needs_costs`
    router: Router | None = None  # the model's own: logits [R, E] of a layer to a routing
    calibration: Calibration | None = None  # None where the model has not been calibrated
    sequences: tuple[int, ...] = ()  # [R]: the sequence of each of the step's rows
    live: frozenset[int] = frozenset()  # the sequences that have begun and not ended; these and others
    prefetching: bool = True  # False: the prefetch meter pauses predictions
    staging: int = 0  # slots beside the capacity, through which a layer's step streams missing tiles
    seconds: float = 0.0  # that the step before took; 0 where costs do not follow what runs
    heat: Counts | None = None  # [L, E]: as popularity, of earlier starts; the later count more
    up: str = ""  # the format of up matrices that are apart, so that channels can be left out; "" without
    up_share: float = 0.0  # of a tile's bytes with its part of up, where that is apart
    kept: float = (
        1.0  # share of an expert's channels that a row keeps in this step; `costs` go by it, but for
    )
    # the link, as a tile that is to stay is moved whole
    probing: bool = True  # False: no router can be applied to another layer's input


class Policy(ABC):
    """One preset. A new policy object is made at start and at each SetPolicy; it may keep state.

    `PolicyDriver` (pipeline/engine/driver.py) has the order of the calls. In short, for each layer of a step:
    `probes`, `gate` and `plan` (unless `ahead` decided the layer one layer earlier), `ahead`, `predict`, and
    once the layer has been computed, `after`."""

    name: str
    exact: bool = True
    by_row: bool = True  # False: what a row gets depends on the step's other rows, as an approximation
    needs_costs: bool = False
    needs_calibration: bool = False
    keeps_heat: bool = False  # it begins with the counts of earlier starts, and this one's are kept
    settles: int = 0  # decode steps after which what it has learnt depends little on where it began
    uses_device: bool = True  # False: no slab and no prefetcher are needed
    uses_host: bool = True  # False: the workers compute nothing
    runs_ahead: bool = False  # the host computes a layer's share on an earlier layer's input
    pauses: bool = True  # False: the prefetch meter does not act on its predictions
    sparsity: Sparsity = Sparsity()  # the channels of an expert that a token leaves out
    no_room: int = 0  # experts that the latest `predict` named and had no room for

    @property
    def runs_all_routers(self) -> bool:
        """False: some layers use a predicted routing alone, so a trace of its steps lacks their logits."""
        return True

    @property
    def status(self) -> str:
        """Its arrangement after the placement, one line; may be empty. Any thread may ask."""
        return ""

    def notes(self, view: View) -> tuple[str, ...]:
        """Options that the policy cannot follow here, with the reason; each one line."""
        return ()

    def check_calibration(self, calibration: Calibration | None) -> None:
        """Raises PolicyError, one line with the remedy, where the policy cannot work with the model's
        calibration, or without one."""
        self.sparsity.check(self.name, calibration)

    @abstractmethod
    def placement(self, view: View) -> IntArray:
        """Targets [L, E] int32 in 0..n at the start, sum <= view.capacity. Costs and calibration have been
        checked."""

    def probes(self, layer: int, view: View) -> tuple[int, ...]:
        """The layers with routers to apply to this layer's x: any later ones, and at the last layer 0, which
        stands for the calibration's gate for the next token's first layer."""
        return ()

    def gate(self, layer: int, signals: Signals, view: View) -> Gated:
        """Decide which experts each row uses."""
        assert signals.logits is not None
        assert view.router is not None
        return Gated.from_router(view.router(signals.logits, layer))

    @abstractmethod
    def plan(self, layer: int, routing: Routing, view: View) -> Plan:
        """Plan one layer of the step, from its gated routing. The resulting targets must fit the capacity."""

    def ahead(self, layer: int, signals: Signals, view: View) -> Ahead | None:
        """Decide the next layer now, so that the host can begin with it. None: decide it in its own turn."""
        return None

    def predict(self, layer: int, signals: Signals, gated: Gated, view: View) -> tuple[Target, ...]:
        """Targets for experts that later layers will probably need. They are fetched behind the demanded
        tiles, in the order given, and counted as predictions. They must not evict tiles of this layer."""
        return ()

    def probes_before(self, layer: int, view: View) -> tuple[int, ...]:
        """The later layers with routers to apply to the residual stream before this layer's attention."""
        return ()

    def predict_before(self, layer: int, signals: Signals, view: View) -> tuple[Target, ...]:
        """Returns what `predict` does, by these routers, before the layer's attention is computed."""
        return ()

    def channels_ahead(self, layer: int, signals: Signals, view: View) -> Routing | None:
        """The routing that the next layer will probably have: of its experts the channels that its mask would
        keep for this layer's input are fetched, behind all demands. None: no channels."""
        return None

    def after(self, layer: int, routing: Routing, view: View) -> tuple[Target, ...]:
        """Targets to change once the layer has been computed."""
        return ()

    def rest(self, view: View) -> tuple[Target, ...]:
        """Targets to change while no request is computed; may take a moment."""
        return ()


@dataclass(frozen=True)
class PolicyRequest:
    """A preset's name and its options as text, as they come from the command line or SetPolicy."""

    name: str
    options: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name and options on one line."""
        return " ".join([self.name, *(f"{option}={value}" for option, value in self.options.items())])
