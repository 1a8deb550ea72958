"""A policy of five parts of which the gate decides the next layer, one layer early (Pre-gated MoE)."""

from __future__ import annotations

from pipeline.arrays import IntArray
from pipeline.policies.composed import Composed, Parts
from pipeline.policies.view import Ahead, Gated, Routing, Signals, Target, View


class PreGated(Composed):
    """As Composed; but in decode each layer's experts are those that its router names on the input of the
    layer before, and they enter the cache once that layer has been computed. The host's share of them begins
    in their own layer, from its own input: only the routing is early."""

    def __init__(self, name: str, parts: Parts) -> None:
        super().__init__(name, parts)
        self._next: tuple[Routing, IntArray] | None = None  # of the layer decided ahead, with its cuts

    @property
    def runs_all_routers(self) -> bool:
        return False

    def probes(self, layer: int, view: View) -> tuple[int, ...]:
        predicted = super().probes(layer, view)
        return tuple(dict.fromkeys((layer + 1, *predicted))) if self._decides(layer, view) else predicted

    def ahead(self, layer: int, signals: Signals, view: View) -> Ahead | None:
        self._next = None
        if not self._decides(layer, view):
            return None
        assert view.router is not None
        routing = view.router(signals.probes[layer + 1])
        cut = self.parts.assignment.cut(layer + 1, routing, view)
        self._next = routing, cut
        return Ahead(Gated(routing, routing, predicted=True), cut, early=False)

    def after(self, layer: int, routing: Routing, view: View) -> tuple[Target, ...]:
        targets = super().after(layer, routing, view)
        if self._next is None or not self.uses_device:
            return targets
        decided, cut = self._next  # its `plan` is not called
        moves = self.parts.replacement.plan(layer + 1, decided.active, cut, view)
        return *targets, *self._targets(moves, view)

    def _decides(self, layer: int, view: View) -> bool:
        return view.phase == "decode" and layer + 1 < view.shape.layers
