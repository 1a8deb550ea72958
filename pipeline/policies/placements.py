"""Placement parts: they decide which experts are resident at the start."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pipeline.policies.options import Seed
from pipeline.policies.parts import Chosen, Placement
from pipeline.policies.room import Room, evenly_counted, most_counted, other_text_note, whole_experts
from pipeline.policies.view import View
from protocol.program import COMMAND


def _chooses(view: View) -> bool:
    """Whether the cache holds some experts but not all."""
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

    def notes(self, view: View) -> tuple[str, ...]:
        return other_text_note(view)


class Known(Placement):
    """`calibrated` where the model has been calibrated, else `popular`."""

    name: ClassVar[str] = "known"
    help: ClassVar[str] = "calibrated if the model is, else popular"
    likes_calibration = True

    def chosen(self, view: View, room: Room) -> Chosen:
        return (Popular() if view.calibration is None else Calibrated()).chosen(view, room)

    def notes(self, view: View) -> tuple[str, ...]:
        if view.calibration is not None:
            return other_text_note(view)
        if not _chooses(view):
            return ()
        return Popular().notes(view) or (
            "the model is not calibrated, so the experts used most since the engine started are resident "
            f"({COMMAND} calibrate --text FILE counts them on a text)",
        )


class Random(Placement):
    """DALI's (section 4): in every layer the same number of experts, drawn at random."""

    name: ClassVar[str] = "random"
    help: ClassVar[str] = "the same number in each layer, drawn at random"
    options = (Seed(),)

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    def chosen(self, view: View, room: Room) -> Chosen:
        shape = view.shape
        drawn = np.random.default_rng(self._seed).permutation(shape.layers * shape.experts)
        return evenly_counted(drawn.reshape(shape.layers, shape.experts), room.experts)


class Sized(Placement):
    """Each layer's most used experts, as many as the replacement's cache of that layer holds: by the
    calibration's decoding, or without one, since the engine started."""

    name: ClassVar[str] = "sized"
    help: ClassVar[str] = "each layer's most used experts, as many as the replacement keeps there"
    likes_calibration = True

    def chosen(self, view: View, room: Room) -> Chosen:
        counts = view.popularity if view.calibration is None else view.calibration.decode_counts
        return (
            evenly_counted(counts, room.experts) if room.sizes is None else most_counted(counts, room.sizes)
        )

    def notes(self, view: View) -> tuple[str, ...]:
        return other_text_note(view)
