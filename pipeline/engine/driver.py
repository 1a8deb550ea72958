"""The one place that calls a policy's methods, in their fixed order (docs/architecture.md, One step).

A `PolicyDriver` calls the policy for each layer in turn, and a `LayerExecutor` carries out its decisions:
with tensors and processes (`pipeline/engine/engine.py`), on the clock of a cost model
(`pipeline/replay/machine.py`), or with arrays alone in tests. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import IntArray, Phase
from pipeline.counters import PrefetchMeter
from pipeline.errors import PlanError, PolicyError
from pipeline.policies.costs import Costs
from pipeline.policies.view import Ahead, Gated, Policy, Routing, Signals, Target, View
from shm.mask import DENSE, Mask

Scalar = TypeVar("Scalar", bound=np.generic)
Begun = TypeVar("Begun")  # an executor's handle of a host share that has begun
BegunCo = TypeVar("BegunCo", covariant=True)


class LayerDecision(NamedTuple, Generic[BegunCo]):
    """The decisions for one layer of a step. The arrays are valid until the layer has been computed."""

    layer: int
    signals: Signals  # `logits` None where the layer was decided one layer earlier
    gated: Gated
    cut: IntArray  # [E], read only where active
    resident: IntArray  # [E] tiles, live; as in the plan's view until `targets` are applied
    targets: tuple[Target, ...] = ()
    begun: BegunCo | None = None  # the host's share, where it began one layer earlier
    mask: Mask = DENSE  # of the experts' channels, on both sides

    @property
    def stale(self) -> bool:
        """The host computes its share from the input of the layer before."""
        return self.begun is not None


class LayerExecutor(Protocol[Begun]):
    """Carries out one layer. The driver calls these methods in this order."""

    def read_before(self, layer: int, probes: Sequence[int]) -> Signals:
        """Compute the routers of `probes` on the residual stream before this layer's attention. Called only
        where a policy names any, before `read`."""

    def read(self, layer: int, probes: Sequence[int], own: bool) -> Signals:
        """Compute the routers of `probes` on this layer's x and, if `own`, the layer's own router. Tiles that
        have landed on the device meanwhile are resident from now on."""

    def begin(self, decision: LayerDecision[Begun]) -> None:
        """Apply the decision's targets, divide the layer, begin the host's share, order missing tiles."""

    def begin_early(self, layer: int, ahead: Ahead, mask: Mask) -> Begun:
        """Begin the host's share of the next layer with this layer's x."""

    def prefetch(self, targets: Sequence[Target], no_room: int) -> None:
        """Apply a prediction's targets and order their tiles, behind those that are demanded. `no_room`: the
        experts that the prediction named beside these, and had no room for."""

    def prefetch_channels(self, layer: int, routing: Routing, mask: Mask) -> None:
        """Order the channels that a later layer's mask would keep for this layer's x, behind all demands."""

    def compute(self, decision: LayerDecision[Begun]) -> None:
        """Compute the device's share and wait for the host's."""

    def end(self, targets: Sequence[Target]) -> None:
        """Apply the targets that follow the layer."""


class PolicyDriver(Generic[Begun]):
    """Drives one policy, and keeps the state that lasts longer than a layer."""

    def __init__(self, policy: Policy, view: View, landed: int = 0, useful: int = 0) -> None:
        """`view`: the policy's inputs. Its residency and target are live; its popularity is counted
        in place. `landed`, `useful`: prefetched tiles that landed, and those that were used, under earlier
        policies. Raises PolicyError where the policy lacks an input."""
        self.policy = policy
        self.prefetch = PrefetchMeter(landed, useful)
        self._popularity = view.popularity
        self._counted = [counts.data for counts in view.popularity]  # the same memory
        self._early: tuple[Ahead, Begun | None] | None = None
        self.view = replace(
            view,
            residency=_read_only(view.residency),
            target=_read_only(view.target),
            popularity=_read_only(view.popularity),
        )
        if policy.needs_costs and view.costs is None:
            raise PolicyError(
                f"policy {policy.name} plans by costs, and none were measured or given (--costs)"
            )
        policy.check_calibration(view.calibration)
        self.placement = policy.placement(self.view)  # [L, E]
        self._masks = policy.sparsity.masks(policy.name, view.shape.layers, view.up, view.calibration)
        self._masked, self.counting = False, True  # in the present step; in the popularity
        sparsity = policy.sparsity
        self._left = 0.0 if sparsity.dense else sparsity.share(view.calibration)
        self._given = view.costs
        self._sparse: tuple[Costs, Costs] | None = None  # the latest that `priced` was given, and its answer

    def priced(self, costs: Costs, phase: Phase) -> Costs:
        """The costs of a tile in such a step, where its masks leave channels out."""
        if not self._left or phase != "decode":
            return costs
        if self._sparse is None or self._sparse[0] is not costs:
            self._sparse = costs, costs.masked(self._left, self.view.up_share)
        return self._sparse[1]

    def begin_step(
        self,
        phase: Phase,
        sequences: tuple[int, ...],
        live: Iterable[int] = (),
        costs: Costs | None = None,
    ) -> None:
        """Begin a step. `sequences`: that of each row; `live`: these and others that have begun and not
        ended; `costs`: to plan with in this step, those of dense tiles."""
        self._early = None
        self._masked = phase == "decode"
        known, on = frozenset(sequences).union(live), self.prefetch.on
        costs, kept = costs or self._given, 1 - self._left if self._masked else 1.0
        costs = None if costs is None else self.priced(costs, phase)
        view = replace(self.view, phase=phase, sequences=sequences, live=known, prefetching=on)
        self.view = replace(view, costs=costs, kept=kept)

    def layer(self, layer: int, executor: LayerExecutor[Begun]) -> None:
        """Have a layer decided and computed. Raises PlanError where the policy breaks its contract, and the
        executor's exceptions."""
        policy, view, early = self.policy, self.view, self._early
        self._early = None
        if before := policy.probes_before(layer, view):
            found = executor.read_before(layer, before)
            self._prefetch(policy.predict_before(layer, found, view), layer, executor)
        signals = executor.read(layer, policy.probes(layer, view), own=early is None)
        resident, mask = view.residency[layer], self._mask(layer)
        decision: LayerDecision[Begun]
        if early is None:
            gated = policy.gate(layer, signals, view)
            plan = policy.plan(layer, gated.routing, view)
            fields = layer, signals, gated, plan.cut, resident, plan.targets, None, mask
            decision = tuple.__new__(LayerDecision, fields)  # in a third of the time
        else:
            decided, begun = early
            decision = LayerDecision(layer, signals, decided.gated, decided.cut, resident, (), begun, mask)
        executor.begin(decision)
        if self.counting:
            active, counted = decision.gated.routing.active, self._counted[layer]
            for expert, rows in zip(active.experts.tolist(), active.counts.tolist(), strict=True):
                counted[expert] += rows
        # Where the policy decides the next layer now, the host's share of it may begin at once.
        if (following := policy.ahead(layer, signals, view)) is not None:
            next_layer = layer + 1, following, self._mask(layer + 1)
            begun = executor.begin_early(*next_layer) if following.early else None
            self._early = following, begun
        self._prefetch(policy.predict(layer, signals, decision.gated, view), layer, executor)
        if (ahead := policy.channels_ahead(layer, signals, view)) is not None:
            executor.prefetch_channels(layer + 1, ahead, self._mask(layer + 1))
        executor.compute(decision)
        executor.end(policy.after(layer, decision.gated.routing, view))

    def end_step(self, landed: int, useful: int, seconds: float = 0.0) -> bool:
        """A step has been computed. `landed`, `useful`: prefetched tiles that landed and were used, in all
        decode steps so far. `seconds`: as in View. True where prefetching was switched on or off."""
        self.view = replace(self.view, step=self.view.step + 1, seconds=seconds)
        return self.view.phase == "decode" and self.policy.pauses and self.prefetch.step(landed, useful)

    def rest(self) -> tuple[Target, ...]:
        """Targets to change while the engine is idle."""
        return self.policy.rest(self.view)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about what the policy cannot follow here, and how its masks are found."""
        policy, view = self.policy, self.view
        return *policy.notes(view), *policy.sparsity.notes(policy.name, view.up, view.calibration)

    def cancel_early(self) -> Begun | None:
        """The step has failed: the host share that began early for a layer, which will not be computed."""
        early, self._early = self._early, None
        return None if early is None else early[1]

    def forget_counts(self) -> None:
        """Reset popularity and the counts of prefetched and used tiles."""
        self._popularity[:] = 0
        self.prefetch = PrefetchMeter()

    def _mask(self, layer: int) -> Mask:
        """Return a layer's mask in the present step."""
        return self._masks[layer] if self._masked else DENSE

    def _prefetch(self, targets: Sequence[Target], layer: int, executor: LayerExecutor[Begun]) -> None:
        """Have a prediction's targets ordered, made while this layer is computed. Raises PlanError."""
        if not targets and not self.policy.no_room:
            return
        for target in targets:
            if target.layer == layer and target.tiles < self.view.residency[layer, target.expert]:
                raise PlanError(f"policy {self.policy.name} evicts tiles of a layer that is being computed")
        executor.prefetch(targets, self.policy.no_room)


def _read_only(array: NDArray[Scalar]) -> NDArray[Scalar]:
    view = array.view()
    view.flags.writeable = False
    return view
