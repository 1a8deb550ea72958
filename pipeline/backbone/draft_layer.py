"""The layer of a checkpoint that drafts (multi-token prediction, arXiv:2412.19437): from the hidden state of
one token and from the token behind it, it guesses the one behind that.

    x = joined([token_norm(embedding[t + 1]), hidden_norm(h[t])])
    h' = a decoder layer with experts, of x;   guess of token t + 2: head(norm(h'))

It is a decoder layer like the model's own, so it is one here too: the last of a decoder that is one layer
deeper (`ModelSpec.deeper`). The store has its experts behind those of the other layers, and the engine
computes them as any layer's (`pipeline/engine/drafter.py`). Embedding and head are the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipeline.backbone.backbone import Backbone, EagerLayers
from pipeline.backbone.batch import Batch, TokenSpan
from pipeline.backbone.decoder_layer import Norm
from pipeline.backbone.linear import Linear, Precision
from pipeline.backbone.step import OwnStep
from pipeline.backbone.weights import Weights
from pipeline.checkpoint.model_source import ModelSource
from pipeline.models.architecture import Architecture, Tensors


class DraftLayer(Backbone):
    """The layer behind a model's last one, on the same device."""

    _token_norm: Norm
    _hidden_norm: Norm
    _joined: Linear

    def __init__(
        self,
        model: Backbone,
        source: ModelSource,
        precision: Precision,
        context: int,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        """`context`: tokens of a sequence that it sees at once; others as of Backbone. Raises ModelError, as
        Weights."""
        self._model = model
        layer = len(model.spec.moe_layers)
        layers = range(layer, layer + 1)
        super().__init__(source, model.spec.deeper, precision, context, progress, layers)

    def _outer(self, architecture: Architecture) -> Tensors:
        return architecture.draft(self.spec, self.spec.layers - 1)

    def _load_outer(
        self, outer: Weights, first: bool, last: bool
    ) -> tuple[Tensor | None, Norm | None, Linear | None]:
        eps, device = self.spec.norm_eps, self.device
        self._token_norm, self._hidden_norm = (
            Norm(role, outer, eps, device) for role in ("token_norm", "hidden_norm")
        )
        self._joined = outer.linear("joined")
        return None, Norm("norm", outer, eps, device), self._model.output

    def joined(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """What the layer reads, from embeddings of tokens and the hidden states before these: all float32
        [R, H]."""
        rows = self._token_norm(tokens), self._hidden_norm(hidden)
        return self._joined(torch.cat(rows, dim=1))

    def draft(self, spans: Sequence[TokenSpan], hidden: Tensor) -> OwnStep:
        """Begin a step of tokens, each behind one with this hidden state float32 [R, H], as
        `BackboneStep.hidden` gives it, of the model's or of this layer's own step."""
        return OwnStep(_Layers(self, spans, hidden), self.layers)

    def embed(self, batch: Batch) -> Tensor:
        return self._model.embed(batch)


class _Layers(EagerLayers):
    """A step's rows."""

    def __init__(self, layer: DraftLayer, spans: Sequence[TokenSpan], hidden: Tensor) -> None:
        super().__init__(layer, spans, layer.router)
        self._layer, self._hidden = layer, hidden

    def embed(self) -> Tensor:
        return self._layer.joined(super().embed(), self._hidden)
