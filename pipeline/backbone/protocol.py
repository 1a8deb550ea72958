"""What the engine asks of a model's backbone: its layers have control, and their experts are a call.

A backbone owns the residual stream: what stands between two layers' experts may be a sum, several streams or
anything else. It calls `experts` once for each layer that has any; there the policy decides, and the host and
the device compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.arrays import FloatArray, IntArray
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.device.base import Added, Device
from pipeline.models.facts import ModelFacts
from pipeline.policies.view import Router

Probe = Callable[[int, Tensor], Tensor]  # a target of `Policy.probes` and x [R, H]: logits float32 [R, E]


class LayerCall(Protocol):
    """One layer of a step, at its experts. The methods are called once each, in this order; `before` only
    where a policy predicts there, which asks for one of our backbones."""

    layer: int  # of those with routed experts

    def before(self, probes: Sequence[int]) -> Sequence[FloatArray]:
        """Return on the host what the routers of these later layers say to the residual stream before this
        layer's attention, [R, E] each."""

    def attend(self, own: bool, probes: Sequence[int]) -> None:
        """Compute the layer up to its experts; with the logits of its router if `own`, and of these probes on
        its x."""

    def read(self) -> Sequence[FloatArray]:
        """Wait for x [R, H] and the logits [R, E] that `attend` computed, and return them on the host."""

    @property
    def x(self) -> Tensor:
        """The input of router and experts, float32 [R, H], once attended and until the next layer."""

    @property
    def inputs(self) -> Any:
        """x in the form that the kernel of the device's experts reads, where that is there; else x."""

    def shared(self) -> Tensor | None:
        """The output of the shared experts, float32 [R, H], which the caller may change; None where there are
        none, or the backbone adds it itself."""

    def expert_bias(self, experts: IntArray, weights: FloatArray) -> Added | None:
        """The biases of the routed experts' outputs, which no tile has, by the weights that the outputs had,
        both [R, k]: as `Device.weighted_lines`; None where there are none. An expert of weight 0 adds
        nothing."""

    def add(self, added: Sequence[Added], parts: Sequence[FloatArray]) -> Tensor | None:
        """Take what the layer's experts give, as `Device.total`. Returns their sum, which `Experts` returns;
        None where it is added to the residual stream here or later."""


Experts = Callable[
    [LayerCall], Tensor | None
]  # the output [R, H] of a layer's experts; None: nothing is added


class BackboneStep(Protocol):
    """New tokens of some sequences on their way through the model."""

    def run(self, experts: Experts) -> None:
        """Compute all layers, and append keys and values. Raises the exceptions of `experts`."""

    def answers(self, inputs: Sequence[StepInput]) -> list[FloatArray]:
        """Return the wanted logits of each input, float32 [n, vocabulary], or its greedy choice [1, 4]."""

    def hidden(self) -> Tensor:
        """Return the normalised hidden states of all rows that a layer reads which drafts, float32 [R, H],
        after `answers`."""


class AnyBackbone(Protocol):
    """A model's weights outside its routed experts, on a device."""

    facts: ModelFacts
    router_math: Router  # with its arrays by layer
    dtype: torch.dtype  # of keys and values
    bytes: int
    several: bool  # whether a step may have several sequences
    chunks: bool  # whether a prompt may come in parts

    @property
    def device(self) -> Device:
        """Where it lies."""

    def step(self, spans: Sequence[TokenSpan], probe: Probe) -> BackboneStep:
        """Begin a step. `probe`: gives the logits of the targets that `LayerCall.attend` names."""

    def router(self, layer: int, x: Tensor) -> Tensor:
        """Router logits float32 [R, E] of any layer for an input of experts float32 [R, H]."""

    def check_probes(self, who: str) -> None:
        """Raise PolicyError where routers cannot be applied to the input of another layer, as this one, such
        as a policy, wants."""

    def check_choices(self, who: str) -> None:
        """Raise PolicyError where a layer's router cannot be given other experts, as this one wants."""

    def largest_product(self, rows: int) -> int:
        """Multiply-adds of the largest product of a layer that torch computes, for `rows` rows."""
