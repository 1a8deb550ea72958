"""The preset daop: in prefill the experts that a prompt uses move to the device; in decode the host begins a
layer ahead of the device."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray, IntArray
from pipeline.policies.calibration import Calibration
from pipeline.policies.options import Choice, Number, Option
from pipeline.policies.parts import Placement, cacheable, require_calibration, whole_room
from pipeline.policies.placements import Calibrated, Known, Popular
from pipeline.policies.view import Ahead, Gated, Plan, Policy, Router, Routing, Signals, Target, View

SMALLEST = 1e-30  # sum of weights by which is divided
PLACEMENTS: dict[str, type[Placement]] = {part.name: part for part in (Calibrated, Popular, Known)}


class Daop(Policy):
    """DAOP (DATE 2025): experts are placed by a calibration's decoding, the same number in every layer, and
    each is computed where it is (section IV-A).

    In prefill, before a layer's experts run, the most used experts on the host change places with the least
    used ones on the device, where they are used `swap` times as much or more (Algorithm 1); uses are counted
    over the chunks of a prompt and over the live sequences. Decoding changes no residency.

    In decode, from layer `first_layer` on, a layer's routing is its router's choice for the previous layer's
    input, and the router is not run on its own (section IV-C). Of the predicted experts, the host computes
    its own at once, on that input, and the device computes its own on the layer's own input. Where more than
    max(1, k // 2) are on the host, the rest of them are replaced by the best-scored experts on the device
    (graceful degradation)."""

    name = "daop"
    help: ClassVar[str] = "Cache by prompt; the host runs a layer ahead"
    exact = False
    options: ClassVar[tuple[Option, ...]] = (
        Choice(
            name="placement",
            help="which experts are resident at the start",
            default="calibrated",
            choices=tuple(PLACEMENTS),
        ),
        Number(name="first_layer", help="the first predicted layer, from 0", default=4, low=1, high=4096),
        Number(
            name="swap",
            help="how many times the uses an expert must have to change places",
            default=1.05,
            low=0,
            high=100,
            whole=False,
        ),
        Choice(
            name="early",
            help="0: the host begins with predicted experts only in their own layer, for comparison",
            default="1",
            choices=("1", "0"),
        ),
        Choice(
            name="predict",
            help="0: every layer runs its own router, exactly",
            default="1",
            choices=("1", "0"),
        ),
    )

    def __init__(self, *, placement: str, first_layer: int, swap: float, early: str, predict: str) -> None:
        self._placement = PLACEMENTS[placement]()
        self._first_layer = first_layer
        self._swap = swap
        self._early = early == "1"
        self._predict = predict == "1"
        self.exact = self.by_row = not self._predict
        self.runs_ahead = self._early and self._predict
        self.needs_calibration = self._placement.needs_calibration
        self._counts: dict[int, NDArray[np.int64]] = {}  # live sequence -> [L, E] rows of its prompt

    @property
    def runs_all_routers(self) -> bool:
        return not self._predict

    def notes(self, view: View) -> tuple[str, ...]:
        notes = [f"{self.name}: {note}" for note in self._placement.notes(view)]
        if self._predict and self._first_layer >= view.shape.layers:
            notes.append(
                f"{self.name}: no layer is predicted: the model has {view.shape.layers}, and the first "
                f"predicted one, counted from 0, is {self._first_layer} (--set {self.name}.first_layer=1)"
            )
        return tuple(notes)

    def check_calibration(self, calibration: Calibration | None) -> None:
        super().check_calibration(calibration)
        require_calibration(self.name, (self._placement,), calibration)

    def placement(self, view: View) -> IntArray:
        self._counts.clear()
        chosen = self._placement.chosen(view, whole_room(view.shape, cacheable(view)))
        return np.where(chosen, view.shape.tiles, 0).astype(np.int32)

    def probes(self, layer: int, view: View) -> tuple[int, ...]:
        return (layer + 1,) if self._predicts(layer + 1, view) else ()

    def plan(self, layer: int, routing: Routing, view: View) -> Plan:
        if layer == 0:  # not predicted, so every step plans it
            for sequence in self._counts.keys() - view.live:
                del self._counts[sequence]
        cut = np.minimum(view.residency[layer], view.target[layer])
        if view.phase == "decode":
            return Plan(cut)
        self._count(layer, routing, view)
        counts = np.zeros(view.shape.experts, np.int64)
        for counted in self._counts.values():
            counts += counted[layer]
        targets = []
        for cold, hot in swaps(counts.tolist(), view.target[layer].tolist(), self._swap):
            targets += [Target(layer, cold, 0), Target(layer, hot, view.shape.tiles)]
            cut[cold], cut[hot] = 0, view.shape.tiles
        return Plan(cut, tuple(targets))

    def ahead(self, layer: int, signals: Signals, view: View) -> Ahead | None:
        following = layer + 1
        if not self._predicts(following, view):
            return None
        assert view.router is not None
        logits = signals.probes[following]
        predicted = view.router(logits, following)
        cut = np.minimum(view.residency[following], view.target[following])
        kept = degrade(predicted, view.router, following, logits, cut, view.shape.tiles)
        return Ahead(Gated(kept, predicted, True), cut, self._early)

    def _predicts(self, layer: int, view: View) -> bool:
        return self._predict and view.phase == "decode" and self._first_layer <= layer < view.shape.layers

    def _count(self, layer: int, routing: Routing, view: View) -> None:
        """Add the step's rows to the counts of their prompts."""
        of_rows = np.array(view.sequences or (0,) * len(routing.experts))
        for sequence in dict.fromkeys(of_rows.tolist()):
            if sequence not in self._counts:
                self._counts[sequence] = np.zeros(view.popularity.shape, np.int64)
            rows = of_rows == sequence
            own = Routing(routing.experts[rows], routing.weights[rows])
            self._counts[sequence][layer] += own.workload(view.shape.experts)


def swaps(counts: list[int], target: list[int], ratio: float) -> list[tuple[int, int]]:
    """Algorithm 1 for one layer: the pairs (cold expert on the device, hot expert on the host) that change
    places. The hottest on the host are paired with the coldest on the device, E / 2 pairs; a pair changes
    where hot >= ratio * cold and hot > 0. Ties go to the smaller index."""
    pairs = len(counts) // 2
    host = [expert for expert, tiles in enumerate(target) if not tiles]
    device = [expert for expert, tiles in enumerate(target) if tiles]
    host.sort(key=lambda expert: (-counts[expert], expert))
    device.sort(key=lambda expert: (counts[expert], expert))
    return [
        (cold, hot)
        for cold, hot in zip(device[:pairs], host[:pairs], strict=False)
        if counts[hot] > 0 and counts[hot] >= ratio * counts[cold]
    ]


def degrade(
    predicted: Routing, router: Router, layer: int, logits: FloatArray, cut: IntArray, tiles: int
) -> Routing:
    """Graceful degradation of a layer's predicted routing, row by row. Of the experts that are not wholly on
    the device (cut [E] below `tiles`), the best max(1, k // 2) stay. Each of the others, the lowest-scored
    first, is replaced by the best-scored expert (by the router, from logits [R, E]) that is on the device and
    not chosen yet; it stays where no such expert is left.

    The weights of such a row are those that the router gives its new experts, scaled to their old sum."""
    keep = max(1, predicted.experts.shape[1] // 2)
    resident = [expert for expert, kept in enumerate(cut.tolist()) if kept == tiles]
    here = set(resident)
    experts: IntArray | None = None
    for row, (chosen, weights) in enumerate(
        zip(predicted.experts.tolist(), predicted.weights.tolist(), strict=True)
    ):
        away = [slot for slot, expert in enumerate(chosen) if weights[slot] and expert not in here]
        if len(away) <= keep:
            continue
        away.sort(key=lambda slot: (-weights[slot], slot))
        own = logits[row : row + 1]
        scores = router.scores(own, layer)[0].tolist()
        taken = set(chosen)
        best = sorted((e for e in resident if e not in taken), key=lambda e: (-scores[e], e))
        best = best[: len(away) - keep]
        if not best:
            continue
        if experts is None:
            experts, new_weights = predicted.experts.copy(), predicted.weights.copy()
        for slot, expert in zip(away[len(away) - len(best) :], best, strict=True):
            experts[row, slot] = expert
        given = router.weights_of(own, experts[row : row + 1], layer)[0] * (predicted.weights[row] != 0)
        new_weights[row] = given * (sum(weights) / max(float(given.sum()), SMALLEST))
    return predicted if experts is None else Routing(experts, new_weights)
