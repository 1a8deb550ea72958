"""A checkpoint computed by the engine's models in this process, its routed experts by torch: without a store,
workers and policies, so it starts a hundred times as fast as an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.backbone.backbone import Backbone
from pipeline.backbone.batch import TokenSpan
from pipeline.backbone.decoder_layer import AfterAttention
from pipeline.backbone.kv_cache import KVCache
from pipeline.backbone.linear import Precision
from pipeline.checkpoint.encode import Rows
from pipeline.checkpoint.gguf_model import GgufCheckpoint
from pipeline.checkpoint.open import Checkpoint, open_model
from pipeline.checkpoint.reader import numbers_of
from pipeline.device.cpu import CpuDevice
from pipeline.models.architecture import TensorRows
from pipeline.models.registry import model_spec

CPU = torch.device("cpu")


class TorchDevice(CpuDevice):
    """The device without compiled kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.close()
        self.library = self.team = None


class InProcess:
    """Everything float32. A context manager: it may have threads."""

    def __init__(self, model: Path, compiled: bool) -> None:
        """`compiled`: single tokens use the host's kernels, as in engines with compiled kernels."""
        source = open_model(model)
        assert isinstance(source, Checkpoint | GgufCheckpoint)
        self.spec = model_spec(source.config)
        self._device = CpuDevice() if compiled else TorchDevice()
        precision = Precision("f32", self._device)
        self._backbone = Backbone(source, self.spec, precision, self.spec.max_positions)
        self._experts: dict[tuple[int, int], list[Tensor]] = {}
        with source.tensors() as tensors:
            for layer in range(len(self.spec.moe_layers)):
                for expert in range(self.spec.experts):
                    parts = source.locate(layer, expert)
                    self._experts[layer, expert] = [_part_of(tensors, part) for part in parts]

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._device.close()

    def logprobs(self, tokens: Sequence[int], chunks: Sequence[int]) -> NDArray[np.float32]:
        """[len(tokens), vocabulary], computed in steps of so many tokens each."""
        kv = KVCache(self.spec, torch.float32, CPU, len(tokens)).allocate(len(tokens))
        kv.select_rope(len(tokens))
        rows = []
        for count in chunks:
            rows.append(self._step(TokenSpan(kv, tokens[kv.length : kv.length + count])))
            kv.advance(count)
        return torch.log_softmax(torch.cat(rows), -1).numpy()

    @torch.inference_mode()
    def _step(self, piece: TokenSpan) -> Tensor:
        backbone = self._backbone
        batch = backbone.batch([piece])
        h = backbone.embed(batch)
        for layer in range(len(self.spec.moe_layers)):
            attended = backbone.attend(layer, h, batch)
            h = attended.h + self._routed(layer, attended)
            for more in (attended.shared(), self._bias(layer, attended)):
                h = h if more is None else h + more
        return backbone.head(backbone.finish(h, batch))

    def _bias(self, layer: int, attended: AfterAttention) -> Tensor | None:
        routing = self._backbone.router_math(attended.logits().numpy(), layer)
        return attended.expert_bias(routing.experts, routing.weights)

    def _routed(self, layer: int, attended: AfterAttention) -> Tensor:
        x, routing = attended.x, self._backbone.router_math(attended.logits().numpy(), layer)
        y = torch.zeros_like(x)
        for expert in np.unique(routing.experts).tolist():
            gate, up, down, *biases = self._experts[layer, expert]
            rows, places = np.where(routing.experts == expert)
            gate_bias, up_bias = biases or (0, 0)
            inner = self._activated(x[rows] @ gate.T + gate_bias, x[rows] @ up.T + up_bias)
            weights = torch.from_numpy(routing.weights[rows, places])[:, None]
            y.index_add_(0, torch.from_numpy(rows), inner @ down.T * weights)
        return y

    def _activated(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.from_numpy(self.spec.math.activation(gate.numpy(), up.numpy()))


def _part_of(reader: Rows, part: TensorRows) -> Tensor:
    """A matrix of an expert, or its bias, float32."""
    rows = numbers_of(reader.rows(part.stored, 0, part.rows))[:, part.start :: part.step]
    return torch.from_numpy(rows.T if part.transposed else rows)
