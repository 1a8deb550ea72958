"""A policy's five parts: placement, gate, prediction, assignment and replacement, small objects over arrays
that `composed.py` calls in turn; and their refusals without a calibration that they need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import IntArray
from pipeline.errors import PolicyError
from pipeline.policies.calibration import Calibration
from pipeline.policies.options import PAUSE, Option
from pipeline.policies.view import Active, Gated, ModelShape, Routing, Signals, View
from protocol.program import COMMAND


def require_calibration(policy: str, parts: Iterable[Part], calibration: Calibration | None) -> None:
    """Raises PolicyError, one line with the remedy, where a part lacks what a calibration measures."""
    incomplete = [(part, missing) for part in parts if (missing := part.missing(calibration))]
    if incomplete:
        needs = " and ".join(dict.fromkeys(missing for _, missing in incomplete))
        without = " ".join(
            dict.fromkeys(f"--set {policy}.{part.without}" for part, _ in incomplete if part.without)
        )
        raise PolicyError(
            f"policy {policy} needs {needs}: run {COMMAND} calibrate --text FILE"
            " (and --model, if given)" + (f", or avoid that with {without}" if without else "")
        )


Expert = tuple[int, int]  # (layer, expert)
Chosen = NDArray[np.bool_]  # [L, E]
ApplyGate = Callable[[int, Routing], Routing]  # layer, predicted routing -> the gated routing


@dataclass(frozen=True)
class Room:
    """Limits of a replacement's cache."""

    experts: int  # over all layers
    kept: Sequence[int]  # [L] leading tiles of each cached expert
    sizes: Sequence[int] | None = None  # [L] experts of each layer, in all at most `experts`; None: any


def whole_experts(shape: ModelShape, capacity: int) -> int:
    """The number of whole experts that a cache of `capacity` tiles holds."""
    return min(capacity // shape.tiles, shape.layers * shape.experts)


def whole_room(shape: ModelShape, tiles: int) -> Room:
    """Returns the room of a cache of whole experts, without sizes of layers."""
    return Room(tiles // shape.tiles, [shape.tiles] * shape.layers)


def cacheable(view: View) -> int:
    """The capacity, in tiles, but for what is more than all experts."""
    shape = view.shape
    return min(view.capacity, shape.layers * shape.experts * shape.tiles)


def evenly(layers: int, budget: int) -> list[int]:
    """`budget` experts divided evenly over the layers, the remainder to the first layers."""
    each, left = divmod(budget, layers)
    return [each + (layer < left) for layer in range(layers)]


class Part(ABC):
    """One of a policy's five parts. The constructor takes the part's options by keyword, already read."""

    name: ClassVar[str]
    help: ClassVar[str]  # one line
    options: ClassVar[tuple[Option, ...]] = ()
    needs_costs: bool = False
    needs_calibration: bool = False
    keeps_heat: bool = False  # as `Policy.keeps_heat`
    without: ClassVar[str] = ""  # the option that avoids the missing calibration, as "gate=own"

    def missing(self, calibration: Calibration | None) -> str:
        """Returns what the model's calibration lacks, as the object of "needs"; "" where it has all."""
        if self.needs_calibration and calibration is None:
            return "a calibration of this model"
        return ""

    def join(self, parts: Parts) -> None:
        """Called once with all five parts, before any other method."""
        del parts  # most parts do not need the others

    def notes(self, view: View) -> tuple[str, ...]:
        """Options that cannot be followed here, with the reason; each one line without the policy's name."""
        return ()


class Placement(Part):
    """The part that decides which experts are resident at the start."""

    @abstractmethod
    def chosen(self, view: View, room: Room) -> Chosen:
        """The resident experts, at most `room.experts`; those beyond a layer's size are not placed."""


class Gate(Part):
    """The part that decides which experts a token needs."""

    exact: bool = True
    by_row: bool = True  # as of Policy
    pre_gated: bool = False  # True: in decode the layer before decides (`composed.py`)

    def __call__(self, layer: int, signals: Signals, view: View) -> Gated:
        """The routing of the layer from its own router's logits."""
        assert signals.logits is not None
        assert view.router is not None
        routing = view.router(signals.logits, layer)
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
        """Returns what `Policy.probes` does; by default the next layer."""
        return (layer + 1,) if layer + 1 < view.shape.layers else ()

    before: ClassVar[bool] = False  # True: by the residual stream before a layer's attention
    names_channels: ClassVar[bool] = False  # True: it predicts a routing and no experts, and needs no reserve

    def routing(self, layer: int, signals: Signals, view: View) -> Routing | None:
        """Returns what `Policy.channels_ahead` does, where `names_channels`."""
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
    # where new experts come from: "fetched" ones, "swapped" for held ones, "admitted" in the background, none
    fills: ClassVar[str] = ""
    admits: ClassVar[bool] = False  # True: predicted experts enter the cache at once, and there is no reserve

    def room(self, view: View, tiles: int) -> Room:
        """The room of a cache of so many tiles."""
        return whole_room(view.shape, tiles)

    def start(self, placed: list[Expert], room: Room, view: View) -> None:
        """The cache holds these experts and has this room; earlier state is dropped."""

    def observe(self, layer: int, signals: Signals, view: View) -> None:
        """Take note of the layer's router logits, before the layer is planned."""

    def plan(self, layer: int, active: Active, cut: IntArray, view: View) -> Moves:
        """Changes before the layer is computed. Experts that enter the cache have a cut above 0, so this step
        needs them on the device anyway; no active one leaves."""
        return STAY

    def admit(self, experts: Sequence[Expert]) -> Moves:
        """Let predicted experts of later layers enter the cache, where `admits`."""
        return STAY

    def after(self, layer: int, active: Active, view: View) -> Moves:
        """Changes once the layer has been computed."""
        return STAY

    def rest(self, view: View) -> Room | None:
        """The engine is idle: another room, which `held` fills, or None."""
        return None

    def held(self, layer: int) -> set[int]:
        """The experts of a layer in the cache; asked where `rest` returned a room."""
        return set()


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
