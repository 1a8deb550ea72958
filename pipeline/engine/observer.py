"""Observers of the engine, which make traces and calibrations, and probes: routers applied to another layer's
input. An observer does not change the computation."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.arrays import FloatArray, IntArray, Phase
from pipeline.backbone.protocol import AnyBackbone
from pipeline.engine.driver import LayerDecision
from pipeline.errors import PlanError
from pipeline.policies.calibration import Calibration

WATCHED_SECONDS = 3.0  # after the last look, so long is recorded on
MOST_LAYERS = 1 << 16  # between two looks; older ones are forgotten

TrainedGate = Callable[[Tensor], Tensor]  # x [R, H] -> logits float32 [R, E]


class Observer(Protocol):
    """Called by the engine's thread."""

    def probes(self, layer: int) -> tuple[int, ...]:
        """Return probes beside the policy's, as `Policy.probes`."""

    def begin(self, phase: Phase, sequences: tuple[int, ...]) -> None:
        """A step begins; the sequence of each of its rows [R]."""

    def layer(self, decision: LayerDecision[object], x: FloatArray) -> None:
        """A layer has been decided and is about to be computed. x [R, H]: the input of its router and
        experts. All arrays are valid during the call alone."""

    def end(self) -> None:
        """The step has been computed. Not called for a step that failed."""


class Probing:
    """A model's routers, and the gates that its calibration has trained."""

    def __init__(self, backbone: AnyBackbone, device: torch.device, calibration: Calibration | None) -> None:
        self._backbone = backbone
        self._trained = _trained_gates(calibration, device)

    @property
    def has_first_gate(self) -> bool:
        """The last layer can probe the next token's first layer."""
        return 0 in self._trained

    def logits(self, target: int, x: Tensor) -> Tensor:
        """Float32 [R, E] of a later layer, or of a trained gate (`_trained_gates`). Raises PlanError."""
        if target > 0:
            return self._backbone.router(target, x)
        if (gate := self._trained.get(target)) is None:
            raise PlanError(f"a probe of the trained gate {target} needs a calibration that has it")
        return gate(x)


def with_observers(layer: int, probes: Sequence[int], observers: Sequence[Observer]) -> list[int]:
    """Return the policy's probes of a layer, followed by those of the observers that are not among them."""
    wanted = list(probes)
    for observer in observers:
        wanted += [target for target in observer.probes(layer) if target not in wanted]
    return wanted


def _trained_gates(calibration: Calibration | None, device: torch.device) -> dict[int, TrainedGate]:
    """Return a calibration's gates by the target of their probe. 0: the next token's first layer, from the
    last layer's x. -t: what is added to the logits of layer t's router on the x of the layer before."""
    gates: dict[int, TrainedGate] = {}
    if calibration is None:
        return gates
    if calibration.first_gate is not None:
        gates[0] = partial(functional.linear, weight=torch.tensor(calibration.first_gate, device=device))
    if calibration.mlp_inner is not None and calibration.mlp_outer is not None:
        pairs = zip(calibration.mlp_inner, calibration.mlp_outer, strict=True)
        for layer, (inner, outer) in enumerate(pairs, start=1):
            gates[-layer] = partial(
                _mlp, torch.tensor(inner, device=device), torch.tensor(outer, device=device)
            )
    return gates


def _mlp(inner: Tensor, outer: Tensor, x: Tensor) -> Tensor:
    return functional.linear(functional.silu(functional.linear(x, inner)), outer)


class ActivityObserver:
    """Sums by expert, since the first look. The engine's thread records each layer's decision, and the event
    loop adds them up. The sums are int32 [L, E]: `used`, the steps in which the expert was active; `device`,
    its tiles that the device computed; `demanded`, those of them that had to be fetched first."""

    def __init__(self, layers: int, experts: int, tiles: int) -> None:
        self.tiles = tiles
        self.used, self.device, self.demanded = np.zeros((3, layers, experts), np.int32)
        self._until = 0.0
        self._layers: deque[tuple[int, IntArray, IntArray, IntArray]] = deque(maxlen=MOST_LAYERS)

    def look(self) -> None:
        """Add up what was recorded, and record on."""
        self._until = time.monotonic() + WATCHED_SECONDS
        taken = [self._layers.popleft() for _ in range(len(self._layers))]
        if not taken:
            return
        layers = np.repeat([layer for layer, *_ in taken], [len(experts) for _, experts, *_ in taken])
        experts, cut, resident = (np.concatenate([entry[part] for entry in taken]) for part in (1, 2, 3))
        where = layers * self.used.shape[1] + experts
        missing = np.maximum(cut - resident, 0)
        for sums, values in ((self.used, None), (self.device, cut), (self.demanded, missing)):
            sums += np.bincount(where, values, sums.size).astype(np.int32).reshape(sums.shape)

    def probes(self, layer: int) -> tuple[int, ...]:
        return ()

    def begin(self, phase: Phase, sequences: tuple[int, ...]) -> None:
        if self._until and time.monotonic() > self._until:
            self._until = 0.0
            self._layers.clear()

    def layer(self, decision: LayerDecision[object], x: FloatArray) -> None:
        if self._until:
            experts = decision.gated.routing.active.experts
            # copies: the decision's arrays are valid until the layer has been computed
            cut, resident = decision.cut.take(experts), decision.resident.take(experts)
            self._layers.append((decision.layer, experts.copy(), cut, resident))

    def end(self) -> None:
        pass
