"""A checkpoint computed by the engine's models in this process, its routed experts by torch: without a store,
workers and policies, so it starts a hundred times as fast as an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pipeline.backbone.backbone import Backbone
from pipeline.backbone.batch import TokenSpan
from pipeline.backbone.decoder_layer import AfterAttention
from pipeline.backbone.kv_cache import KVCache
from pipeline.backbone.linear import Precision
from pipeline.checkpoint.open import Checkpoint
from pipeline.device.cpu import CpuDevice
from pipeline.models.registry import architecture_of, model_spec

CPU = torch.device("cpu")


class TorchDevice(CpuDevice):
    """The device without compiled kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.close()
        self.library = self.team = None


class InProcess:
    """Everything float32. A context manager: it may have threads."""

    def __init__(self, folder: Path, compiled: bool) -> None:
        """`compiled`: single tokens use the host's kernels, as in engines with compiled kernels."""
        source = Checkpoint(folder)
        self.spec = model_spec(source.config)
        self._device = CpuDevice() if compiled else TorchDevice()
        precision = Precision("f32", self._device)
        self._backbone = Backbone(source, self.spec, precision, self.spec.max_positions)
        architecture = architecture_of(source.config)
        self._experts: dict[tuple[int, int], list[Tensor]] = {}
        with source.tensors() as tensors:
            for layer, decoder_layer in enumerate(self.spec.moe_layers):
                for expert in range(self.spec.experts):
                    parts = architecture.expert(self.spec, decoder_layer, expert, source.fused)
                    whole = [tensors.float32(part.name, part.shape) for part in parts]
                    self._experts[layer, expert] = [
                        torch.from_numpy(w.reshape(-1, w.shape[-1])[part.first : part.first + part.rows])
                        for w, part in zip(whole, parts, strict=True)
                    ]

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
            shared = attended.shared()
            h = h if shared is None else h + shared
        return backbone.head(backbone.finish(h, batch))

    def _routed(self, layer: int, attended: AfterAttention) -> Tensor:
        x, routing = attended.x, self._backbone.router_math(attended.logits().numpy(), layer)
        y = torch.zeros_like(x)
        for expert in np.unique(routing.experts).tolist():
            gate, up, down = self._experts[layer, expert]
            rows, places = np.where(routing.experts == expert)
            inner = functional.silu(x[rows] @ gate.T) * (x[rows] @ up.T)
            weights = torch.from_numpy(routing.weights[rows, places])[:, None]
            y.index_add_(0, torch.from_numpy(rows), inner @ down.T * weights)
        return y
