"""A backbone that several devices have parts of, each of consecutive layers. The hidden states of a step go
from one device to the next with a copy that the host does not wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.arrays import FloatArray
from pipeline.backbone.backbone import Backbone, EagerLayers
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.protocol import AnyBackbone, Probe
from pipeline.backbone.step import Attended, OwnStep, StepLayers
from pipeline.device.base import Added, Device
from pipeline.models.routing import Scored
from pipeline.policies.view import Router


class StagedBackbone:
    """The parts of one model's backbone, in their order: an AnyBackbone."""

    several = chunks = True

    def __init__(self, parts: Sequence[Backbone]) -> None:
        self.parts = parts
        self.facts, self.dtype = parts[0].facts, parts[0].dtype
        self.bytes = sum(part.bytes for part in parts)
        self.router_math = _joined([part.router_math for part in parts])

    @property
    def device(self) -> Device:
        """The one that steps begin on."""
        return self.parts[0].device

    @property
    def layer_devices(self) -> list[torch.device]:
        """Where each layer of the decoder is computed."""
        return [part.device.torch_device for part in self.parts for _ in part.decoder_layers]

    def check_probes(self, who: str) -> None:
        """Return: every router can be applied to any layer's input."""

    def check_choices(self, who: str) -> None:
        """Return: every router gives weights for any experts."""

    def largest_product(self, rows: int) -> int:
        return max(part.largest_product(rows) for part in self.parts)

    def step(self, spans: Sequence[TokenSpan], probe: Probe, layers: range | None = None) -> OwnStep:
        """Begin a step, of these layers alone or of all."""
        every = range(len(self.facts.moe_layers))
        return OwnStep(StagedLayers(self.stages(spans, probe)), layers or every)

    def stages(self, spans: Sequence[TokenSpan], probe: Probe) -> list[Stage]:
        """Each device's part of a step."""
        return [Stage(p.device, p.layers, partial(EagerLayers, p, spans, probe)) for p in self.parts]

    def router(self, layer: int, x: Tensor) -> Tensor:
        return next(part for part in self.parts if layer in part.layers).router(layer, x)


def _joined(routers: Sequence[Router]) -> Router:
    """The parts' formula, with its arrays of all layers."""
    biases = [one.bias for one in routers if isinstance(one, Scored) and one.bias is not None]
    first = routers[0]
    return replace(first, bias=np.concatenate(biases)) if biases and isinstance(first, Scored) else first


def devices_of(backbone: AnyBackbone) -> torch.device | list[torch.device]:
    """Where the layers of the decoder are computed: all, or each."""
    if isinstance(backbone, StagedBackbone):
        return backbone.layer_devices
    return backbone.device.torch_device


class Stage(NamedTuple):
    """A device's part of a step."""

    device: Device
    layers: range
    begin: Callable[[], StepLayers]


class StagedLayers:
    """A step through the stages: StepLayers. What a device needs is uploaded when the step reaches it."""

    _device: Device
    _here: range
    _layers: StepLayers

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = iter(stages)

    def _begin(self) -> None:
        self._device, self._here, begin = next(self._stages)
        self._device.use()
        self._layers = begin()

    def embed(self) -> Tensor:
        self._begin()
        return self._layers.embed()

    def before(self, layer: int, h: Tensor, probes: Sequence[int]) -> tuple[Tensor, Sequence[FloatArray]]:
        h = self._moved(layer, h)  # first, since it may begin the next stage's layers
        return self._layers.before(layer, h, probes)

    def attend(self, layer: int, h: Tensor, own: bool, probes: Sequence[int]) -> Attended:
        h = self._moved(layer, h)
        return self._layers.attend(layer, h, own, probes)

    def _moved(self, layer: int, h: Tensor) -> Tensor:
        """h on the device of this layer."""
        while layer not in self._here:
            source, h = self._device, self._layers.leave(h)
            self._begin()
            h = self._layers.enter(self._device.receive(h, source))
        return h

    def enter(self, h: Tensor) -> Tensor:
        return self._layers.enter(h)

    def leave(self, h: Tensor) -> Tensor:
        return self._layers.leave(h)

    def read(self) -> Sequence[FloatArray]:
        return self._layers.read()

    def add(self, added: Sequence[Added], parts: Sequence[FloatArray]) -> Tensor | None:
        return self._layers.add(added, parts)

    def answers(self, h: Tensor, inputs: Sequence[StepInput]) -> list[FloatArray]:
        return self._layers.answers(h, inputs)

    def hidden(self) -> Tensor:
        return self._layers.hidden()
