"""Policies made of five parts: placement, gate, prediction, assignment and replacement.

A part is a small object over arrays; the composed policy calls each in turn and keeps the counts. It divides
the capacity, in tiles: some are the *reserve* of the prediction, the rest is the *cache* of the replacement,
which the placement fills at the start. A cached expert keeps its leading tiles, all of them or as many as its
layer's `Room.kept`. The reserve (`reserve.py`) holds the other tiles of a predicted expert. When its layer is
planned, they are released at once where the device does not need the expert, and otherwise once the layer has
been computed; the replacement may take leading tiles of it into the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import IntArray
from pipeline.policies.calibration import Calibration
from pipeline.policies.inputs import NeedsInputs, require, require_calibration
from pipeline.policies.options import PAUSE, Option
from pipeline.policies.parts import Room, cacheable, unused_tiles_note, whole_experts, whole_room
from pipeline.policies.reserve import Reserve
from pipeline.policies.view import Active, Gated, Plan, Policy, Routing, Signals, Target, View

Expert = tuple[int, int]  # (layer, expert)
Chosen = NDArray[np.bool_]  # [L, E]
ApplyGate = Callable[[int, Routing], Routing]  # layer, predicted routing -> the gated routing


class Part(NeedsInputs, ABC):
    """One of a policy's five parts. The constructor takes the part's options by keyword, already read."""

    name: ClassVar[str]
    help: ClassVar[str]  # one line
    options: ClassVar[tuple[Option, ...]] = ()

    def contradiction(self) -> str:
        """The part's options that contradict each other, "" where none do."""
        return ""

    def join(self, parts: Parts) -> None:
        """Called once with all five parts, before any other method."""
        del parts  # most parts do not need the others

    def notes(self, view: View) -> tuple[str, ...]:
        """Options that cannot be followed here, with the reason; each one line without the policy's name."""
        return ()


class Placement(Part):
    """The part that decides which experts are resident at the start."""

    likes_calibration: bool = False  # where the model has none, it goes by the use of the experts

    @abstractmethod
    def chosen(self, view: View, room: Room) -> Chosen:
        """The resident experts, at most `room.experts`; those beyond a layer's size are not placed."""


class Gate(Part):
    """The part that decides which experts a token needs."""

    exact: bool = True
    pre_gated: bool = False  # True: in decode the layer before decides (`pre_gated.py`)

    def __call__(self, layer: int, signals: Signals, view: View) -> Gated:
        """The routing of the layer from its own router's logits."""
        assert signals.logits is not None
        assert view.router is not None
        routing = view.router(signals.logits)
        return Gated(self.apply_gate(layer, routing, view), routing)

    def limits(self, view: View) -> Sequence[float]:
        """The share of a token's weight that may be dropped in each layer, [L]; may be infinite."""
        return [0.0] * view.shape.layers

    @abstractmethod
    def apply_gate(self, layer: int, routing: Routing, view: View) -> Routing:
        """The experts that the tokens need of those that the layer's router chose, or is predicted to."""


class Prediction(Part):
    """The part that predicts which experts later layers will need."""

    predictor: ClassVar[Literal["raw", "residual"] | None] = "raw"  # its name in the calibration
    options: ClassVar[tuple[Option, ...]] = (PAUSE,)

    def __init__(self, *, pause: str = PAUSE.default) -> None:
        self.pauses = pause == "1"

    @abstractmethod
    def reserve(self, view: View) -> int:
        """Experts that may be held at once because they were predicted: for the layer that is computed and
        for later ones; 0: the part predicts nothing, and the methods below are not called."""

    def probes(self, layer: int, view: View) -> tuple[int, ...]:
        """As `Policy.probes`; by default the next layer."""
        return (layer + 1,) if layer + 1 < view.shape.layers else ()

    names_channels: ClassVar[bool] = False  # True: it predicts a routing and no experts, and needs no reserve

    def routing(self, layer: int, signals: Signals, view: View) -> Routing | None:
        """Where `names_channels`: as `Policy.channels_ahead`."""
        return None

    @abstractmethod
    def experts(self, layer: int, signals: Signals, view: View, apply_gate: ApplyGate) -> list[Expert]:
        """Experts that should be fetched because they will be needed: no target keeps them yet (`view.target`
        is 0). The most probable first."""


class Assignment(Part):
    """The part that decides which side computes which tiles: a cut for each active expert."""

    uses_device: ClassVar[bool] = True  # False: every cut is 0
    uses_host: ClassVar[bool] = True  # False: every cut is n
    fetches: ClassVar[bool] = True  # False: no cut is ever beyond the residency

    @abstractmethod
    def cut(self, layer: int, routing: Routing, view: View) -> IntArray:
        """Cuts int32 [E] in 0..n; only those of active experts are read."""


class Moves(NamedTuple):
    """Changes of the replacement's cache: experts that leave it, and at most as many that enter it."""

    out: Sequence[Expert]
    into: Sequence[Expert]


STAY = Moves((), ())


class Replacement(Part):
    """The part that decides which experts stay resident. It tracks the cache's experts from `start` on; it
    does not see those that a prediction holds in the reserve."""

    settles: int = 0  # as `Policy.settles`
    fills: ClassVar[str] = ""  # where new experts come from: "fetched" ones, "swapped" for held ones, or none
    admits: ClassVar[bool] = False  # True: predicted experts enter the cache at once, and there is no reserve
    splits: ClassVar[bool] = False  # True: a cached expert may keep a part of its tiles

    def room(self, view: View, tiles: int) -> Room:
        """The room of a cache of so many tiles."""
        return whole_room(view.shape, tiles)

    def start(self, placed: list[Expert], room: Room, view: View) -> None:
        """The cache holds these experts and has this room; earlier state is dropped."""

    def observe(self, layer: int, signals: Signals, view: View) -> None:
        """Take note of the layer's router logits, before the layer is planned."""

    def plan(self, layer: int, active: Active, cut: IntArray, view: View) -> Moves:
        """Before the layer is computed. Experts that enter the cache have a cut above 0, so this step needs
        them on the device anyway; no active one leaves."""
        return STAY

    def admit(self, experts: Sequence[Expert]) -> Moves:
        """Where `admits`: predicted experts of later layers enter the cache."""
        return STAY

    def after(self, layer: int, active: Active, view: View) -> Moves:
        """Once the layer has been computed."""
        return STAY


@dataclass(frozen=True)
class Parts:
    """A policy's five parts."""

    placement: Placement
    gate: Gate
    prediction: Prediction
    assignment: Assignment
    replacement: Replacement

    def __iter__(self) -> Iterator[Part]:
        yield from (self.placement, self.gate, self.prediction, self.assignment, self.replacement)


class Composed(Policy):
    """A policy made of five parts."""

    def __init__(self, name: str, parts: Parts) -> None:
        self.name = name
        self.parts = parts
        self.exact = parts.gate.exact
        self.needs_costs = any(part.needs_costs for part in parts)
        self.needs_calibration = any(part.needs_calibration for part in parts)
        self.likes_calibration = parts.placement.likes_calibration
        self.settles = parts.replacement.settles
        self.uses_device = parts.assignment.uses_device
        self.uses_host = parts.assignment.uses_host
        self.pauses = parts.prediction.pauses
        self._predicts = False
        self._reserve = Reserve(0, 0, 1)
        self._room = Room(0, ())
        for part in parts:
            part.join(parts)

    def notes(self, view: View) -> tuple[str, ...]:
        if not self.uses_device:
            return ()
        notes = [f"{self.name}: {note}" for part in self.parts for note in part.notes(view)]
        predicts, reserve = self.parts.prediction, self._reserve_in(view)
        if predicts.reserve(view) and not reserve.size:
            notes.append(
                f"{self.name}: prediction={predicts.name} is off: half of the cache is less than an expert"
            )
        elif reserve.size and self.parts.replacement.admits:
            sizes = self.parts.replacement.room(view, cacheable(view)).sizes or ()
            if empty := sum(not size for size in sizes):
                notes.append(f"{self.name}: {empty} of {len(sizes)} layers have no cache to prefetch into")
        elif predicts.names_channels and self.sparsity.dense:
            notes.append(f"{self.name}: prediction={predicts.name} is off: no channel is left out")
        elif reserve.note:
            notes.append(f"{self.name}: {reserve.note}")
        unused = () if self.parts.replacement.splits else unused_tiles_note(self.name, view)
        return *unused, *dict.fromkeys(notes)

    def check_calibration(self, calibration: Calibration | None) -> None:
        super().check_calibration(calibration)
        require_calibration(self.name, tuple(self.parts), calibration)

    def placement(self, view: View) -> IntArray:
        require(self.name, tuple(self.parts), view)
        self._reserve = self._reserve_in(view)
        self._predicts = self._reserve.size > 0
        if self.parts.replacement.admits:
            self._reserve = Reserve(0, 0, 1)
        self._room = room = self.parts.replacement.room(view, cacheable(view) - self._reserve.tiles)
        chosen = self.parts.placement.chosen(view, room)
        if room.sizes is not None:
            for layer, size in enumerate(room.sizes):
                placed = np.flatnonzero(chosen[layer])
                if len(placed) > size:  # a layer's most popular experts stay, of equal ones the first
                    order = np.argsort(-view.popularity[layer, placed], kind="stable")
                    chosen[layer, placed[order[size:]]] = False
        self.parts.replacement.start(
            list(zip(*(axis.tolist() for axis in np.nonzero(chosen)), strict=True)), room, view
        )
        return np.where(chosen, np.array(room.kept, np.int32)[:, None], 0).astype(np.int32)

    def probes(self, layer: int, view: View) -> tuple[int, ...]:
        if not view.prefetching or not (self._predicts or self._names_channels(view)):
            return ()
        return self.parts.prediction.probes(layer, view)

    def _names_channels(self, view: View) -> bool:
        """In this step."""
        masked = not self.sparsity.dense and self.sparsity.acts_in(view.phase)
        return masked and self.parts.prediction.names_channels

    def channels_ahead(self, layer: int, signals: Signals, view: View) -> Routing | None:
        if not (view.prefetching and self._names_channels(view)):
            return None
        routing = self.parts.prediction.routing(layer, signals, view)
        return None if routing is None else self.parts.gate.apply_gate(layer + 1, routing, view)

    def gate(self, layer: int, signals: Signals, view: View) -> Gated:
        self.parts.replacement.observe(layer, signals, view)
        return self.parts.gate(layer, signals, view)

    def plan(self, layer: int, routing: Routing, view: View) -> Plan:
        cut = self.parts.assignment.cut(layer, routing, view)
        if not self.uses_device:
            return Plan(cut)
        active = routing.active
        targets = self._targets(self.parts.replacement.plan(layer, active, cut, view), view)
        if self._reserve.holds(layer):
            unneeded = self._reserve.release(layer, active.experts[cut[active.experts] > 0].tolist())
            targets = *self._cached(unneeded, view), *targets
        return Plan(cut, targets)

    def predict(self, layer: int, signals: Signals, gated: Gated, view: View) -> tuple[Target, ...]:
        self.no_room = 0
        if not (self._predicts and view.prefetching):
            return ()
        wanted = self.parts.prediction.experts(
            layer, signals, view, lambda of, routing: self.parts.gate.apply_gate(of, routing, view)
        )
        if self.parts.replacement.admits:  # into later layers: this one is being computed
            wanted = [key for key in wanted if key[0] != layer]
            targets = self._targets(self.parts.replacement.admit(wanted), view)
        else:
            tiles = view.shape.tiles
            missing = ((key, tiles - int(view.target[key])) for key in wanted)
            targets = tuple(Target(*key, tiles) for key in self._reserve.take(missing))
        self.no_room = len(wanted) - sum(target.tiles > 0 for target in targets)
        return targets

    def after(self, layer: int, routing: Routing, view: View) -> tuple[Target, ...]:
        if not self.uses_device:
            return ()
        targets = self._targets(self.parts.replacement.after(layer, routing.active, view), view)
        return *self._cached(self._reserve.release(layer), view), *targets

    def _reserve_in(self, view: View) -> Reserve:
        whole = whole_experts(view.shape, view.capacity)
        return Reserve(self.parts.prediction.reserve(view), whole, view.shape.tiles)

    def _cached(self, released: Iterable[tuple[Expert, int]], view: View) -> Iterator[Target]:
        """Of experts with so many tiles in the reserve the cache keeps the others, if any."""
        return (Target(*key, view.shape.tiles - held) for key, held in released)

    def _targets(self, moves: Moves, view: View) -> tuple[Target, ...]:
        """Shrinking targets come first: applied one by one they never exceed the capacity. An expert that the
        reserve holds has all its tiles as target already, and the reserve holds those beyond the kept
        ones."""
        if moves is STAY:
            return ()
        for key in moves.out:
            self._reserve.give(key, view.shape.tiles)
        kept = self._room.kept
        grown = [Target(*k, kept[k[0]]) for k in moves.into if not self._reserve.give(k, kept[k[0]])]
        return *(Target(*key, 0) for key in moves.out), *grown
