"""Placement parts: they decide which experts are resident at the start, mostly the most counted ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import Counts
from pipeline.policies.options import SEED
from pipeline.policies.parts import Chosen, Placement, Room, whole_experts
from pipeline.policies.view import View
from protocol.program import COMMAND

ENOUGH_TOKENS = 256  # that were counted, for a comparison of counts


def most_counted(counts: Counts, sizes: Sequence[int]) -> NDArray[np.bool_]:
    """The sizes[l] most counted experts of each layer, of counts [L, E]. Ties go to the smaller index."""
    # a stable sort of the negated counts keeps equal ones in index order
    order = np.argsort(-counts, axis=1, kind="stable")
    chosen = np.zeros(counts.shape, dtype=bool)
    for layer, size in enumerate(sizes):
        chosen[layer, order[layer, :size]] = True
    return chosen


def evenly_counted(counts: Counts, budget: int) -> NDArray[np.bool_]:
    """`budget` experts of counts [L, E]: the same number in every layer, the most counted ones; the remainder
    (fewer than L) goes to the next most counted anywhere. Ties go to the first layer and expert."""
    layers = len(counts)
    each, left = divmod(budget, layers)
    chosen = most_counted(counts, [each] * layers)
    rest = np.flatnonzero(~chosen)
    by_count = np.argsort(-counts.ravel()[rest], kind="stable")
    chosen.ravel()[rest[by_count[:left]]] = True
    return chosen


def counted_tokens(counts: Counts, top_k: int) -> int:
    """The tokens that counts [L, E] are of."""
    return int(counts[0].sum()) // top_k


def _chooses(view: View) -> bool:
    """True where the cache holds some experts but not all."""
    return 0 < whole_experts(view.shape, view.capacity) < view.shape.layers * view.shape.experts


class Empty(Placement):
    """Places nothing: the residency follows from the routing alone."""

    name: ClassVar[str] = "empty"
    help: ClassVar[str] = "nothing"

    def chosen(self, view: View, room: Room) -> Chosen:
        return np.zeros((view.shape.layers, view.shape.experts), dtype=bool)


class FirstLayers(Placement):
    """All experts of the first layers, as llama.cpp and KTransformers place them; of the layer in which the
    cache ends its first ones."""

    name: ClassVar[str] = "first-layers"
    help: ClassVar[str] = "all experts of the first layers"

    def chosen(self, view: View, room: Room) -> Chosen:
        layers, experts = view.shape.layers, view.shape.experts
        return np.arange(layers * experts).reshape(layers, experts) < room.experts


class Popular(Placement):
    """The experts of every layer that most rows were routed to since the engine started."""

    name: ClassVar[str] = "popular"
    help: ClassVar[str] = "each layer's most used experts since the engine started"

    def chosen(self, view: View, room: Room) -> Chosen:
        return evenly_counted(view.popularity, room.experts)

    def notes(self, view: View) -> tuple[str, ...]:
        if view.popularity.any() or not _chooses(view):
            return ()
        return (
            "no routing has been counted yet, so each layer's first experts are resident, not its popular "
            "ones; set the policy again after a few answers",
        )


class Calibrated(Placement):
    """DAOP's (section IV-A): in every layer the same number of experts, those that a calibration text used
    most while it was decoded; the remainder goes to the next most used anywhere."""

    name: ClassVar[str] = "calibrated"
    help: ClassVar[str] = "each layer's most used experts in the calibration's decoding"
    needs_calibration = True
    without: ClassVar[str] = "placement=popular"

    def chosen(self, view: View, room: Room) -> Chosen:
        assert view.calibration is not None
        return evenly_counted(view.calibration.decode_counts, room.experts)


class Known(Placement):
    """Each layer's most used experts: by the calibration's decoding where the model has been calibrated, else
    since the engine started. As many as the replacement's cache of that layer holds."""

    name: ClassVar[str] = "known"
    help: ClassVar[str] = "each layer's most used experts by the calibration, without one since the start"

    def chosen(self, view: View, room: Room) -> Chosen:
        counts = view.popularity if view.calibration is None else view.calibration.decode_counts
        return (
            evenly_counted(counts, room.experts) if room.sizes is None else most_counted(counts, room.sizes)
        )

    def notes(self, view: View) -> tuple[str, ...]:
        if view.calibration is not None or not _chooses(view):
            return ()
        return Popular().notes(view) or (
            "the model is not calibrated, so the experts used most since the engine started are resident "
            f"({COMMAND} calibrate --text FILE counts them on a text)",
        )


def known_counts(view: View) -> Counts:
    """The uses of each expert [L, E] as far as they are known: those of earlier starts and of this one,
    without any those of the calibration."""
    counts = view.popularity if view.heat is None else view.popularity + view.heat
    if view.calibration is not None and not counts.any():
        return view.calibration.decode_counts
    return counts


class Hot(Placement):
    """Each layer's most used experts, in earlier starts and in this one; by the calibration where none has
    been used. As many as the replacement's cache of that layer holds."""

    name: ClassVar[str] = "hot"
    help: ClassVar[str] = "each layer's most used experts, also those of earlier starts"
    keeps_heat = True

    def chosen(self, view: View, room: Room) -> Chosen:
        counts = known_counts(view)
        return (
            evenly_counted(counts, room.experts) if room.sizes is None else most_counted(counts, room.sizes)
        )


class Random(Placement):
    """DALI's (section 4): in every layer the same number of experts, drawn at random."""

    name: ClassVar[str] = "random"
    help: ClassVar[str] = "the same number in each layer, drawn at random"
    options = (SEED,)

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    def chosen(self, view: View, room: Room) -> Chosen:
        shape = view.shape
        drawn = np.random.default_rng(self._seed).permutation(shape.layers * shape.experts)
        return evenly_counted(drawn.reshape(shape.layers, shape.experts), room.experts)
