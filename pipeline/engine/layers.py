"""The backbone's part of one step, with its copies to the host: layer by layer up to the routed experts, then
the head. `EagerLayers` calls torch for each operation; `pipeline/engine/graphs.py` replays CUDA graphs
instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from pipeline.arrays import FloatArray
from pipeline.backbone.backbone import Backbone
from pipeline.backbone.batch import StepInput, TokenSpan, logit_rows
from pipeline.backbone.greedy import greedy
from pipeline.device import Device
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
        """Wait for x [R, H] and the logits [R, E] of the latest `attend`, and return them on the host."""

    def answers(self, h: Tensor, inputs: Sequence[StepInput]) -> list[FloatArray]:
        """Return the answers from h after the last layer with experts, as `answers` below."""


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


def answers(backbone: Backbone, device: Device, h: Tensor, inputs: Sequence[StepInput]) -> list[FloatArray]:
    """Return, from the last hidden states h float32 [R, H], the wanted logits of each input, float32 [n,
    vocabulary], or its greedy choice [1, 4] as `Greedy` reads it. Other rows do not go through the head, and
    logits whose choice is enough stay on the device."""
    wanted, counts = logit_rows(inputs)
    if not wanted:
        return [np.empty((0, backbone.spec.vocabulary), np.float32) for _ in inputs]
    rows = h if len(wanted) == len(h) else h[device.from_host(np.array(wanted, np.int64))]
    logits = backbone.head(rows)
    chosen = np.repeat([item.logits == "greedy" for item in inputs], counts)
    if not chosen.any():
        return _parts(device.to_host(logits)[0], counts)
    choices = _parts(device.to_host(greedy(logits))[0], counts)
    if chosen.all():
        return choices
    (others,) = device.to_host(logits[device.from_host(np.flatnonzero(~chosen))])
    other_counts = [0 if item.logits == "greedy" else n for item, n in zip(inputs, counts, strict=True)]
    logits_of = zip(inputs, choices, _parts(others, other_counts), strict=True)
    return [choice if item.logits == "greedy" else logits for item, choice, logits in logits_of]


def _parts(rows: FloatArray, counts: Sequence[int]) -> list[FloatArray]:
    return np.split(rows, np.cumsum(counts)[:-1])
