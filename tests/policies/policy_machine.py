"""Views and routings of many shapes, and the check that every decision of a policy must pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st

from pipeline.arrays import FloatArray, IntArray, Phase
from pipeline.counters import LEAST
from pipeline.engine.driver import LayerDecision, PolicyDriver
from pipeline.errors import ShardFailed
from pipeline.models.routing import Softmax
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import Costs
from pipeline.policies.presets import PRESETS
from pipeline.policies.view import Ahead, Gated, Layer, ModelShape, Policy, Routing, Signals, Target, View
from shm.mask import DENSE, Mask

COSTS = Costs(rows=(1, 4, 16), host=(1.0, 2.0, 7.0), device=(0.1, 0.1, 0.3), link=1.6, round_trip=0.1)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    experts = draw(st.sampled_from([1, 2, 3, 5, 8, 16]) | st.integers(1, 40))
    return ModelShape(
        layers=draw(st.integers(1, 6)),
        experts=experts,
        tiles=draw(st.sampled_from([1, 2, 3, 4, 7])),
        top_k=draw(st.integers(1, experts)),
    )


@st.composite
def capacities(draw: st.DrawFn, shape: ModelShape) -> int:
    whole = shape.layers * shape.experts * shape.tiles
    return draw(st.sampled_from([0, 1, whole, whole + 3]) | st.integers(0, whole))


def make_view(
    shape: ModelShape, capacity: int, costs: Costs | None = COSTS, popularity: IntArray | None = None
) -> View:
    empty = np.zeros((shape.layers, shape.experts), dtype=np.int32)
    counted = np.zeros(empty.shape, dtype=np.int64) if popularity is None else popularity.astype(np.int64)
    router = LikelyExperts(shape.top_k)
    return View(shape, "decode", capacity, empty, empty, counted, 0, costs, router, staging=4, up="int2")


def policy(name: str, **options: str) -> Policy:
    """A preset with these options; the engine's seed is 0."""
    return PRESETS[name].make(options, 0)


@dataclass(frozen=True)
class LikelyExperts(Softmax):
    """The most probable experts by their probabilities, best first; the improbable ones get a weight of 0."""

    rescaled: bool = False

    def __call__(self, logits: FloatArray, layer: Layer) -> Routing:
        experts = np.argsort(-logits, axis=1, kind="stable")[:, : self.k].astype(np.int32)
        weights = np.take_along_axis(self.scores(logits, layer), experts, axis=1)
        weights[weights < 0.01] = 0
        return Routing(experts, weights)


@dataclass(frozen=True)
class Given(LikelyExperts):
    """Always the same routing."""

    k: int = 1
    routing: Routing | None = None

    def __call__(self, logits: FloatArray, layer: Layer) -> Routing:
        assert self.routing is not None
        return self.routing


def make_calibration(shape: ModelShape, rng: np.random.Generator) -> Calibration:
    """Numbers of the right shapes; gates leave from all of a token's experts down to one."""
    layers, experts = shape.layers, shape.experts
    kept = np.zeros((layers, 3, shape.top_k + 1), np.float32)
    kept[:, 0, shape.top_k] = kept[:, 2, 1] = 1
    kept[:, 1, [1, shape.top_k]] = 0.5 if shape.top_k > 1 else 1
    names, own = ("raw", "residual", "first"), np.random.default_rng(5)
    return Calibration(
        decode_counts=rng.integers(0, 99, (layers, experts)),
        residual_logits=rng.normal(size=(layers - 1, experts)).astype(np.float32),
        accuracy={name: rng.random(layers).astype(np.float32) for name in names},
        kept=kept,
        gated_accuracy={name: own.random((layers, 3)).astype(np.float32) for name in names},
        sensitivity=rng.random(layers).astype(np.float32),
        threshold=0.05,
        first_gate=np.zeros((experts, 4), np.float32),
        hit_rates=_hit_rates(shape, own),
    )


def _hit_rates(shape: ModelShape, rng: np.random.Generator) -> FloatArray:
    """Rising from 0 to 1 in each layer."""
    steps = np.sort(rng.random((shape.layers, shape.experts + 1)), axis=1)
    steps[:, 0], steps[:, -1] = 0, 1
    return steps.astype(np.float32)


def make_routing(shape: ModelShape, rng: np.random.Generator, rows: int) -> Routing:
    """`rows` tokens, each with top_k different experts; some of the weights are 0."""
    experts = np.argsort(rng.random((rows, shape.experts)), axis=1)[:, : shape.top_k].astype(np.int32)
    weights = rng.random(experts.shape).astype(np.float32)
    weights[rng.random(weights.shape) < 0.15] = 0
    return Routing(experts, weights)


@dataclass
class Machine:
    """Executes a policy's decisions with arrays alone: keeps targets, lands tiles at once, late or never, and
    checks every decision against the contract. A `LayerExecutor` of the engine's `PolicyDriver`."""

    policy: Policy
    given: View  # at the policy's placement
    rng: np.random.Generator
    landing: float = 1.0  # share of missing tiles that land between two layers
    cuts: list[IntArray] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    predicted: int = 0  # experts
    wanted: int = 0  # experts that predictions named
    named_channels: int = 0  # experts of which predictions named channels
    early: int = 0  # layers with a host share that began one layer early
    failing: int | None = None  # a layer with a host share that cannot be computed

    def start(self) -> None:
        shape, given = self.given.shape, self.given
        self.residency, self.target = given.residency.copy(), given.target.copy()
        own = {"residency": self.residency, "target": self.target, "popularity": given.popularity.copy()}
        self.driver = PolicyDriver[str](self.policy, replace(given, **own))
        placed = self.driver.placement
        assert placed.shape == (shape.layers, shape.experts)
        assert placed.dtype == np.int32
        assert placed.min() >= 0
        assert placed.max() <= shape.tiles
        assert placed.sum() <= given.capacity
        self.target[:] = placed
        self.land()

    @property
    def view(self) -> View:
        """The present view of the policy; the arrays are copies."""
        view = self.driver.view
        arrays = {name: getattr(view, name).copy() for name in ("residency", "target", "popularity")}
        return replace(view, **arrays)

    def land(self) -> None:
        missing = self.target - self.residency
        landed = missing if self.landing == 1 else self.rng.binomial(missing, self.landing).astype(np.int32)
        self.residency += landed

    def apply(self, targets: Sequence[Target]) -> None:
        """Applied one by one: no intermediate sum of targets may exceed the capacity."""
        shape, target = self.given.shape, self.target
        kept = int(target.sum())
        for change in targets:
            assert 0 <= change.layer < shape.layers
            assert 0 <= change.expert < shape.experts
            assert 0 <= change.tiles <= shape.tiles
            kept += change.tiles - int(target[change.layer, change.expert])
            target[change.layer, change.expert] = change.tiles
            assert kept <= self.given.capacity
        np.minimum(self.residency, target, out=self.residency)

    def logits(self, rows: int) -> FloatArray:
        return self.rng.normal(size=(rows, self.given.shape.experts)).astype(np.float32) * 2

    def step(self, rows: int, phase: Phase | None = None, sequences: tuple[int, ...] = ()) -> None:
        view = self.driver.view
        self.driver.begin_step(phase or view.phase, sequences or tuple(range(rows)))
        for layer in range(view.shape.layers):
            self.visit(layer, self.logits(rows))
        assert self.driver.cancel_early() is None, "the last layer decides no other"
        self.driver.end_step(0, 0)
        assert self.driver.view.step == view.step + 1

    def rest_prefetching(self) -> None:
        """Report useless predictions: prefetching pauses for hundreds of steps."""
        while self.driver.prefetch.on:
            self.driver.prefetch.step(LEAST, 0)

    def visit(self, layer: int, logits: FloatArray) -> Gated:
        """A layer with these logits of its own router."""
        self._logits = logits
        self.driver.layer(layer, self)
        return self._decision.gated

    def layer(self, layer: int, routing: Routing) -> LayerDecision[str]:
        """A layer with a router that returns this routing."""
        view = self.driver.view
        self.driver.view = replace(view, router=Given(routing=routing))
        self.visit(layer, self.logits(len(routing.experts)))
        self.driver.view = replace(self.driver.view, router=view.router)
        return self._decision

    def read_before(self, layer: int, probes: Sequence[int]) -> Signals:
        assert all(layer < probe < self.given.shape.layers for probe in probes)
        self._asked, self._computed = "read_before", layer
        return Signals(None, {probe: 0.5 * self._logits for probe in probes})

    def read(self, layer: int, probes: Sequence[int], own: bool) -> Signals:
        layers, rows = self.given.shape.layers, len(self._logits)
        assert all(layer < p < layers or (p, layer) == (0, layers - 1) for p in probes)
        assert len(set(probes)) == len(probes)
        self._asked, self._computed = "read", layer
        probed = {probe: self.logits(rows) + 0.5 * self._logits for probe in probes}
        return Signals(self._logits if own else None, probed)

    def begin(self, decision: LayerDecision[str]) -> None:
        self._next("read", "begin")
        self._decision = decision
        own = decision.signals.logits is not None
        assert decision.gated.predicted != own
        assert own or not self.policy.exact
        assert decision.begun in (None, f"layer {decision.layer}")
        self._check_mask(decision.mask)
        assert decision.begun is None or decision.mask == self._early_mask
        self.masks.append(decision.mask)
        assert np.array_equal(decision.resident, self.residency[decision.layer])
        self._check_gated(decision.gated, len(self._logits))
        self._check_cut(decision.cut)
        self.cuts.append(decision.cut)
        if self.policy.name != "random":  # which may fetch again a tile that was just evicted
            rows = decision.gated.routing.active.experts
            for change in decision.targets:
                if change.layer == decision.layer and change.expert in rows:
                    grows = change.tiles >= self.target[change.layer, change.expert]
                    assert grows or change.tiles >= decision.cut[change.expert]
        self.apply(decision.targets)
        self.land()

    def begin_early(self, layer: int, ahead: Ahead, mask: Mask) -> str:
        self._next("begin", "begin_early")
        assert layer == self._decision.layer + 1 < self.given.shape.layers
        self._check_cut(ahead.cut)
        self._check_mask(mask)
        self._early_mask = mask
        self.early += 1
        return f"layer {layer}"

    def prefetch(self, targets: Sequence[Target], no_room: int) -> None:
        self._next("read_before begin begin_early", "prefetch")
        assert self.driver.view.prefetching
        fetched = [t for t in targets if t.tiles > self.target[t.layer, t.expert]]
        evicted = [t for t in targets if t.tiles < self.target[t.layer, t.expert]]
        assert len(fetched) + len(evicted) == len(targets)
        if self.driver.policy.name != "tandem":  # which fetches and evicts single tiles
            assert all(t.tiles == self.given.shape.tiles for t in fetched)
            assert not any(t.tiles for t in evicted)
        assert all(t.layer != self._computed for t in evicted)
        self.predicted += len(fetched)
        self.wanted += len(fetched) + no_room
        self.apply(targets)

    def prefetch_channels(self, layer: int, routing: Routing, mask: Mask) -> None:
        self._next("begin begin_early prefetch", "prefetch_channels")
        assert self.driver.view.prefetching
        assert layer == self._decision.layer + 1 < self.given.shape.layers
        assert mask != DENSE
        self.named_channels += len(routing.active.experts)

    def compute(self, decision: LayerDecision[str]) -> None:
        self._next("begin begin_early prefetch prefetch_channels", "compute")
        if decision.layer == self.failing:
            raise ShardFailed("the test fails this layer")
        self.land()

    def end(self, targets: Sequence[Target]) -> None:
        self._next("compute", "end")
        self.apply(targets)

    def _next(self, before: str, now: str) -> None:
        assert self._asked in before.split()
        self._asked = now

    def _check_cut(self, cut: IntArray) -> None:
        assert cut.shape == (self.given.shape.experts,)
        assert cut.dtype == np.int32
        assert cut.min() >= 0
        assert cut.max() <= self.given.shape.tiles
        if not self.policy.uses_device:
            assert cut.sum() == 0
        if not self.policy.uses_host:
            assert cut.min() == self.given.shape.tiles

    def _check_mask(self, mask: Mask) -> None:
        """Channels are left out in decode where the policy has a sparsity."""
        decodes = self.driver.view.phase == "decode"
        assert (mask != DENSE) == (decodes and not self.policy.sparsity.dense)

    def _check_gated(self, gated: Gated, rows: int) -> None:
        for routing in (gated.routing, gated.router_routing):
            assert routing.experts.shape == routing.weights.shape == (rows, self.given.shape.top_k)
            assert routing.experts.dtype == np.int32
            assert routing.weights.dtype == np.float32
            ranked = np.sort(routing.experts, axis=1)
            assert (ranked[:, 1:] != ranked[:, :-1]).all()
            assert ranked.min() >= 0
            assert ranked.max() < self.given.shape.experts
        # the weight of a dropped or replaced expert goes to the others
        sums = [routing.weights.sum(axis=1) for routing in (gated.routing, gated.router_routing)]
        assert np.allclose(*sums, atol=1e-5)
        if self.policy.exact:
            assert np.array_equal(gated.routing.experts, gated.router_routing.experts)
            assert np.array_equal(gated.routing.weights, gated.router_routing.weights)
