"""A model's own routing: from router logits to experts and weights, on the host.

Of equal scores the expert with the lower index is taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.arrays import FloatArray, IntArray
from pipeline.policies.view import Routing

if TYPE_CHECKING:
    from torch import Tensor


class Router(ABC):
    """Which experts a token uses, and with what weights."""

    @abstractmethod
    def __call__(self, logits: FloatArray) -> Routing:
        """logits float32 [R, E]; the experts [R, k] and their weights float32 [R, k]."""

    @abstractmethod
    def differentiable(self, logits: Tensor, routing: Routing) -> Tensor:
        """The weights of `routing`, which these logits gave, as torch's function of them, [R, k]: the choice
        of experts is constant, and the gradient of a weight of 0 is 0."""


@dataclass(frozen=True)
class Softmax(Router):
    """The k most probable experts. Their weights are their probabilities, times `scale`.

    With `groups`, experts are in so many groups of neighbours, and only those of the `best_groups` whose most
    probable expert is most probable can be chosen; if these have fewer than k, others fill up with weight 0.
    """

    k: int
    rescaled: bool  # the weights of a token sum to `scale`
    scale: float = 1.0
    groups: int = 1
    best_groups: int = 1

    def __call__(self, logits: FloatArray) -> Routing:
        scores = logits if self.groups == 1 else self._of_best_groups(logits)
        if len(logits) == 1:
            return self._of_one(scores[0], logits[0])
        experts = _largest(scores, self.k)
        chosen = np.take_along_axis(scores, experts, axis=1)
        weights = np.exp(chosen - chosen[:, :1])
        if self.rescaled:
            weights /= weights.sum(axis=1, keepdims=True)
        else:
            weights /= np.exp(logits - chosen[:, :1]).sum(axis=1, keepdims=True)
        if self.scale != 1.0:
            weights *= np.float32(self.scale)
        return Routing(experts, weights)

    def _of_one(self, scores: FloatArray, logits: FloatArray) -> Routing:
        """One row's routing, bit for bit what it is among others, in two thirds of the time."""
        experts = (-scores).argsort(kind="stable")[: self.k].astype(np.int32)
        chosen = scores.take(experts)
        weights: FloatArray = np.exp(chosen - chosen[0])
        weights /= weights.sum() if self.rescaled else np.exp(logits - chosen[0]).sum()
        if self.scale != 1.0:
            weights *= np.float32(self.scale)
        return Routing(experts[None], weights[None])

    def differentiable(self, logits: Tensor, routing: Routing) -> Tensor:
        import torch

        unused = torch.from_numpy(routing.weights == 0).to(logits.device)
        chosen = logits.gather(1, _indices(routing, logits)).masked_fill(unused, -np.inf)
        every = chosen if self.rescaled else logits
        return (chosen - every.logsumexp(dim=1, keepdim=True)).exp() * self.scale

    def _of_best_groups(self, logits: FloatArray) -> FloatArray:
        """The logits, -inf for experts that cannot be chosen."""
        grouped = logits.reshape(len(logits), self.groups, -1)
        best = _largest(grouped.max(axis=2), self.best_groups)
        others = np.full((len(logits), self.groups, 1), -np.inf, np.float32)
        np.put_along_axis(others, best[:, :, None], 0, axis=1)
        return (grouped + others).reshape(logits.shape)


@dataclass(frozen=True)
class SparseMixer(Router):
    """Two experts: the best, and the best of the others. Each one's weight is its probability among those
    whose logits come near its own: whose distance is at most 2 * jitter of the larger magnitude."""

    jitter: float

    def __call__(self, logits: FloatArray) -> Routing:
        first, first_weights = self._best(logits, logits)
        others = logits.copy()
        np.put_along_axis(others, first, -np.inf, axis=1)
        second, second_weights = self._best(logits, others)
        return Routing(np.hstack((first, second)), np.hstack((first_weights, second_weights)))

    def differentiable(self, logits: Tensor, routing: Routing) -> Tensor:
        import torch

        first, second = torch.split(_indices(routing, logits), 1, dim=1)
        others = logits.scatter(1, first, -np.inf)
        pairs = ((logits, first), (others, second))
        return torch.cat([self._share(logits, left, best) for left, best in pairs], dim=1)

    def _share(self, logits: Tensor, left: Tensor, best: Tensor) -> Tensor:
        """The weight that `_best` has for an expert [R, 1] of those left."""
        top = left.gather(1, best)
        far = (top - logits) / logits.abs().maximum(top) > 2 * self.jitter
        return left.masked_fill(far, -np.inf).softmax(dim=1).gather(1, best)

    def _best(self, logits: FloatArray, left: FloatArray) -> tuple[IntArray, FloatArray]:
        """The best expert of those `left` (the others are -inf), and its weight, both [R, 1]."""
        best = left.argmax(axis=1).astype(np.int32)[:, None]
        top = np.take_along_axis(left, best, axis=1)
        with np.errstate(invalid="ignore"):  # where all are 0, none is far
            far = (top - logits) / np.maximum(np.abs(logits), top) > 2 * self.jitter
        near = np.where(far, -np.inf, left)
        weight = 1 / np.exp(near - top).sum(axis=1, keepdims=True)
        return best, weight.astype(np.float32)


def _indices(routing: Routing, logits: Tensor) -> Tensor:
    """The experts as torch wants indices, beside the logits."""
    import torch

    return torch.from_numpy(routing.experts).to(logits.device, torch.int64)


def _largest(scores: FloatArray, k: int) -> IntArray:
    """Indices [R, k] of each row's k largest numbers, the largest first."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :k].astype(np.int32)
