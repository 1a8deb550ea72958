"""Observers of the engine, which make traces and calibrations, and probes: routers applied to another layer's
input. An observer does not change the computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pipeline.arrays import FloatArray, Phase
from pipeline.backbone.backbone import Backbone
from pipeline.engine.driver import LayerDecision
from pipeline.engine.trained_gates import trained_gates
from pipeline.errors import PlanError
from pipeline.policies.calibration import Calibration


class Observer(Protocol):
    """Called by the engine's thread."""

    def probes(self, layer: int) -> tuple[int, ...]:
        """As `Policy.probes`."""

    def begin(self, phase: Phase, sequences: tuple[int, ...]) -> None:
        """A step begins; the sequence of each of its rows [R]."""

    def layer(self, decision: LayerDecision[object], x: FloatArray) -> None:
        """A layer has been decided and is about to be computed. x [R, H]: the input of its router and
        experts. All arrays are valid during the call alone."""

    def end(self) -> None:
        """The step has been computed. Not called for a step that failed."""


class Probing:
    """A model's routers, and the gates that its calibration has trained."""

    def __init__(self, backbone: Backbone, device: torch.device, calibration: Calibration | None) -> None:
        self._backbone = backbone
        self._trained = trained_gates(calibration, device)

    @property
    def has_first_gate(self) -> bool:
        """Whether the last layer can probe the next token's first layer."""
        return 0 in self._trained

    def logits(self, target: int, x: Tensor) -> Tensor:
        """Float32 [R, E] of a later layer, or of a trained gate (`trained_gates`). Raises PlanError."""
        if target > 0:
            return self._backbone.router(target, x)
        if (gate := self._trained.get(target)) is None:
            raise PlanError(f"a probe of the trained gate {target} needs a calibration that has it")
        return gate(x)


def with_observers(layer: int, probes: Sequence[int], observers: Sequence[Observer]) -> list[int]:
    """The policy's probes of a layer, followed by those of the observers that are not among them."""
    wanted = list(probes)
    for observer in observers:
        wanted += [target for target in observer.probes(layer) if target not in wanted]
    return wanted
