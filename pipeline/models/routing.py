"""The routing functions of model families: router logits to experts and weights, on the host. Of equal
scores, the expert with the lower index is chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray, IntArray
from pipeline.policies.view import Routing

if TYPE_CHECKING:
    from torch import Tensor


PACKED = 8  # rows from which numbers are sorted with their places


class Router(ABC):
    """Chooses the experts of each token and their weights."""

    @abstractmethod
    def __call__(self, logits: FloatArray) -> Routing:
        """logits float32 [R, E]: experts int32 [R, k] and weights float32 [R, k]."""

    @abstractmethod
    def differentiable(self, logits: Tensor, routing: Routing) -> Tensor:
        """The weights [R, k] of `routing`, which these logits gave, as a differentiable function of the
        logits. The choice of experts is constant, and the gradient of a weight of 0 is 0."""


@dataclass(frozen=True)
class Softmax(Router):
    """The k most probable experts, weighted by their probabilities times `scale`.

    With `groups`, only experts of the `best_groups` groups can be chosen, those with the highest maximum. If
    they have fewer than k experts, others follow with weight 0.
    """

    k: int
    rescaled: bool  # whether the weights of a token sum to `scale`
    scale: float = 1.0
    groups: int = 1
    best_groups: int = 1

    def __call__(self, logits: FloatArray) -> Routing:
        scores = logits if self.groups == 1 else self._limit_to_best_groups(logits)
        experts = _largest(scores, self.k)
        chosen = _chosen(scores, experts)
        weights: FloatArray = np.exp(chosen - chosen[:, :1])
        shared = weights if self.rescaled else np.exp(logits - chosen[:, :1])
        weights /= np.add.reduce(shared, axis=1, keepdims=True)
        if self.scale != 1.0:
            weights *= np.float32(self.scale)
        return Routing(experts.astype(np.int32), weights)

    def differentiable(self, logits: Tensor, routing: Routing) -> Tensor:
        import torch

        unused = torch.from_numpy(routing.weights == 0).to(logits.device)
        chosen = logits.gather(1, _indices(routing, logits)).masked_fill(unused, -np.inf)
        every = chosen if self.rescaled else logits
        return (chosen - every.logsumexp(dim=1, keepdim=True)).exp() * self.scale

    def _limit_to_best_groups(self, logits: FloatArray) -> FloatArray:
        """The logits, with -inf for experts outside the best groups."""
        grouped = logits.reshape(len(logits), self.groups, -1)
        best = _largest(grouped.max(axis=2), self.best_groups)
        penalty = np.full((len(logits), self.groups, 1), -np.inf, np.float32)
        np.put_along_axis(penalty, best[:, :, None], 0, axis=1)
        return (grouped + penalty).reshape(logits.shape)


@dataclass(frozen=True)
class SparseMixer(Router):
    """Two experts: the best, and the best of the others. The weight of each is its probability among the
    experts with nearby logits: those at a distance of at most 2 * jitter of the larger magnitude."""

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
        return torch.cat([self._weight(logits, candidates, best) for candidates, best in pairs], dim=1)

    def _weight(self, logits: Tensor, candidates: Tensor, best: Tensor) -> Tensor:
        """The weight that `_best` computes for the expert `best` [R, 1], in torch."""
        top = candidates.gather(1, best)
        far = (top - logits) / logits.abs().maximum(top) > 2 * self.jitter
        return candidates.masked_fill(far, -np.inf).softmax(dim=1).gather(1, best)

    def _best(self, logits: FloatArray, candidates: FloatArray) -> tuple[IntArray, FloatArray]:
        """The best candidate and its weight, both [R, 1]; the logits of experts that are none are -inf."""
        best = candidates.argmax(axis=1).astype(np.int32)[:, None]
        top = np.take_along_axis(candidates, best, axis=1)
        with np.errstate(invalid="ignore"):  # 0 / 0 is not far
            far = (top - logits) / np.maximum(np.abs(logits), top) > 2 * self.jitter
        near = np.where(far, -np.inf, candidates)
        weight = 1 / np.exp(near - top).sum(axis=1, keepdims=True)
        return best, weight.astype(np.float32)


def _indices(routing: Routing, logits: Tensor) -> Tensor:
    """The experts as int64, on the device of the logits."""
    import torch

    return torch.from_numpy(routing.experts).to(logits.device, torch.int64)


def _largest(scores: FloatArray, k: int) -> NDArray[np.intp]:
    """Indices [R, k] of each row's k largest numbers, in descending order; of equal ones the lower first."""
    rows, count = scores.shape
    if rows < PACKED or np.isnan(scores).any():
        return (-scores).argsort(axis=1, kind="stable")[:, :k]
    # of many rows in a sixth of the time: the numbers' bits, which as integers have the same order if those
    # of negative ones are inverted, with the places behind them
    bits = (scores + np.float32(0)).view(np.int32)  # -0 becomes 0
    bits ^= (bits >> 31) & np.int32(0x7FFFFFFF)
    packed = bits.astype(np.int64) * count + np.arange(count - 1, -1, -1)
    packed.sort(axis=1)
    best: NDArray[np.intp] = count - 1 - packed[:, : -k - 1 : -1] % count
    return best


def _chosen(scores: FloatArray, places: NDArray[np.intp]) -> FloatArray:
    """scores[r, places[r, i]] [R, k]: np.take_along_axis, in a third of its time."""
    if len(scores) > 1:
        places = places + np.arange(0, scores.size, scores.shape[1])[:, None]
    return scores.take(places)
