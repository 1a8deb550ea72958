"""AdapMoE's sensitivities (section 4.2): how strongly the loss depends on the output of a layer's experts.

    s_l = sum of diag(F) = mean over tokens of sum_H (dL / dy_l)^2        (equations 6 and 7)

y_l is the output of layer l's MoE block at a token, L the SUM of the negative log-likelihoods of the window's
tokens. A mean would divide each token's gradient by the length of its window, and s_l, and with it the
threshold, by the square of that. Because h = h + y, the gradient at y_l is the gradient at the hidden states
after layer l.

The gradients are those of the whole model, also of one that is larger than the device. The forward pass
builds no graph and keeps only the hidden states before each layer, on the host. Then, from the last layer to
the first, each layer is computed again with its graph, and a vector-Jacobian product takes the gradient
through attention, norms, shared experts and routing weights; the choice of experts is constant. Routed
experts are read from the store one tile at a time, dequantized to float32, each with a graph of its own, so
that they are never all in memory. Activations are not rounded, unlike in the kernels of quantized formats:
rounding has no gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pipeline.backbone.backbone import Backbone
from pipeline.backbone.batch import Batch, TokenSpan
from pipeline.backbone.kv_cache import TransientKV
from pipeline.backbone.protocol import AnyBackbone
from pipeline.calibration.observers import Bring
from pipeline.device.base import Device
from pipeline.errors import UsageError
from pipeline.policies.view import Routing
from shm.expert_math import ExpertMath
from shm.store import Store
from workers.kernels.reference import activated, tile_biases, tile_numbers

ROWS = 512  # tokens computed together, in whole windows: with more, each expert is read less often
HEAD_ROWS = 64  # rows of logits in memory at once
LEAST = 3  # tokens of a window: the last one is only a target, and a single row takes the decode path

Progress = Callable[[int, int], None]  # completed passes through a layer, and their total


def sensitivities(
    backbone: AnyBackbone,
    device: Device,
    store: Store,
    windows: Sequence[Sequence[int]],
    progress: Progress,
    bring: Bring = lambda layer, expert: None,
) -> NDArray[np.float32]:
    """s [L], the mean over all tokens but each window's last. A window has 3 tokens or more, fits the
    backbone's context, and is a sequence of its own. Exceptions of `progress` end the computation; `bring` is
    called for each expert before it is read. Raises UsageError where the backbone cannot be differentiated,
    one line with the remedy; ValueError without windows or for too short ones. Must not be called in torch's
    inference mode."""
    if not isinstance(backbone, Backbone):
        raise UsageError("sensitivities need gradients, which only Tandem's own backbones give")
    if not backbone.differentiable:
        raise UsageError(
            "sensitivities need gradients, which do not go through a quantized backbone: "
            "use --backbone-dtype bf16 or f32"
        )
    if not windows or min(len(w) for w in windows) < LEAST:
        raise ValueError(f"sensitivities need windows of at least {LEAST} tokens")
    model = _Model(backbone, device, store, bring)
    squares = np.zeros(model.layers)
    groups = list(_groups(windows))
    total = len(groups) * (2 * model.layers - 1)
    passes = itertools.count(1)
    for group in groups:
        batch = model.batch([w[:-1] for w in group])
        h, inputs = backbone.embed(batch), []
        for layer in range(model.layers):
            inputs.append(h.cpu())
            h = model.forward(layer, h, batch)
            progress(next(passes), total)
        gradient = model.loss_gradient(h, batch, [token for w in group for token in w[1:]])
        for layer in reversed(range(model.layers)):
            squares[layer] += gradient.square().sum(dtype=torch.float64).item()
            if layer > 0:  # the embeddings' gradient is not needed
                gradient = model.backward(layer, inputs.pop(), gradient, batch)
                progress(next(passes), total)
    return (squares / sum(len(w) - 1 for w in windows)).astype(np.float32)


def _groups(windows: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Groups of consecutive windows with at most ROWS tokens, but at least one window."""
    group: list[Sequence[int]] = []
    for window in windows:
        if group and sum(len(w) for w in group) + len(window) > ROWS:
            yield group
            group = []
        group.append(window)
    yield group


@dataclass(frozen=True)
class _Model:
    """A model by layers with experts; dense layers belong to the one that follows them. Hidden states and
    gradients are float32 [R, H] on the device."""

    backbone: Backbone
    device: Device
    store: Store
    bring: Bring

    @property
    def layers(self) -> int:
        return len(self.backbone.facts.moe_layers)

    def batch(self, windows: Sequence[Sequence[int]]) -> Batch:
        """The windows as sequences of one step."""
        shape, switch = self.store.layout.shape, self.backbone.spec.rope.switch
        batch = self.backbone.batch([TokenSpan(TransientKV(len(w), switch), w) for w in windows])
        in_tile = batch.rows * 2 * shape.tile * shape.hidden
        self.device.prepare(max(self.backbone.largest_product(batch.rows), in_tile))
        return batch

    @torch.no_grad()  # not inference mode: its tensors may not become part of a graph
    def forward(self, layer: int, h: Tensor, batch: Batch) -> Tensor:
        """The hidden states after a layer, from those before it."""
        attended = self.backbone.attend(layer, h, batch)
        h, x, shared = attended.h, attended.x, attended.shared()
        routing = self._routing(attended.logits(), layer)
        h = h if shared is None else h + shared
        bias = attended.expert_bias(routing.experts, routing.weights)
        h = h if bias is None else h + self.device.total([bias], (), h.shape)
        for expert, rows, places in _used(routing):
            weights = torch.from_numpy(routing.weights[rows, places]).to(x.device)
            at = torch.from_numpy(rows).to(x.device)
            for tile in self._tiles(layer, expert):
                h.index_add_(0, at, _through(tile, x[at]) * weights[:, None])
        return h

    def loss_gradient(self, h: Tensor, batch: Batch, targets: Sequence[int]) -> Tensor:
        """The loss's gradient at the hidden states after the last layer with experts."""
        h = h.detach().requires_grad_()
        final = self.backbone.finish(h, batch)
        wanted = torch.tensor(targets, device=h.device)
        parts: list[Tensor] = []
        for lo in range(0, batch.rows, HEAD_ROWS):
            rows = final[lo : lo + HEAD_ROWS].detach().requires_grad_()
            logits = self.backbone.head(rows)
            loss = functional.cross_entropy(logits, wanted[lo : lo + HEAD_ROWS], reduction="sum")
            parts += torch.autograd.grad(loss, rows)
        return torch.autograd.grad(final, h, torch.cat(parts))[0]

    def backward(self, layer: int, h: Tensor, gradient: Tensor, batch: Batch) -> Tensor:
        """The loss's gradient at `h`, the hidden states before a layer, from the gradient after it."""
        h = h.to(gradient.device).detach().requires_grad_()
        attended = self.backbone.attend(layer, h, batch)
        x, logits = attended.x, attended.logits()
        routing = self._routing(logits, layer)
        weights = self.backbone.router_math.differentiable(logits, routing, layer)
        of_x, of_weights = self._through_experts(layer, x.detach(), routing, gradient)
        if (biases := attended.layer.expert_biases) is not None:
            experts = torch.from_numpy(routing.experts).to(gradient.device, torch.int64)
            of_weights += (gradient @ biases.T).gather(1, experts)
        ends = [(attended.h, gradient), (x, of_x), (weights, of_weights)]
        shared = attended.shared()
        if shared is not None:
            ends.append((shared, gradient))
        outputs, gradients = zip(*ends, strict=True)
        return torch.autograd.grad(outputs, h, gradients)[0]

    def _through_experts(
        self, layer: int, x: Tensor, routing: Routing, gradient: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss's gradients at the routed experts' input [R, H] and at their weights [R, k], from the
        gradient at their weighted sum."""
        of_x, of_weights = torch.zeros_like(x), torch.zeros(routing.weights.shape, device=x.device)
        for expert, rows, places in _used(routing):
            weights = torch.from_numpy(routing.weights[rows, places]).to(x.device)
            at, place = torch.from_numpy(rows).to(x.device), torch.from_numpy(places).to(x.device)
            inputs, of_sum = x[at].requires_grad_(), gradient[at]
            for tile in self._tiles(layer, expert):
                y = _through(tile, inputs)
                (part,) = torch.autograd.grad(y, inputs, of_sum * weights[:, None])
                of_x.index_add_(0, at, part)
                of_weights[at, place] += (y.detach() * of_sum).sum(dim=1)
        return of_x, of_weights

    def _routing(self, logits: Tensor, layer: int) -> Routing:
        (on_host,) = self.device.to_host(logits.detach())
        return self.backbone.router_math(on_host, layer)

    def _tiles(self, layer: int, expert: int) -> Iterator[Tile]:
        """An expert's tiles, one after the other."""
        self.bring(layer, expert)
        layout = self.store.layout
        for tile in range(layout.shape.tiles):
            place = layer, expert, tile, tile + 1
            # Copies: torch warns of read-only memory.
            parts = (part(*place).copy() for part in (self.store.tiles, self.store.heads))
            data, head = (torch.from_numpy(part).to(self.device.torch_device) for part in parts)
            *wide, down = tile_numbers(layout, data, head)
            yield Tile(layout.shape.math, wide, down, self._biases(data, *place[:3]))

    def _biases(self, data: Tensor, layer: int, expert: int, tile: int) -> list[Tensor] | None:
        """The biases of a tile's channels."""
        layout, channels = self.store.layout, self.store.layout.shape.tile
        if not layout.shape.math.bias:
            return None
        biases = list(tile_biases(layout, data))
        if layout.head_bytes:
            up = self.store.up_biases(layer, expert)[tile * channels : (tile + 1) * channels]
            biases.append(torch.from_numpy(up.copy()).to(data.device))
        return biases


class Tile(NamedTuple):
    """A tile's numbers, float32."""

    math: ExpertMath
    wide: list[Tensor]  # [T, H] each: gate, unless ungated, and up
    down: Tensor  # [T, H]
    biases: list[Tensor] | None  # [T] each, of `wide`


def _used(routing: Routing) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """Each used expert, with the rows that use it and its place among each row's experts."""
    used = routing.weights != 0
    for expert in np.unique(routing.experts[used]).tolist():
        yield expert, *np.nonzero(used & (routing.experts == expert))


def _through(tile: Tile, x: Tensor) -> Tensor:
    """A tile's output for x [n, H]: [n, H]."""
    biases: Sequence[Tensor | None] = tile.biases or [None] * len(tile.wide)
    *gate, up = (functional.linear(x, w, bias) for w, bias in zip(tile.wide, biases, strict=True))
    return activated(tile.math, gate[0] if gate else None, up) @ tile.down
