"""Prediction parts: they predict which experts later layers will need, from routers applied ahead of their
layers.

A router of layer l + 1 on layer l's x predicts well which experts l + 1 will use, because each layer adds
little to the residual stream. Predicted experts are fetched behind demanded ones.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pipeline.arrays import FloatArray
from pipeline.policies.assignments import ActiveCosts, active_costs, two_ended
from pipeline.policies.calibration import Trajectory, corrected
from pipeline.policies.costs import Costs
from pipeline.policies.options import PAUSE, Number
from pipeline.policies.parts import ApplyGate, Expert, Prediction
from pipeline.policies.view import Routing, Signals, View

DEPTH = 3  # layers that are looked ahead at most
NARROW = 16  # active experts up to which a layer's simulations are kept
MOST_KNOWN = 4096  # simulations that are kept
CANDIDATES = 16  # numbers of rows that are tried, the highest: a prompt has more, and each costs a simulation
FEW_EXPERTS = 16  # experts of a layer up to which a model counts as one with few large experts


def by_probability(routing: Routing) -> list[int]:
    """The experts of a predicted routing: of one row as its router names them, the best first; of several,
    most rows first, then the greatest sum of weights."""
    if len(routing.experts) == 1:
        named: list[int] = routing.experts[0].tolist()
        if np.count_nonzero(routing.weights) == len(named):
            return named
        pairs = zip(named, routing.weights[0].tolist(), strict=True)
        return [expert for expert, weight in pairs if weight]
    used = np.flatnonzero(routing.weights)
    chosen, given = routing.experts.ravel()[used], routing.weights.ravel()[used]
    rows, sums = np.bincount(chosen), np.bincount(chosen, given)
    experts = np.flatnonzero(rows)
    order: list[int] = experts[np.lexsort((-sums[experts], -rows[experts]))].tolist()
    return order


def _not_kept(layer: int, experts: list[int], view: View) -> list[Expert]:
    """Experts of which not all tiles are targets; first those that are kept in part, as fewer are fetched."""
    kept, tiles = view.target[layer], view.shape.tiles
    missing = [(layer, expert) for expert in experts if kept[expert] < tiles]
    return sorted(missing, key=lambda one: not kept[one[1]]) if len(missing) > 1 else missing


def _needed(layer: int, logits: FloatArray, view: View, apply_gate: ApplyGate) -> list[Expert]:
    """The experts that a router names and the layer's gate keeps, without those that a target keeps
    whole already."""
    assert view.router is not None
    routing = view.router(logits, layer)
    if view.target[layer].take(routing.experts).min(initial=view.shape.tiles) == view.shape.tiles:
        return []  # also without the gate
    return _not_kept(layer, by_probability(apply_gate(layer, routing)), view)


class NoPrediction(Prediction):
    """No prediction."""

    name: ClassVar[str] = "none"
    help: ClassVar[str] = "no prediction"
    predictor = None
    options = ()

    def reserve(self, view: View) -> int:
        return 0

    def experts(self, layer: int, signals: Signals, view: View, apply_gate: ApplyGate) -> list[Expert]:
        return []


class NextGate(Prediction):
    """The next layer's router on this layer's x (Mixtral-Offloading). For several rows it names as many
    experts as one token has: those that most rows use."""

    name: ClassVar[str] = "next-gate"
    help: ClassVar[str] = "the next layer's router on this layer's input"

    def reserve(self, view: View) -> int:
        return 2 * view.shape.top_k  # of the layer that is computed, and of a later one

    def experts(self, layer: int, signals: Signals, view: View, apply_gate: ApplyGate) -> list[Expert]:
        following = layer + 1
        if following not in signals.probes:
            return []
        return _needed(following, signals.probes[following], view, apply_gate)[: view.shape.top_k]


class BeforeAttention(NextGate):
    """MoEpic's: the next layer's router on the residual stream h_l before this layer's attention, so that
    fetching goes on while that is computed. What this layer's attention and experts add is not in it."""

    name: ClassVar[str] = "before-attention"
    help: ClassVar[str] = "the next layer's router on the residual stream before this layer's attention"
    before: ClassVar[bool] = True


class NextChannels(NextGate):
    """FloE's: the next layer's router on this layer's x names experts, and the next layer's up matrices on
    this layer's x the channels of them that its mask will probably keep. In the first layers the
    calibration's MLP corrects the router where it predicted its held-out text better, with the token's
    routings so far."""

    name: ClassVar[str] = "next-channels"
    help: ClassVar[str] = "channels of the next layer's experts, by its router and up matrices on this input"
    names_channels: ClassVar[bool] = True

    def reserve(self, view: View) -> int:
        return 0  # channels lie in staging slots

    def probes(self, layer: int, view: View) -> tuple[int, ...]:
        following = super().probes(layer, view)
        return (*following, -layer - 1) if corrected(view.calibration, layer + 1) else following

    def routing(self, layer: int, signals: Signals, view: View) -> Routing | None:
        logits, added = signals.probes.get(layer + 1), signals.probes.get(-layer - 1)
        if logits is None:
            return None
        assert view.router is not None
        history = None if view.calibration is None else view.calibration.mlp_history
        if history is not None and layer < len(history) and signals.logits is not None:
            if not layer:
                self._trajectory = Trajectory(len(history), view.shape.experts)
            self._trajectory.add(layer, *view.router(signals.logits, layer).pairs)
        if added is not None:
            logits = logits + added
            if history is not None:
                logits += self._trajectory.weights @ history[layer].T
        return view.router(logits, layer + 1)

    def experts(self, layer: int, signals: Signals, view: View, apply_gate: ApplyGate) -> list[Expert]:
        return []


class WholeLayer(Prediction):
    """The baseline of AdapMoE's figure 8, as DeepSpeed and FlexGen load: all experts of the next layer, those
    of the first layer after the last one."""

    name: ClassVar[str] = "whole-layer"
    help: ClassVar[str] = "all experts of the next layer"
    predictor = None

    def reserve(self, view: View) -> int:
        return 2 * view.shape.experts  # of the layer that is computed, and of the next

    def probes(self, layer: int, view: View) -> tuple[int, ...]:
        return ()

    def experts(self, layer: int, signals: Signals, view: View, apply_gate: ApplyGate) -> list[Expert]:
        following = (layer + 1) % view.shape.layers
        return [] if following == layer else _not_kept(following, list(range(view.shape.experts)), view)


class Residual(Prediction):
    """DALI's residual-based prefetching (section 4.2): the next layer's router on x_l + res_l, where res_l is
    the calibration's mean of x_{l+1} - x_l. Of the experts that most rows are predicted to use, the first
    `prefetch` that no target keeps are fetched. A router is linear, so its answer to the corrected input is
    the sum of its answers to the two."""

    name: ClassVar[str] = "residual"
    help: ClassVar[str] = "next-gate on the input that the calibration's mean residual corrects"
    options = (
        Number(
            name="prefetch",
            help=f"experts predicted a layer; by default 1, or 4 where a layer has more than {FEW_EXPERTS}",
            default=None,
            low=1,
            high=64,
        ),
        PAUSE,
    )
    needs_calibration = True
    without: ClassVar[str] = "prediction=next-gate"
    predictor = "residual"

    def __init__(self, *, prefetch: int | None, pause: str = PAUSE.default) -> None:
        super().__init__(pause=pause)
        self._prefetch = prefetch

    def reserve(self, view: View) -> int:
        return 2 * self._most(view)

    def _most(self, view: View) -> int:
        return self._prefetch or (1 if view.shape.experts <= FEW_EXPERTS else 4)

    def experts(self, layer: int, signals: Signals, view: View, apply_gate: ApplyGate) -> list[Expert]:
        following = layer + 1
        if following not in signals.probes:
            return []
        assert view.calibration is not None
        assert view.router is not None
        logits = signals.probes[following] + view.calibration.residual_logits[layer]
        most = by_probability(apply_gate(following, view.router(logits, following)))[: self._most(view)]
        return _not_kept(following, most, view)


class Lookahead(Prediction):
    """AdapMoE's (section 4.3): the next layer's router on this layer's x; where targets keep all that it
    names already, the layer after it, up to DEPTH layers ahead. After the last layer of a decode step the
    calibration's trained gate, if it has one, names the experts of the next token's first layer."""

    name: ClassVar[str] = "lookahead"
    help: ClassVar[str] = "next-gate, then further layers, then the next token's first layer"

    def reserve(self, view: View) -> int:
        return 2 * view.shape.top_k  # of the layer that is computed, and of a later one

    def probes(self, layer: int, view: View) -> tuple[int, ...]:
        layers = view.shape.layers
        if layer + 1 < layers:
            return tuple(range(layer + 1, min(layer + 1 + DEPTH, layers)))
        trained = view.calibration is not None and view.calibration.first_gate is not None
        return (0,) if trained and view.phase == "decode" else ()

    def experts(self, layer: int, signals: Signals, view: View, apply_gate: ApplyGate) -> list[Expert]:
        for later in self.probes(layer, view):
            logits = signals.probes.get(later)
            if logits is not None and (needed := _needed(later, logits, view, apply_gate)):
                return needed[: view.shape.top_k]
        return []


class Impact(Prediction):
    """HybriMoE's impact-driven prefetching. The routers of the next DEPTH layers are applied to this layer's
    x. For each predicted expert that no target keeps, its layer is simulated as `assignment=two-ended`
    divides it, with the expert missing and with it resident; the expert that saves most is fetched, if any
    saves time."""

    name: ClassVar[str] = "impact"
    help: ClassVar[str] = "HybriMoE's: of the next layers' experts the one that shortens a layer most"
    needs_costs = True

    def __init__(self, *, pause: str = PAUSE.default) -> None:
        super().__init__(pause=pause)
        self._costs: Costs | None = None  # of the known ones
        # what a layer saves by one expert and which, by the rows and missing tiles of its experts: few differ
        self._known: dict[tuple[tuple[int, int], ...], tuple[float, tuple[int, int]]] = {}

    def reserve(self, view: View) -> int:
        return 1 + DEPTH  # of the layer that is computed, and of as many later ones as this looks ahead

    def probes(self, layer: int, view: View) -> tuple[int, ...]:
        return tuple(range(layer + 1, min(layer + 1 + DEPTH, view.shape.layers)))

    def experts(self, layer: int, signals: Signals, view: View, apply_gate: ApplyGate) -> list[Expert]:
        assert view.router is not None
        if self._costs is not view.costs or len(self._known) > MOST_KNOWN:
            self._costs = view.costs
            self._known.clear()
        most, best = 0.0, list[Expert]()  # of equal ones the next layer
        tiles = view.shape.tiles
        for later in self.probes(layer, view):
            if later not in signals.probes:
                continue
            active = apply_gate(later, view.router(signals.probes[later], later)).active
            # what a target keeps will have landed by then
            missing = (tiles - view.target[later][active.indices]).tolist()
            if any(missing):
                pairs = list(zip(active.counts.tolist(), missing, strict=True))
                saved, pair = self._most_saved(pairs, view)
                if saved > most:
                    most, best = saved, [(later, int(active.experts[pairs.index(pair)]))]
        return best

    def _most_saved(self, pairs: list[tuple[int, int]], view: View) -> tuple[float, tuple[int, int]]:
        """Returns the seconds that a layer saves if one missing expert is resident, and the rows and missing
        tiles of the expert that saves most."""
        key = tuple(sorted(pairs))
        known = self._known.get(key)
        if known is None:
            rows, missing = ([pair[side] for pair in pairs] for side in (0, 1))
            known = _most_saved(active_costs(rows, missing, view), pairs)
            if len(key) <= NARROW:
                self._known[key] = known
        return known


def _most_saved(costs: ActiveCosts, pairs: list[tuple[int, int]]) -> tuple[float, tuple[int, int]]:
    """Returns the same. Experts with equally many rows and missing tiles save as much, so one of each is
    tried."""
    link, rest = costs.link, costs.for_queue[1:]
    before = two_ended(link, *rest)[1]
    most, best = 0.0, pairs[0]
    for pair in sorted({pair for pair in pairs if pair[1]}, reverse=True)[:CANDIDATES]:
        with_it = link.copy()
        with_it[pairs.index(pair)] = 0.0
        gain = before - two_ended(with_it, *rest)[1]
        if gain > most:
            most, best = gain, pair
    return most, best
