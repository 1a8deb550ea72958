"""A model of any family, on transformers' own modules: its decoder's forward is a step, and the calls of its
experts modules are the engine's.

Everything that families differ in is found by evaluating their modules when a model is loaded (`trial.py`,
`routers.py`): the formula of the routers, what the caches keep, and which modules take several sequences at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from pipeline.arrays import FloatArray, IntArray
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.linear import FEW_ROWS, Precision
from pipeline.backbone.protocol import Experts, Probe
from pipeline.backbone.step import answers
from pipeline.checkpoint.tables import Parameters
from pipeline.device.base import Added, Device
from pipeline.errors import DiskFailed, ModelError, PolicyError
from pipeline.generic import attention
from pipeline.generic.caches import LayerKept, OneToken, StepCache, rows_of
from pipeline.generic.modules import OwnLinear, fuse_norms
from pipeline.generic.packing import Packing
from pipeline.generic.routers import Tap, find_router
from pipeline.generic.skeleton import Skeleton
from pipeline.generic.trial import Trial, observe
from pipeline.models.facts import ModelFacts
from pipeline.models.transformers_log import to_own_log
from pipeline.policies.view import Router


class GenericBackbone:
    """A model's weights outside its routed experts, on a device: an AnyBackbone."""

    def __init__(
        self,
        facts: ModelFacts,
        model_class: type[PreTrainedModel],
        config: PreTrainedConfig,
        weights: Parameters,
        precision: Precision,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        """`weights`: by parameters' names in the whole model; rows of its tables are read in each step.
        `progress` is called with the bytes loaded so far. Raises ModelError where the family cannot run here,
        or weights are missing."""
        to_own_log()
        self.facts = facts
        self.dtype = precision.kv_dtype
        self._precision = precision
        skeleton = Skeleton(model_class, config)
        self.bytes = skeleton.load(weights, precision, progress)
        self._model, self._decoder = skeleton.model, skeleton.decoder
        if not skeleton.has_head:
            raise ModelError(f"{model_class.__name__} has no head that gives logits")
        text = config.get_text_config(decoder=True)
        self._hidden: int = text.hidden_size
        observed = observe(skeleton, text.vocab_size)
        self.layers = skeleton.layers  # those with routed experts
        self.kept: list[LayerKept] = observed.kept  # by layer of the cache
        taps = [Tap(layer, seen) for layer, seen in zip(self.layers, observed.routers, strict=True)]
        self._taps = taps
        self.router_math: Router = find_router(self.layers, taps, observed.routers)
        self.fused = fuse_norms(self._decoder, precision.device)  # modules computed in one pass
        self._packing = Packing(self._decoder)
        self._packing.cache = StepCache(observed.cache, self.kept)
        self.calls = [GenericCall(self, number, tap) for number, tap in enumerate(taps)]
        for layer, call in zip(self.layers, self.calls, strict=True):
            bias = getattr(layer.experts, "down_proj_bias", None)
            call.down_bias = bias if isinstance(bias, Tensor) and bias.numel() else None
            vars(layer.experts)["tandem_call"] = call.run
        exact = precision.dtype == torch.float32 and not precision.quantized
        trial = Trial(skeleton, self._packing, observed, exact, self._device)
        self._experts: Experts = lambda call: 0.5 * call.x
        self._probe: Probe = self.router
        # whether a step may have several sequences, and whether a prompt may come in parts
        self.several, self.chunks = trial.run()
        if self.dtype != torch.float32:
            trial.cache_in(self.dtype, self._raw_layers())
        if precision.device.library is not None:
            trial.keep_in_place(OneToken(precision.device), self._raw_layers())
        linears = [m for m in self._decoder.modules() if isinstance(m, OwnLinear)]
        self._largest_matrix = max((m.in_features * m.out_features for m in linears), default=0)

    @property
    def device(self) -> Device:
        return self._precision.device

    @property
    def _device(self) -> torch.device:
        return self._precision.device.torch_device

    @property
    def own_choices(self) -> tuple[int, ...]:
        """The layers whose modules choose experts in a way that is not known."""
        return tuple(i for i, tap in enumerate(self._taps) if tap.form == "own")

    def check_probes(self, who: str) -> None:
        if not all(tap.can_probe for tap in self._taps):
            self._refuse(who, "applies routers to other layers' inputs")

    def check_choices(self, who: str) -> None:
        if self.own_choices:
            self._refuse(who, "chooses experts itself")

    def _refuse(self, who: str, what: str) -> NoReturn:
        raise PolicyError(
            f"{who} {what}, and {type(self._model).__name__} routes in a way of its own:"
            " use all-host, on-demand, layerwise or fiddler"
        )

    def largest_product(self, rows: int) -> int:
        """Multiply-adds of the largest product of a layer that torch computes, for `rows` rows."""
        on_host = self._precision.device.library is not None
        in_c = on_host and (self._precision.quantized or rows <= FEW_ROWS)
        return rows * (rows * self._hidden if in_c else self._largest_matrix)

    def router(self, layer: int, x: Tensor) -> Tensor:
        """Router logits float32 [R, E] of a layer, for the input of any layer's router."""
        return self._taps[layer].logits(x)

    def step(self, spans: Sequence[TokenSpan], probe: Probe) -> GenericStep:
        """Begin a step."""
        return GenericStep(self, spans, probe)

    def head(self, h: Tensor) -> Tensor:
        """Logits float32 [R, vocabulary] of the last hidden states [R, H]: what the whole model's forward
        makes of them."""
        output = _Output(h[None])
        inner = self._model.base_model
        inner.forward = lambda *args, **kwargs: output
        try:
            ids = torch.zeros((1, len(h)), dtype=torch.long, device=h.device)
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits
        finally:
            del inner.forward
        return logits[0].float()

    def _run(self, spans: Sequence[TokenSpan], experts: Experts, probe: Probe) -> Tensor:
        self._experts, self._probe = experts, probe
        tokens = [t for span in spans for t in span.tokens]
        return self._packing(self._decoder, tokens, rows_of(spans))

    def _raw_layers(self) -> frozenset[int]:
        """Layers of the cache whose attention is ours, and takes keys of any dtype."""
        ours = set()
        for mixer in self._packing.mixers.values():
            for module in mixer.modules():
                index = getattr(module, "layer_idx", None)
                if isinstance(index, int) and hasattr(module, attention.KIND):
                    ours.add(index)
        return frozenset(ours)


class _Output:
    """Stands for the output of a decoder: it has the last hidden states [1, R, H] alone."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        """Whatever else a model may return."""

    def __getitem__(self, place: Any) -> Any:
        return (self.last_hidden_state,)[place]


class GenericStep:
    """New tokens of some sequences: a BackboneStep."""

    def __init__(self, backbone: GenericBackbone, spans: Sequence[TokenSpan], probe: Probe) -> None:
        self._backbone, self._spans, self._probe = backbone, spans, probe
        self._h: Tensor  # float32 [R, H], the last hidden states

    def run(self, experts: Experts) -> None:
        try:
            self._h = self._backbone._run(self._spans, experts, self._probe)
        except ModelError as e:  # a row of a table
            raise DiskFailed(str(e)) from e

    def answers(self, inputs: Sequence[StepInput]) -> list[FloatArray]:
        backbone = self._backbone
        return answers(backbone.head, backbone.facts.vocabulary, backbone.device, self._h, inputs)

    def hidden(self) -> Tensor:
        return self._h


class GenericCall:
    """One layer at its experts: a LayerCall."""

    x: Tensor
    down_bias: Tensor | None = None  # float32 [E, H]

    def __init__(self, backbone: GenericBackbone, layer: int, tap: Tap) -> None:
        self.layer = layer
        self._backbone, self._tap = backbone, tap
        self._read: list[Tensor] = []
        self._choice: tuple[Tensor, Tensor]

    def run(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """In place of the experts module: x [R, H], index and weights [R, k] where the module chose."""
        self.x = x
        self._choice = index, weights
        y = self._backbone._experts(self)
        return torch.zeros_like(x) if y is None else y

    def before(self, probes: Sequence[int]) -> Sequence[FloatArray]:
        """Refused when the policy is set: the modules show their layers' experts alone."""
        raise NotImplementedError

    def attend(self, own: bool, probes: Sequence[int]) -> None:
        tap = self._tap
        self._read = [self.x]
        if own:
            self._read.append(tap.own_logits(*self._choice))
        if probes:
            x = tap.x.view(-1, tap.x.shape[-1])
            self._read += [self._backbone._probe(target, x) for target in probes]

    def read(self) -> Sequence[FloatArray]:
        return self._backbone.device.to_host(*self._read)

    @property
    def inputs(self) -> Tensor:
        """x."""
        return self.x

    def shared(self) -> None:
        """The model computes shared experts itself, once it has the others' output."""

    def expert_bias(self, experts: IntArray, weights: FloatArray) -> Added | None:
        """The sum of the experts' down biases [R, H], for experts and weights [R, k]; None without any."""
        if self.down_bias is None:
            return None
        return self._backbone.device.weighted_lines(self.down_bias, experts, weights)

    def add(self, added: Sequence[Added], parts: Sequence[FloatArray]) -> Tensor:
        return self._backbone.device.total(added, parts, self.x.shape)
