"""A step of our own backbones, with its copies to the host: layer by layer up to the routed experts, whose
output is added to the residual stream, then the head. `backbone.py` calls torch for each operation;
`pipeline/engine/graphs.py` replays CUDA graphs instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pipeline.arrays import FloatArray, IntArray
from pipeline.backbone.batch import StepInput, logit_rows
from pipeline.backbone.protocol import Experts
from pipeline.device.base import Added, Device


class Attended(Protocol):
    """A layer up to its experts."""

    h: Tensor  # float32 [R, H], the residual stream; `+=` may change it
    x: Tensor  # float32 [R, H], the input of router and experts, until the next layer

    def shared(self) -> Tensor | None:
        """The output of the shared experts, float32 [R, H], which the caller may change; None without."""

    @property
    def inputs(self) -> Any:
        """x, or what the kernel of the device's experts reads, as LayerCall's."""

    def expert_bias(self, experts: IntArray, weights: FloatArray) -> Added | None:
        """The routed experts' biases, as LayerCall's."""


class StepLayers(Protocol):
    """One step's rows. The methods are called in the order of the layers."""

    def embed(self) -> Tensor:
        """Hidden states float32 [R, H] of the tokens."""

    def enter(self, h: Tensor) -> Tensor:
        """Take hidden states from another device, in place of `embed`; return them as `attend` takes them."""

    def leave(self, h: Tensor) -> Tensor:
        """Return hidden states after the last layer here, for another device."""

    def before(self, layer: int, h: Tensor, probes: Sequence[int]) -> tuple[Tensor, Sequence[FloatArray]]:
        """Before a layer, where that is called, h as `attend` takes it, and on the host what the routers of
        these later layers say to it, [R, E] each."""

    def attend(self, layer: int, h: Tensor, own: bool, probes: Sequence[int]) -> Attended:
        """A layer up to its experts; with the logits of its router if `own`, and of these probes on its x."""

    def read(self) -> Sequence[FloatArray]:
        """Wait for x [R, H] and the logits [R, E] of the latest `attend`, and return them on the host; x is
        valid until the next call."""

    def add(self, added: Sequence[Added], parts: Sequence[FloatArray]) -> Tensor | None:
        """Take what the latest layer's experts give, as LayerCall's."""

    def answers(self, h: Tensor, inputs: Sequence[StepInput]) -> list[FloatArray]:
        """Return the answers from h after the last layer with experts, as `answers` below."""

    def hidden(self) -> Tensor:
        """Return what the head has read, or would, of all rows: as BackboneStep's."""


class OwnStep:
    """A step of one of our backbones, and the call of each layer's experts: BackboneStep and LayerCall."""

    layer: int
    h: Tensor  # float32 [R, H], the residual stream
    x: Tensor
    _attended: Attended

    def __init__(self, layers: StepLayers, numbers: range) -> None:
        """`numbers`: of the layers with routed experts."""
        self._layers, self._numbers = layers, numbers

    def run(self, experts: Experts) -> None:
        self.h = self._layers.embed()
        for layer in self._numbers:
            self.layer = layer
            y = experts(self)
            if y is not None:
                self.h.add_(y)  # in place: a graph reads it there

    def before(self, probes: Sequence[int]) -> Sequence[FloatArray]:
        self.h, logits = self._layers.before(self.layer, self.h, probes)
        return logits

    def attend(self, own: bool, probes: Sequence[int]) -> None:
        self._attended = attended = self._layers.attend(self.layer, self.h, own, probes)
        self.h, self.x = attended.h, attended.x

    def read(self) -> Sequence[FloatArray]:
        return self._layers.read()

    def shared(self) -> Tensor | None:
        return self._attended.shared()

    @property
    def inputs(self) -> Any:
        return self._attended.inputs

    def expert_bias(self, experts: IntArray, weights: FloatArray) -> Added | None:
        return self._attended.expert_bias(experts, weights)

    def add(self, added: Sequence[Added], parts: Sequence[FloatArray]) -> Tensor | None:
        return self._layers.add(added, parts)

    def answers(self, inputs: Sequence[StepInput]) -> list[FloatArray]:
        return self._layers.answers(self.h, inputs)

    def hidden(self) -> Tensor:
        return self._layers.hidden()


def answers(
    head: Callable[[Tensor], Tensor],
    vocabulary: int,
    device: Device,
    h: Tensor,
    inputs: Sequence[StepInput],
) -> list[FloatArray]:
    """Return, from the last hidden states h float32 [R, H], the wanted logits of each input, float32 [n,
    vocabulary], or its greedy choices [n, 4] as `Greedy` reads it. Other rows do not go through `head`, and
    logits whose choice is enough stay on the device."""
    wanted, counts = logit_rows(inputs)
    if not wanted:
        return [np.empty((0, vocabulary), np.float32) for _ in inputs]
    rows = h if len(wanted) == len(h) else h[device.from_host(np.array(wanted, np.int64))]
    logits = head(rows)
    chosen = np.repeat([item.logits == "greedy" for item in inputs], counts)
    if not chosen.any():
        return split_rows(device.to_host(logits)[0], counts)
    if device.on_host:
        best = greedy_on_host(logits.numpy())
    else:
        (best,) = device.to_host(greedy(logits))
    choices = split_rows(best, counts)
    if chosen.all():
        return choices
    (others,) = device.to_host(logits[device.from_host(np.flatnonzero(~chosen))])
    other_counts = [0 if item.logits == "greedy" else n for item, n in zip(inputs, counts, strict=True)]
    logits_of = zip(inputs, choices, split_rows(others, other_counts), strict=True)
    return [choice if item.logits == "greedy" else logits for item, choice, logits in logits_of]


def split_rows(rows: FloatArray, counts: Sequence[int]) -> list[FloatArray]:
    """Returns the rows of each input, which has so many."""
    ends = accumulate(counts)
    return [rows[end - count : end] for count, end in zip(counts, ends, strict=True)]


def greedy(logits: Tensor) -> Tensor:
    """Returns each row's largest and second of logits float32 [R, vocabulary], and the bits of their tokens:
    float32 [R, 4]; the device's part of greedy sampling (`pipeline/text/logprobs.py` is the host's). torch's
    argmax takes the first of equals, and a NaN for the largest, on every device."""
    token = logits.argmax(1, keepdim=True)
    others = logits.scatter(1, token, -torch.inf)
    second = others.argmax(1, keepdim=True)
    numbers = torch.cat((logits.gather(1, token), others.gather(1, second)), dim=1)
    tokens = torch.cat((token, second), dim=1).to(torch.int32)
    return torch.cat((numbers, tokens.view(torch.float32)), dim=1)


def greedy_on_host(logits: FloatArray) -> FloatArray:
    """Returns the same of logits on the host, where numpy's argmax takes a tenth of the time of torch's."""
    rows, best = np.arange(len(logits)), np.empty((len(logits), 4), np.float32)
    tokens = best.view(np.int32)[:, 2:]
    token = logits.argmax(axis=1)
    best[:, 0], tokens[:, 0] = logits[rows, token], token
    logits[rows, token] = -np.inf
    second = logits.argmax(axis=1)
    best[:, 1], tokens[:, 1] = logits[rows, second], second
    logits[rows, token] = best[:, 0]
    return best
