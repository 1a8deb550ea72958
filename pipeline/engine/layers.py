"""The backbone's part of one step, with its copies to the host: layer by layer up to the routed experts, then
the head. `EagerLayers` calls torch for each operation; `pipeline/engine/graphs.py` replays CUDA graphs
instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from pipeline.arrays import FloatArray
from pipeline.backbone.backbone import Backbone
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.device import Device
from pipeline.engine.head import answers
from pipeline.engine.observer import Probing


class Attended(Protocol):
    """A layer up to its experts."""

    h: Tensor  # float32 [R, H], the residual stream; `+=` may change it
    x: Tensor  # float32 [R, H], the input of router and experts, until the next layer

    def shared(self) -> Tensor | None:
        """The output of the shared experts, float32 [R, H], which the caller may change; None without."""


class StepLayers(Protocol):
    """One step's rows. The methods are called in the order of the layers."""

    def embed(self) -> Tensor:
        """Hidden states float32 [R, H] of the tokens."""

    def attend(self, layer: int, h: Tensor, own: bool, probes: Sequence[int]) -> Attended:
        """A layer up to its experts; with the logits of its router if `own`, and of these probes on its x."""

    def read(self) -> Sequence[FloatArray]:
        """Of the latest `attend`, on the host: x [R, H] and the logits, [R, E] each. Waits for them."""

    def answers(self, h: Tensor, inputs: Sequence[StepInput]) -> list[FloatArray]:
        """From h after the last layer with experts: see `pipeline.engine.head.answers`."""


class EagerLayers:
    """Any step, on any device."""

    def __init__(
        self, backbone: Backbone, device: Device, probing: Probing, spans: Sequence[TokenSpan]
    ) -> None:
        self._backbone, self._device, self._probing = backbone, device, probing
        self._batch = backbone.batch(spans)
        self._read: list[Tensor] = []

    def embed(self) -> Tensor:
        return self._backbone.embed(self._batch)

    def attend(self, layer: int, h: Tensor, own: bool, probes: Sequence[int]) -> Attended:
        attended = self._backbone.attend(layer, h, self._batch, routed=own)
        logits = [attended.logits()] if own else []
        logits += [self._probing.logits(target, attended.x) for target in probes]
        self._read = [attended.x, *logits]
        return attended

    def read(self) -> Sequence[FloatArray]:
        return self._device.to_host(*self._read)

    def answers(self, h: Tensor, inputs: Sequence[StepInput]) -> list[FloatArray]:
        return answers(self._backbone, self._device, self._backbone.finish(h, self._batch), inputs)
