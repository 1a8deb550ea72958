"""The routers of a model: what they compute is found by evaluating them, not by their names.

A router's formula is one of `pipeline/models/routing.py`, applied to logits. Those are a linear product of its input,
which alone is then computed, or what its module returns first. Where no formula gives the experts and weights that
reach a layer's experts, the layer's *choice is its own*: its module decides, and a policy cannot.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pipeline.arrays import FloatArray, IntArray
from pipeline.errors import PolicyError
from pipeline.generic.skeleton import MoeLayer
from pipeline.models.routing import Router, Scored, Softmax, SparseMixer
from pipeline.policies.view import Routing

Form = Literal["linear", "first", "log first", "own"]  # where logits come from; own: no logits
CLOSE = 1e-4  # relative, of weights
SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


@dataclass
class Seen:
    """What one layer's router was given and gave, and what reached the experts."""

    x: Tensor  # as it was given: [R, H] or [1, R, H]
    more: tuple[tuple[Any, ...], dict[str, Any]]  # the router's other arguments
    outputs: tuple[Any, ...]
    experts: Tensor = field(default_factory=lambda: torch.empty(0))  # [R, k]
    weights: Tensor = field(default_factory=lambda: torch.empty(0))  # [R, k]

    @property
    def rows(self) -> int:
        return self.x.numel() // self.x.shape[-1]


class Tap:
    """Takes the place of a layer's router: keeps its input until its logits are asked for."""

    x: Tensor  # the router's latest input

    def __init__(self, layer: MoeLayer, seen: Seen) -> None:
        self.name, self.form = layer.name, "own"
        self._seen, self._count = seen, layer.count
        self._own = layer.router.forward
        self._product: tuple[Tensor, Tensor | None] | None = None  # matrix and bias of the logits
        self._logits: Tensor | None = None  # of the latest call, where the module was run
        self._blank: dict[int, tuple[Any, ...]] = {}  # outputs without numbers, by rows
        self._dims = seen.x.dim()
        layer.router.forward = self._called  # type: ignore[method-assign]

    def use(self, form: Form, product: tuple[Tensor, Tensor | None] | None) -> None:
        """Compute logits in this form from now on."""
        self.form, self._product = form, product

    @property
    def can_probe(self) -> bool:
        """Whether it gives logits for another layer's input."""
        more, named = self._seen.more
        tensors = [t for t in (*more, *named.values()) if isinstance(t, Tensor)]
        of_rows = any(self._seen.rows in t.shape for t in tensors)
        return self.form == "linear" or (self.form != "own" and not of_rows)

    def _called(self, x: Tensor, *more: Any, **named: Any) -> tuple[Any, ...]:
        self.x = x
        if self.form == "linear":
            rows = x.numel() // x.shape[-1]
            return self._blank.get(rows) or self._blanks(rows)
        outputs: tuple[Any, ...] = self._own(x, *more, **named)
        if self.form != "own":
            self._logits = self._first(outputs)
        return outputs

    def own_logits(self, experts: Tensor, weights: Tensor) -> Tensor:
        """Of the latest call, float32 [R, E]; `experts` and `weights` [R, k]: the module's choice."""
        if self.form == "linear":
            return self._linear(self.x)
        if self._logits is not None:
            return self._logits
        chosen = torch.full((len(experts), self._count), -torch.inf, device=experts.device)
        return chosen.scatter_(1, experts.long(), weights.float().log())  # as `OwnChoices` reads it

    def logits(self, x: Tensor) -> Tensor:
        """Of the input of any layer's router [R, H] or [1, R, H]: float32 [R, E]. Raises PolicyError."""
        if self.form == "linear":
            return self._linear(x)
        if not self.can_probe:
            raise PolicyError(f"the router of {self.name} cannot be applied to another layer's input")
        more, named = self._seen.more
        return self._first(self._own(x.view(*self._seen.x.shape[:-2], -1, x.shape[-1]), *more, **named))

    def _linear(self, x: Tensor) -> Tensor:
        assert self._product is not None
        matrix, bias = self._product
        return functional.linear(x.view(-1, matrix.shape[1]), matrix, bias)

    def _first(self, outputs: tuple[Any, ...]) -> Tensor:
        logits = outputs[0].reshape(-1, self._count).float()
        return logits.log() if self.form == "log first" else logits

    def _blanks(self, rows: int) -> tuple[Any, ...]:
        """What the module would return for so many rows, without numbers: its caller passes it on."""
        seen = self._seen.rows

        def blank(output: Any) -> Any:
            if not isinstance(output, Tensor):
                return output
            return output.new_zeros([rows if size == seen else size for size in output.shape])

        if len(self._blank) > 64:
            self._blank.clear()
        self._blank[rows] = made = tuple(map(blank, self._seen.outputs))
        return made

    def candidates(self) -> Iterator[tuple[Form, tuple[Tensor, Tensor | None] | None, FloatArray]]:
        """Forms of logits that it may have, with those of the input that was seen, [R, E]."""
        seen, module = self._seen, self._own.__self__  # type: ignore[attr-defined]
        own = list(module.parameters())
        x = seen.x.reshape(-1, seen.x.shape[-1])
        biases = [None, *(p for p in own if p.shape == (self._count,))]
        for matrix, bias in itertools.product(
            (p for p in own if p.shape == (self._count, x.shape[1])), biases
        ):
            product = matrix.detach().float(), None if bias is None else bias.detach().float()
            yield "linear", product, functional.linear(x, *product).cpu().numpy()
        first = seen.outputs[0]
        if isinstance(first, Tensor) and first.numel() == seen.rows * self._count:
            logits = first.detach().reshape(-1, self._count).float().cpu()
            yield "first", None, logits.numpy()
            if bool((logits > 0).all()):
                yield "log first", None, logits.log().numpy()


@dataclass(frozen=True)
class Formula:
    """A function of logits, with the names of its arrays by expert."""

    score: str
    rescaled: bool
    scale: float
    bias: str | None = None
    expert_scale: str | None = None
    groups: int = 1
    best_groups: int = 1
    group_score: str = "max"

    def router(self, k: int, arrays: Sequence[Mapping[str, FloatArray]]) -> Router:
        """The layers' router; `arrays`: of each layer, by name."""
        groups = {"groups": self.groups, "best_groups": self.best_groups}
        if self.score == "softmax" and not self.bias and not self.expert_scale and self.group_score == "max":
            return Softmax(k=k, rescaled=self.rescaled, scale=self.scale, **groups)

        def stacked(name: str | None) -> FloatArray | None:
            return None if name is None else np.stack([a[name] for a in arrays])

        bias, expert_scale = stacked(self.bias), stacked(self.expert_scale)
        return Scored(
            score=self.score,
            k=k,
            rescaled=self.rescaled,
            scale=self.scale,
            group_score=self.group_score,
            bias=bias,
            expert_scale=expert_scale,
            **groups,
        )


@dataclass(frozen=True)
class OwnChoices(Router):
    """A model in some of whose layers the module chooses. There "logits" are the logarithms of the weights, and
    -inf for experts that were not chosen."""

    k: int
    layers: frozenset[int]
    others: Router | None  # of the other layers

    def __call__(self, logits: FloatArray, layer: int = 0) -> Routing:
        if layer not in self.layers and self.others is not None:
            return self.others(logits, layer)
        experts = (-logits).argsort(axis=1, kind="stable")[:, : self.k]
        weights = np.exp(np.take_along_axis(logits, experts, axis=1))
        return Routing(experts.astype(np.int32), weights.astype(np.float32))

    def differentiable(self, logits: Tensor, routing: Routing, layer: int = 0) -> Tensor:
        if layer not in self.layers and self.others is not None:
            return self.others.differentiable(logits, routing, layer)
        raise PolicyError("this model's routers choose in a way of their own, which has no gradient here")


def find_router(layers: Sequence[MoeLayer], taps: Sequence[Tap], seen: Sequence[Seen]) -> Router:
    """Find what the routers compute, and let each tap compute its logits alone. Layers for which nothing is
    found keep their own choice."""
    k = seen[0].experts.shape[-1]
    arrays = [_arrays(layer, s) for layer, s in zip(layers, seen, strict=True)]
    best: tuple[list[int], Any, Any] = [], None, None
    for form, _, logits in taps[-1].candidates():  # of the last layer, which is one like most
        for formula in _fitting(logits, seen[-1], arrays[-1], _numbers(layers[-1])):
            fits = [
                i for i in range(len(taps)) if _fits(formula, form, taps[i], seen[i], arrays[i]) is not None
            ]
            if len(fits) > len(best[0]):
                best = fits, form, formula
            if len(fits) == len(taps):
                break
        if len(best[0]) == len(taps):
            break
    fits, form, formula = best
    for i in fits:
        taps[i].use(form, _fits(formula, form, taps[i], seen[i], arrays[i])[0])  # type: ignore[index]
    own = frozenset(range(len(taps))) - frozenset(fits)
    if not own:
        return formula if isinstance(formula, Router) else formula.router(k, arrays)
    others = None
    if fits:
        whole = [arrays[i] if i in fits else arrays[fits[0]] for i in range(len(taps))]
        others = formula if isinstance(formula, Router) else formula.router(k, whole)
    return OwnChoices(k, own, others)


def _fitting(
    logits: FloatArray, seen: Seen, own: Mapping[str, FloatArray], numbers: tuple[set[int], set[float]]
) -> Iterator[Formula | SparseMixer]:
    """Formulas that give a layer's choice from these logits, simple ones first. `own`: its arrays by expert."""
    experts, weights = _choice(seen)
    integers, fractions = numbers
    count, k = logits.shape[1], experts.shape[1]
    names = [None, *own]
    groups = [(1, 1, "max")]
    groups += [
        (g, b, s)
        for g, b in itertools.product(sorted(integers), repeat=2)
        for s in ("max", "top2")
        if 1 < g < count and count % g == 0 and b < g
    ]
    for group, score, bias in itertools.product(groups, SCORES, names):
        scores = _score(score, logits)
        choice = scores if bias is None else scores + own[bias]
        if not np.array_equal(_best(choice, k, *group), np.sort(experts, axis=1)):
            continue
        chosen = np.take_along_axis(scores, experts, axis=1)
        for factor, rescaled in itertools.product(names, (True, False)):
            base = chosen / chosen.sum(axis=1, keepdims=True) if rescaled else chosen
            if factor is not None:
                base = base * own[factor][experts]
            scale = float(np.median(weights / base))
            if np.allclose(weights, base * scale, rtol=CLOSE, atol=1e-7):
                yield Formula(score, rescaled, _plain(scale), bias, factor, *group)
    if k == 2:
        mixers = map(SparseMixer, fractions)
        yield from (m for m in mixers if _same(m, logits, experts, weights))


def _fits(
    formula: Formula | SparseMixer, form: Form, tap: Tap, seen: Seen, arrays: Mapping[str, FloatArray]
) -> tuple[tuple[Tensor, Tensor | None] | None] | None:
    """The product of a layer's logits, in a tuple, where the formula gives the layer's choice; else None."""
    experts, weights = _choice(seen)
    for kind, product, logits in tap.candidates():
        if kind != form:
            continue
        router = formula if isinstance(formula, Router) else formula.router(experts.shape[1], [arrays])
        if _same(router, logits, experts, weights):
            return (product,)
    return None


def _same(router: Router, logits: FloatArray, experts: IntArray, weights: FloatArray) -> bool:
    found = router(logits, 0)
    a, b = np.argsort(found.experts, axis=1), np.argsort(experts, axis=1)
    ours, theirs = (np.take_along_axis(*p, axis=1) for p in ((found.experts, a), (experts, b)))
    if not np.array_equal(ours, theirs):
        return False
    ours, theirs = (np.take_along_axis(*p, axis=1) for p in ((found.weights, a), (weights, b)))
    return np.allclose(ours, theirs, rtol=CLOSE, atol=1e-6)


def _choice(seen: Seen) -> tuple[NDArray[np.int64], FloatArray]:
    return seen.experts.cpu().numpy().astype(np.int64), seen.weights.detach().float().cpu().numpy()


def _score(name: str, logits: FloatArray) -> FloatArray:
    wide = torch.from_numpy(logits)
    match name:
        case "softmax":
            scores = wide.softmax(1)
        case "sigmoid":
            scores = wide.sigmoid()
        case _:
            scores = functional.softplus(wide).sqrt()
    return scores.numpy()


def _best(choice: FloatArray, k: int, groups: int, best: int, group_score: str) -> NDArray[np.int64]:
    """The k largest of the best groups, in ascending order of their numbers [R, k]."""
    scores = choice.reshape(len(choice), groups, -1)
    if groups > 1:
        top = np.sort(scores, axis=2)[:, :, -1 if group_score == "max" else -2 :].sum(axis=2)
        limit = np.sort(top, axis=1)[:, -best, None]
        scores = np.where((top < limit)[:, :, None], -np.inf, scores)
    flat = scores.reshape(choice.shape)
    return np.sort(np.argsort(-flat, axis=1, kind="stable")[:, :k], axis=1)


def _plain(scale: float) -> float:
    """The decimal number that was probably meant."""
    rounded = round(scale, 4)
    return rounded if abs(rounded - scale) < CLOSE * abs(scale) else scale


def _arrays(layer: MoeLayer, seen: Seen) -> dict[str, FloatArray]:
    """Numbers by expert that the router or its caller has, by name."""
    more, named = seen.more
    found = {f"argument {i}": a for i, a in enumerate((*more, *named.values())) if isinstance(a, Tensor)}
    for owner, module in (("router", layer.router), ("owner", layer.owner)):
        own = itertools.chain(module.named_parameters(), module.named_buffers())
        found |= {f"{owner} {name}": tensor for name, tensor in own if "experts" not in name.split(".")[0]}
    return {
        n: t.detach().float().flatten().cpu().numpy() for n, t in found.items() if t.numel() == layer.count
    }


def _numbers(layer: MoeLayer) -> tuple[set[int], set[float]]:
    """The integers that may count groups, and the fractions, that the router, its caller and their config know."""
    config = getattr(layer.experts, "config", None)
    known = {**vars(layer.router), **vars(layer.owner), **(vars(config) if config is not None else {})}
    integers = {v for v in known.values() if type(v) is int and 0 < v < layer.count}
    return integers, {v for v in known.values() if type(v) is float and 0 < v < 1}
