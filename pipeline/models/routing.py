"""The routing functions of model families: router logits to experts and weights, on the host. Of equal
scores, the expert with the lower index is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray, IntArray
from pipeline.policies.view import Layer, Router, Routing

if TYPE_CHECKING:
    from torch import Tensor


PACKED = 8  # rows from which numbers are sorted with their places
TINY = np.float32(1e-20)  # added to sums by which is divided, as in transformers


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

    def __call__(self, logits: FloatArray, layer: Layer) -> Routing:
        scores = logits
        if self.groups > 1:
            scores = _limited(logits, self.groups, self.best_groups, "max")
        experts = _largest(scores, self.k)
        chosen = _chosen(scores, experts)
        return Routing(experts.astype(np.int32), self._weights(logits, chosen, chosen[:, :1]))

    def scores(self, logits: FloatArray, layer: Layer) -> FloatArray:
        return softmax(logits)

    def weights_of(self, logits: FloatArray, experts: IntArray, layer: Layer) -> FloatArray:
        chosen = _chosen(logits, experts)
        return self._weights(logits, chosen, (chosen if self.rescaled else logits).max(axis=1, keepdims=True))

    def differentiable(self, logits: Tensor, routing: Routing, layer: int) -> Tensor:
        import torch

        unused = torch.from_numpy(routing.weights == 0).to(logits.device)
        chosen = logits.gather(1, _indices(routing, logits)).masked_fill(unused, -np.inf)
        every = chosen if self.rescaled else logits
        return (chosen - every.logsumexp(dim=1, keepdim=True)).exp() * self.scale

    def _weights(self, logits: FloatArray, chosen: FloatArray, top: FloatArray) -> FloatArray:
        """The weights of chosen logits [R, k]; `top` [R, 1] is among the largest."""
        weights: FloatArray = np.exp(chosen - top)
        shared = weights if self.rescaled else np.exp(logits - top)
        weights /= np.add.reduce(shared, axis=1, keepdims=True)
        if self.scale != 1.0:
            weights *= np.float32(self.scale)
        return weights


Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]
GroupScore = Literal["max", "top2"]


@dataclass(frozen=True, eq=False)
class Scored(Router):
    """The k experts with the greatest scores, weighted by their scores times `scale`. Arrays by layer are
    loaded with the model; without them a router describes the family.

    With `groups`, only experts of the `best_groups` groups can be chosen; they must have k.
    """

    score: Score  # of each logit, or of the row
    k: int
    rescaled: bool  # whether the weights of a token sum to `scale`
    scale: float = 1.0
    groups: int = 1
    best_groups: int = 1
    group_score: GroupScore = "top2"  # a group's greatest score, or the sum of its two greatest
    bias: FloatArray | None = None  # [L, E], added to the scores for the choice alone
    expert_scale: FloatArray | None = None  # [L, E], factors of the weights

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scored) and all(
            map(np.array_equal, vars(self).values(), vars(other).values())
        )

    def __hash__(self) -> int:
        return hash((self.score, self.k, self.rescaled, self.scale, self.groups, self.best_groups))

    def __call__(self, logits: FloatArray, layer: Layer) -> Routing:
        scores = self._scores(logits)
        choice = scores if self.bias is None else scores + self.bias[layer]
        if self.groups > 1:
            choice = _limited(choice, self.groups, self.best_groups, self.group_score)
        experts = _largest(choice, self.k)
        return Routing(experts.astype(np.int32), self._weights(_chosen(scores, experts), experts, layer))

    def scores(self, logits: FloatArray, layer: Layer) -> FloatArray:
        scores = self._scores(logits)
        if self.bias is not None:
            scores += self.bias[layer]
            scores -= scores.min(axis=1, keepdims=True)  # a bias may be large, and negative
        scores /= scores.sum(axis=1, keepdims=True) + TINY
        return scores

    def weights_of(self, logits: FloatArray, experts: IntArray, layer: Layer) -> FloatArray:
        return self._weights(_chosen(self._scores(logits), experts), experts, layer)

    def differentiable(self, logits: Tensor, routing: Routing, layer: int) -> Tensor:
        import torch

        if self.score == "softmax":
            scores = logits.softmax(dim=1)
        elif self.score == "sigmoid":
            scores = logits.sigmoid()
        else:
            scores = torch.nn.functional.softplus(logits).sqrt()
        weights = scores.gather(1, _indices(routing, logits))
        if self.rescaled:
            weights = weights / (weights.sum(dim=1, keepdim=True) + TINY.item())
        if self.expert_scale is not None:
            factors = self.expert_scale[layer][routing.experts]
            weights = weights * torch.from_numpy(factors).to(logits.device)
        return weights * self.scale

    def _scores(self, logits: FloatArray) -> FloatArray:
        if self.score == "softmax":
            return softmax(logits)
        if self.score == "sqrtsoftplus":
            roots: FloatArray = np.sqrt(np.logaddexp(logits, np.float32(0)))
            return roots
        scores: FloatArray = np.negative(logits)
        with np.errstate(over="ignore"):  # 1 / inf is the score
            np.exp(scores, out=scores)
        scores += 1
        np.reciprocal(scores, out=scores)
        return scores

    def _weights(self, weights: FloatArray, experts: NDArray[np.integer], layer: Layer) -> FloatArray:
        """The weights of the chosen experts [R, k], from their scores, which are overwritten."""
        if self.rescaled:
            weights /= np.add.reduce(weights, axis=1, keepdims=True) + TINY
        if self.scale != 1.0:
            weights *= np.float32(self.scale)
        if self.expert_scale is not None:
            factors = np.broadcast_to(self.expert_scale[layer], (len(experts), self.expert_scale.shape[1]))
            weights *= np.take_along_axis(factors, experts, axis=1)
        return weights


@dataclass(frozen=True)
class SparseMixer(Router):
    """Two experts: the best, and the best of the others. The weight of each is its probability among the
    experts with nearby logits: those at a distance of at most 2 * jitter of the larger magnitude."""

    jitter: float

    def __call__(self, logits: FloatArray, layer: Layer) -> Routing:
        first = logits.argmax(axis=1).astype(np.int32)[:, None]
        second = _without(logits, first).argmax(axis=1).astype(np.int32)[:, None]
        experts = np.hstack((first, second))
        return Routing(experts, self.weights_of(logits, experts, layer))

    def scores(self, logits: FloatArray, layer: Layer) -> FloatArray:
        return softmax(logits)

    def weights_of(self, logits: FloatArray, experts: IntArray, layer: Layer) -> FloatArray:
        first, second = experts[:, :1], experts[:, 1:]
        pairs = ((logits, first), (_without(logits, first), second))
        return np.hstack([self._weight(logits, candidates, best) for candidates, best in pairs])

    def differentiable(self, logits: Tensor, routing: Routing, layer: int) -> Tensor:
        import torch

        first, second = torch.split(_indices(routing, logits), 1, dim=1)
        others = logits.scatter(1, first, -np.inf)
        pairs = ((logits, first), (others, second))
        return torch.cat([self._torch_weight(logits, candidates, best) for candidates, best in pairs], dim=1)

    def _torch_weight(self, logits: Tensor, candidates: Tensor, best: Tensor) -> Tensor:
        """The weight that `_weight` computes, in torch."""
        top = candidates.gather(1, best)
        far = (top - logits) / logits.abs().maximum(top) > 2 * self.jitter
        return candidates.masked_fill(far, -np.inf).softmax(dim=1).gather(1, best)

    def _weight(self, logits: FloatArray, candidates: FloatArray, best: IntArray) -> FloatArray:
        """The weight [R, 1] of the expert `best` [R, 1]; the logits of experts that are no candidates are
        -inf."""
        top = np.take_along_axis(candidates, best, axis=1)
        with np.errstate(invalid="ignore"):  # 0 / 0 is not far
            far = (top - logits) / np.maximum(np.abs(logits), top) > 2 * self.jitter
        near = np.where(far, -np.inf, candidates)
        weight: FloatArray = (1 / np.exp(near - top).sum(axis=1, keepdims=True)).astype(np.float32)
        return weight


def softmax(logits: FloatArray) -> FloatArray:
    """The softmax of each row."""
    shares: FloatArray = np.subtract(logits, np.maximum.reduce(logits, axis=1, keepdims=True))
    np.exp(shares, out=shares)
    shares /= np.add.reduce(shares, axis=1, keepdims=True)
    return shares


def _without(logits: FloatArray, first: IntArray) -> FloatArray:
    """The logits with -inf for the expert `first` [R, 1]."""
    others = logits.copy()
    np.put_along_axis(others, first, -np.inf, axis=1)
    return others


def _limited(scores: FloatArray, groups: int, best_groups: int, by: GroupScore) -> FloatArray:
    """The scores, with -inf for experts outside the best groups."""
    grouped = scores.reshape(len(scores), groups, -1)
    if by == "max":
        of_groups = grouped.max(axis=2)
    else:
        of_groups = np.partition(grouped, -2, axis=2)[:, :, -2:].sum(axis=2)
    best = _largest(of_groups, best_groups)
    penalty = np.full((len(scores), groups, 1), -np.inf, np.float32)
    np.put_along_axis(penalty, best[:, :, None], 0, axis=1)
    return (grouped + penalty).reshape(scores.shape)


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


def _chosen(scores: FloatArray, places: NDArray[np.integer]) -> FloatArray:
    """scores[r, places[r, i]] [R, k]: np.take_along_axis, in a third of its time."""
    if len(scores) > 1:
        places = places + np.arange(0, scores.size, scores.shape[1])[:, None]
    return scores.take(places)
