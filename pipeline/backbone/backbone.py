"""The part of a model that the device computes: embeddings, attention, norms, routers, dense blocks, shared
experts and the head. Routed experts are computed elsewhere (`pipeline/experts/`).

The residual stream, norms and routers are float32 whatever the weights' dtype; products with weights are
computed in the weights' dtype (`linear.py`), attention in the KV cache's. Float32 weights give the reference
arithmetic; bfloat16 weights round less often than a model that keeps its residual stream in bfloat16.

Layer numbers count layers with routed experts only, as in the store and in policies. Dense layers are
computed together with the layer that follows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.arrays import FloatArray, sum_on_host
from pipeline.backbone.attention import Attention, GroupedQueryAttention, LatentAttention
from pipeline.backbone.batch import Batch, DecodeRows, Masks, StepInput, TokenSpan
from pipeline.backbone.decoder_layer import AfterAttention, DecoderLayer, Norm, SwiGLU
from pipeline.backbone.gated_delta import GatedDeltaNet
from pipeline.backbone.kv_blocks import BlockPool
from pipeline.backbone.kv_cache import table_of
from pipeline.backbone.linear import FEW_ROWS, BiasedLinear, DenseLinear, Linear, Precision
from pipeline.backbone.protocol import BackboneStep, Probe
from pipeline.backbone.rope import RopeTables
from pipeline.backbone.step import Attended, OwnStep, answers
from pipeline.backbone.weights import Weights
from pipeline.checkpoint.model_source import ModelSource
from pipeline.device.base import Added, Device
from pipeline.models.architecture import Architecture, Tensors
from pipeline.models.config_keys import text_config
from pipeline.models.facts import facts_of_spec
from pipeline.models.registry import architecture_of
from pipeline.models.routing import Scored
from pipeline.models.spec import GroupedQuery, ModelSpec
from pipeline.policies.view import Router
from workers.kernels.c_types import Kept

READERS = 2  # threads that load layers: one reads while the other converts


class Backbone:
    """A model's weights outside its routed experts, or those of consecutive layers, on a device: an
    AnyBackbone. Where it has not all layers, the first part has the embedding and the last one the head."""

    several = chunks = True

    def __init__(
        self,
        source: ModelSource,
        spec: ModelSpec,
        precision: Precision,
        context: int,
        progress: Callable[[int], None] = lambda done: None,
        layers: range | None = None,
    ) -> None:
        """`context`: positions that the rotary tables cover. `progress` is called in this thread with the
        bytes loaded so far. `layers`: those with routed experts that it has; None: all. Raises ModelError, as
        Weights."""
        architecture = architecture_of(source.config)
        self.spec, self.facts = spec, facts_of_spec(architecture, spec)
        every = len(spec.moe_layers)
        self.layers = layers = range(every) if layers is None else layers
        self.decoder_layers = self.facts.decoder_layers(layers)
        ours, moe_layers = self.decoder_layers, [spec.moe_layers[i] for i in layers]
        self.dtype = precision.kv_dtype
        self._precision = precision
        self._scratch = Kept()  # of the layers' kernels on the host
        self._widths = spec.hidden, spec.experts
        self._device = precision.device.torch_device
        with source.tensors() as tensors, ThreadPoolExecutor(1 + READERS) as pool:
            fused = source.fused
            # Submitted first: it may import transformers, which takes a second.
            width = spec.attention.rope_dim
            config = text_config(source.config)
            rope = pool.submit(RopeTables, spec.rope, config, width, context, precision.device)
            specs = [architecture.layer(spec, i, fused) for i in ours]
            weights = [Weights(layer_specs, tensors, precision) for layer_specs in specs]
            loading = pool.map(self._load_layer, ours, weights)
            outer = Weights(self._outer(architecture), tensors, precision)
            place = layers.start == 0, layers.stop == every
            self._embedding, self._norm, self.output = self._load_outer(outer, *place)
            self._loaded = {}  # by layer of the decoder
            for index, layer in zip(ours, loading, strict=True):
                self._loaded[index] = layer
                progress(sum(part.bytes for part in (outer, *weights)))
            self._rope = rope.result()
            self.router_math = _complete(spec.router, [weights[i - ours.start] for i in moe_layers])
            self.bytes = sum(part.bytes for part in (outer, *weights))
        matrices = [t for layer_specs in specs for t in layer_specs.values() if t.kind == "matrix"]
        self._largest_matrix = max(t.shape[0] * t.shape[1] for t in matrices)  # in numbers
        self.kernels = precision.device.decode_attention(spec.attention.kv_streams, self.dtype, context)
        # The dense layers before each layer with experts, and those after the last one.
        starts = [ours.start, *(i + 1 for i in moe_layers)]
        ends = [*moe_layers, ours.stop]
        runs = zip(starts, ends, strict=True)
        self._dense_runs = [[self._loaded[i] for i in range(*run)] for run in runs]

    def _outer(self, architecture: Architecture) -> Tensors:
        """The tensors outside the layers."""
        return architecture.outer(self.spec)

    def _load_outer(
        self, outer: Weights, first: bool, last: bool
    ) -> tuple[Tensor | None, Norm | None, Linear | None]:
        """The embedding where this is the first part, the last norm and the head where it is the last."""
        embedding, device = outer.dense("embedding") if first else None, self._precision.device
        if not last:
            return embedding, None, None
        norm = Norm("norm", outer, self.spec.norm_eps, device)
        if "head" in outer:
            return embedding, norm, outer.linear("head")
        # Tied: a dense matrix serves as both, a quantized head needs dense rows beside it.
        head: Linear
        if embedding is not None and outer.format_of("embedding") is None:
            head = DenseLinear(embedding, device)
        else:
            head = outer.linear("embedding")
        bias = outer.vector("head_bias") if "head_bias" in outer else None
        return embedding, norm, head if bias is None else BiasedLinear(head, bias)

    def _load_layer(self, index: int, weights: Weights) -> DecoderLayer:
        spec, device = self.spec, self._precision.device
        attention: Attention
        if spec.recurrent is not None and index in spec.recurrent_layers:
            attention = GatedDeltaNet(spec.recurrent, weights, spec.norm_eps)
        elif isinstance(spec.attention, GroupedQuery):
            window, eps = spec.windows[index], spec.norm_eps
            shared = self._precision, self._scratch
            attention = GroupedQueryAttention(spec.attention, weights, window, eps, *shared)
        else:
            attention = LatentAttention(spec.attention, weights, self._precision)

        def vector(role: str) -> Tensor | None:
            return weights.vector(role) if role in weights else None

        return DecoderLayer(
            index,
            attention_norm=Norm("attention_norm", weights, spec.norm_eps, device),
            attention=attention,
            mlp_norm=Norm("mlp_norm", weights, spec.norm_eps, device),
            dense=SwiGLU.load("dense", weights),
            shared=SwiGLU.load("shared", weights),
            router=vector("router"),
            router_bias=vector("router_bias"),
            expert_biases=vector("expert_biases"),
            device=device,
            quantized=weights.quantized,  # now that all are loaded
            scratch=self._scratch,
        )

    @property
    def device(self) -> Device:
        """Where it lies."""
        return self._precision.device

    def check_probes(self, who: str) -> None:
        """Return: every router can be applied to any layer's input."""

    def check_choices(self, who: str) -> None:
        """Return: every router gives weights for any experts."""

    @property
    def differentiable(self) -> bool:
        """Returns whether torch computes gradients through it: not through quantized matrices."""
        return not self._precision.quantized

    def largest_product(self, rows: int) -> int:
        """Multiply-adds of the largest product of a layer that torch computes, for `rows` rows."""
        attention = self.spec.attention
        in_attention = rows * rows * attention.heads * attention.qk_dim  # if they are all one sequence
        in_c = self._precision.quantized or (self._precision.device.library is not None and rows <= FEW_ROWS)
        return max(in_attention, 0 if in_c else rows * self._largest_matrix)

    def step(self, spans: Sequence[TokenSpan], probe: Probe) -> BackboneStep:
        """Begin a step of any spans."""
        return OwnStep(EagerLayers(self, spans, probe), self.layers)

    def answers(self, h: Tensor, inputs: Sequence[StepInput]) -> list[FloatArray]:
        """The answers, as `step.answers`, from h after the last layer of the decoder."""
        return answers(self.head, self.spec.vocabulary, self._precision.device, h, inputs)

    def batch(self, spans: Sequence[TokenSpan]) -> Batch:
        """Lay the spans' tokens out as rows, with the rotary factors and masks that all layers share."""
        tokens = [t for s in spans for t in s.tokens]
        positions = [(s.positions, s.kv.long) for s in spans]
        device, rope_rows = self._precision.device, self._rope.rows(positions)
        common = self._rope, rope_rows, self._masks, device.flash, self._widths
        if self.kernels is not None and all(s.decodes for s in spans):
            table = device.from_host(self.decode_table(spans, len(tokens)))
            return self.decode_batch(table, spans[0].kv.pool, spans)
        return Batch(spans, len(tokens), device.from_host(np.array(tokens, np.int64)), *common)

    def decode_table(self, spans: Sequence[TokenSpan], rows: int) -> NDArray[np.int64]:
        """Returns the table of spans that decode, as `table_of`."""
        rope = self._rope.rows([(s.positions, s.kv.long) for s in spans])
        each = [(s.kv, position) for s in spans for position in s.positions]
        return table_of(each, [t for s in spans for t in s.tokens], rope, rows)

    def decode_batch(self, table: Tensor, pool: BlockPool, spans: Sequence[TokenSpan] = ()) -> Batch:
        """The rows of such a table, with blocks of this pool, on the device, which has `kernels` for them.
        The table may change later."""
        assert self.kernels is not None
        decode = DecodeRows(table, pool, self.kernels)
        common = self._masks, self._precision.device.flash, self._widths
        return Batch(spans, table.shape[1], decode.tokens, self._rope, [], *common, decode)

    def _masks(self, spans: Sequence[TokenSpan]) -> Masks:
        return {
            window: [self._mask(len(s.tokens), s.kv.length + len(s.tokens), window) for s in spans]
            for window in set(self.spec.windows)
        }

    def _mask(self, new: int, total: int, window: int | None) -> Tensor | None:
        """The tokens that the last `new` of `total` attend to, [new, total] bool; None for one token, which
        attends to the last `window`."""
        if new == 1:
            return None
        positions = torch.arange(total, device=self._device)
        distance = positions[total - new :, None] - positions
        return distance >= 0 if window is None else (distance >= 0) & (distance < window)

    def embed(self, batch: Batch) -> Tensor:
        """Hidden states float32 [R, H] of the batch's tokens."""
        assert self._embedding is not None
        return self._embedding[batch.tokens].float()

    def attend(self, layer: int, h: Tensor, batch: Batch, routed: bool = True) -> AfterAttention:
        """A layer up to its experts, from h float32 [R, H], after the dense layers before it. Appends KV.
        Without `routed` the router's logits are not needed."""
        h = self._dense_layers(self._dense_runs[layer - self.layers.start], h, batch)
        return self._of(layer).attend(h, batch, routed)

    def router(self, layer: int, x: Tensor) -> Tensor:
        """Router logits float32 [R, E] of any layer for an input of experts float32 [R, H]."""
        return self._of(layer).router(x)

    def router_before(self, layer: int, h: Tensor) -> Tensor:
        """The same for the residual stream h [R, H] before the attention of an earlier layer."""
        return self._of(layer).router_before(h)

    def _of(self, layer: int) -> DecoderLayer:
        """The layer with experts of this number."""
        return self._loaded[self.spec.moe_layers[layer]]

    def finish(self, h: Tensor, batch: Batch) -> Tensor:
        """The hidden states after the last layer of the decoder, or of this part, float32 [R, H]."""
        return self._dense_layers(self._dense_runs[-1], h, batch)

    def head(self, h: Tensor) -> Tensor:
        """Logits float32 [R, vocabulary]."""
        assert self.output is not None  # of the last part
        return self.output(self.normed(h))

    def normed(self, h: Tensor) -> Tensor:
        """The hidden states that the head reads, float32 [R, H], from those after the last layer."""
        assert self._norm is not None
        return self._norm(h)

    def _dense_layers(self, layers: Sequence[DecoderLayer], h: Tensor, batch: Batch) -> Tensor:
        for layer in layers:
            h = layer.dense(h, batch)
        return h


def _complete(router: Router, weights: Sequence[Weights]) -> Router:
    """The router with its arrays by layer. `weights`: of the layers with experts."""
    if not isinstance(router, Scored) or "choice_bias" not in weights[0]:
        return router
    return replace(router, bias=np.stack([of_layer.on_host("choice_bias") for of_layer in weights]))


class EagerLayers:
    """A step of any spans, on any device: StepLayers."""

    def __init__(self, backbone: Backbone, spans: Sequence[TokenSpan], probe: Probe) -> None:
        self._backbone, self._probe = backbone, probe
        self._batch = backbone.batch(spans)
        self._read: list[Tensor] = []
        self._attended: AfterAttention  # the latest layer
        self._last: Tensor  # hidden states after the last layer, once there are answers

    def embed(self) -> Tensor:
        return self._backbone.embed(self._batch)

    def before(self, layer: int, h: Tensor, probes: Sequence[int]) -> tuple[Tensor, Sequence[FloatArray]]:
        backbone = self._backbone
        return h, backbone.device.to_host(*(backbone.router_before(target, h) for target in probes))

    def attend(self, layer: int, h: Tensor, own: bool, probes: Sequence[int]) -> Attended:
        self._attended = attended = self._backbone.attend(layer, h, self._batch, routed=own)
        self._read = attended.unread(own) + [self._probe(target, attended.x) for target in probes]
        return attended

    def read(self) -> Sequence[FloatArray]:
        return *self._attended.arrays[1:], *self._backbone.device.to_host(*self._read)

    def enter(self, h: Tensor) -> Tensor:
        return h

    def leave(self, h: Tensor) -> Tensor:
        return self._backbone.finish(h, self._batch)

    def add(self, added: Sequence[Added], parts: Sequence[FloatArray]) -> Tensor | None:
        attended = self._attended
        if added or not attended.arrays:
            return self._backbone.device.total(added, parts, attended.x.shape)
        stream = attended.arrays[0]
        stream += sum_on_host(parts, stream.shape)
        return None

    def answers(self, h: Tensor, inputs: Sequence[StepInput]) -> list[FloatArray]:
        self._last = self._backbone.finish(h, self._batch)
        return self._backbone.answers(self._last, inputs)

    def hidden(self) -> Tensor:
        return self._backbone.normed(self._last)
