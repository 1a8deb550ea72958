"""The routers of a model: what they compute is found by evaluating them, not by their names.

A router's formula is one of `pipeline/models/routing.py`, applied to logits. Those are a linear product of
its input, which alone is then computed, or what its module returns first. Where no formula gives the experts
and weights that reach a layer's experts, the layer's *choice is its own*: its module decides, and a policy
cannot.
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
from pipeline.models.routing import GroupScore, Score, Scored, Softmax, SparseMixer
from pipeline.policies.view import Layer, Router, Routing

Form = Literal["linear", "first", "log first", "own"]  # where logits come from; own: no logits
Product = tuple[Tensor, Tensor | None]  # matrix [E, H] and bias of a linear product
CLOSE = 1e-4  # relative, of weights
FLOAT32 = 4e-6  # of a number: by so much a sum of float32 products may differ
SCORES: tuple[Score, ...] = ("softmax", "sigmoid", "sqrtsoftplus")
RANDOM_ROWS = 48  # for which routers are evaluated beside those of a forward


@dataclass
class Seen:
    """One layer's router's input and output, and what reached the experts."""

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
        self._module, self._own = layer.router, layer.router.forward
        self._product: Product | None = None  # matrix and bias of the logits
        self._logits: Tensor | None = None  # of the latest call, where the module was run
        self._blank: dict[int, tuple[Any, ...]] = {}  # outputs without numbers, by rows
        layer.router.forward = self._called

    def use(self, form: Form, product: Product | None) -> None:
        """Compute logits in this form from now on."""
        self.form, self._product = form, product

    @property
    def can_probe(self) -> bool:
        """Returns whether it gives logits for another layer's input."""
        return self.form == "linear" or (self.form != "own" and not self._depends_on_rows)

    @property
    def _depends_on_rows(self) -> bool:
        """Returns whether it is given more than its input for each row."""
        more, named = self._seen.more
        tensors = [t for t in (*more, *named.values()) if isinstance(t, Tensor)]
        return any(self._seen.rows in t.shape for t in tensors)

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
        """Returns the latest call's logits [R, E]; `experts` and `weights` [R, k]: the module's choice."""
        if self.form == "linear":
            return self._linear(self.x)
        if self._logits is not None:
            return self._logits
        chosen = torch.full((len(experts), self._count), -torch.inf, device=experts.device)
        return chosen.scatter_(1, experts.long(), weights.float().log())  # as `OwnChoices` reads it

    def logits(self, x: Tensor) -> Tensor:
        """Returns the logits float32 [R, E] of any layer's input [R, H] or [1, R, H]. Raises PolicyError."""
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
        logits: Tensor = outputs[0].reshape(-1, self._count).float()
        return logits.log() if self.form == "log first" else logits

    def _blanks(self, rows: int) -> tuple[Any, ...]:
        """Returns a module's result for so many rows, without numbers: its caller passes it on."""
        seen = self._seen.rows

        def blank(output: Any) -> Any:
            if not isinstance(output, Tensor):
                return output
            return output.new_zeros([rows if size == seen else size for size in output.shape])

        if len(self._blank) > 64:
            self._blank.clear()
        self._blank[rows] = made = tuple(map(blank, self._seen.outputs))
        return made

    def candidates(self, seen: Seen) -> Iterator[tuple[Form, Product | None, FloatArray]]:
        """The forms of logits that it may have, with the logits [R, E] of what was seen."""
        own = list(self._module.parameters())
        x = seen.x.reshape(-1, seen.x.shape[-1])
        biases = [None, *(p.detach() for p in own if p.shape == (self._count,))]
        matrices = (p.detach() for p in own if p.shape == (self._count, x.shape[1]))
        for product in itertools.product(matrices, biases):
            yield "linear", product, functional.linear(x, *product).cpu().numpy()
        first = seen.outputs[0]
        if isinstance(first, Tensor) and first.numel() == seen.rows * self._count:
            logits = first.reshape(-1, self._count).float().cpu()
            yield "first", None, logits.numpy()
            if bool((logits > 0).all()):
                yield "log first", None, logits.log().numpy()

    def at_random(self) -> Seen | None:
        """Returns the module's results for random inputs, where these are what reaches the experts."""
        seen, outputs = self._seen, self._seen.outputs
        places = [
            next((i for i, o in enumerate(outputs) if isinstance(o, Tensor) and _equal(o, wanted)), None)
            for wanted in (seen.experts, seen.weights)
        ]
        if None in places or self._depends_on_rows:
            return None
        x = seen.x
        rows = (*(1,) * (x.dim() - 2), RANDOM_ROWS, x.shape[-1])
        generator = torch.Generator(x.device).manual_seed(0)
        random = torch.randn(rows, generator=generator, device=x.device) * x.std() + x.mean()
        more, named = seen.more
        found = tuple(self._own(random, *more, **named))
        experts, weights = (found[i].reshape(RANDOM_ROWS, -1) for i in places if i is not None)
        return Seen(random, seen.more, found, experts, weights)


def _equal(output: Tensor, wanted: Tensor) -> bool:
    return output.numel() == wanted.numel() and torch.equal(output.reshape(wanted.shape), wanted)


@dataclass(frozen=True)
class Formula:
    """A function of logits, with the names of its arrays by expert."""

    score: Score
    rescaled: bool
    scale: float
    bias: str | None = None
    expert_scale: str | None = None
    groups: int = 1
    best_groups: int = 1
    group_score: GroupScore = "max"

    def router(self, k: int, arrays: Sequence[Mapping[str, FloatArray]]) -> Router | None:
        """The layers' router; `arrays`: of each layer, by name. None where a layer lacks one."""
        if not all({self.bias, self.expert_scale} <= {None, *layer} for layer in arrays):
            return None
        if self.score == "softmax" and not self.bias and not self.expert_scale and self.group_score == "max":
            return Softmax(k, self.rescaled, self.scale, self.groups, self.best_groups)
        bias, expert_scale = (
            None if name is None else np.stack([layer[name] for layer in arrays])
            for name in (self.bias, self.expert_scale)
        )
        return Scored(
            score=self.score,
            k=k,
            rescaled=self.rescaled,
            scale=self.scale,
            groups=self.groups,
            best_groups=self.best_groups,
            group_score=self.group_score,
            bias=bias,
            expert_scale=expert_scale,
        )


@dataclass(frozen=True)
class OwnChoices(Router):
    """A model in some of whose layers the module chooses. There "logits" are the logarithms of the weights,
    and -inf for experts that were not chosen."""

    k: int
    own: frozenset[int]  # these layers
    others: Router | None  # of the other layers

    def __call__(self, logits: FloatArray, layer: Layer) -> Routing:
        own = self._are_own(layer)
        given = (-logits).argsort(axis=1, kind="stable")[:, : self.k].astype(np.int32)
        weights = self._given(logits, given)
        if self.others is None or own.all():
            return Routing(given, weights)
        found = self.others(logits, layer)
        return Routing(np.where(own, given, found.experts), np.where(own, weights, found.weights))

    def scores(self, logits: FloatArray, layer: Layer) -> FloatArray:
        own = self._are_own(layer)
        given: FloatArray = np.exp(logits)
        given /= given.sum(axis=1, keepdims=True)
        if self.others is None or own.all():
            return given
        return np.where(own, given, self.others.scores(logits, layer))

    def weights_of(self, logits: FloatArray, experts: IntArray, layer: Layer) -> FloatArray:
        own = self._are_own(layer)
        given = self._given(logits, experts)
        if self.others is None or own.all():
            return given
        return np.where(own, given, self.others.weights_of(logits, experts, layer))

    def differentiable(self, logits: Tensor, routing: Routing, layer: int) -> Tensor:
        if self.others is not None and layer not in self.own:
            return self.others.differentiable(logits, routing, layer)
        raise PolicyError("a layer of this model chooses experts in a way of its own, which has no gradient")

    def _are_own(self, layer: Layer) -> NDArray[np.bool_]:
        """Returns whether the layer [1, 1], or that of each row [R, 1], is one of `own`."""
        return np.isin(layer, list(self.own)).reshape(-1, 1)

    def _given(self, logits: FloatArray, experts: IntArray) -> FloatArray:
        weights: FloatArray = np.exp(np.take_along_axis(logits, experts, axis=1))
        return weights


def find_router(layers: Sequence[MoeLayer], taps: Sequence[Tap], seen: Sequence[Seen]) -> Router:
    """Find what the routers compute, and let each tap compute its logits alone. Layers for which nothing is
    found keep their own choice, and with them all whose routers are of the same class."""
    k = seen[0].experts.shape[-1]
    evaluated = [[s, r] if (r := t.at_random()) is not None else [s] for t, s in zip(taps, seen, strict=True)]
    arrays = [_arrays(layer, s) for layer, s in zip(layers, seen, strict=True)]
    kinds = [type(layer.router) for layer in layers]
    best: dict[int, tuple[Form, Product | None]] = {}
    chosen: Formula | SparseMixer | None = None
    last = evaluated[-1][-1]  # of the last layer, which is one like most
    for form, _, logits in taps[-1].candidates(last):
        for formula in _fitting(logits, last, arrays[-1], _numbers(layers[-1])):
            found = {i: _form(formula, form, taps[i], evaluated[i], arrays[i]) for i in range(len(taps))}
            others = {kinds[i] for i, product in found.items() if product is None}
            fits = {i: p for i, p in found.items() if p is not None and kinds[i] not in others}
            if len(fits) > len(best):
                best, chosen = fits, formula
            if len(best) == len(taps):
                break
        if len(best) == len(taps):
            break
    for i, how in best.items():
        taps[i].use(*how)
    router: Router | None = chosen if isinstance(chosen, Router) else None
    if isinstance(chosen, Formula):
        router = chosen.router(k, [arrays[i if i in best else len(taps) - 1] for i in range(len(taps))])
    own = frozenset(range(len(taps))) - best.keys()
    return OwnChoices(k, own, router) if own or router is None else router


def _fitting(
    logits: FloatArray, seen: Seen, own: Mapping[str, FloatArray], numbers: tuple[set[int], set[float]]
) -> Iterator[Formula | SparseMixer]:
    """Formulas that give a layer's choice from these logits, simple ones first. `own`: its arrays by
    expert."""
    experts, weights = _choice(seen)
    integers, fractions = numbers
    count, k = logits.shape[1], experts.shape[1]
    names = [None, *own]
    groups: list[tuple[int, int, GroupScore]] = [(1, 1, "max")]
    for number, best, score in itertools.product(sorted(integers), sorted(integers), ("max", "top2")):
        if number > 1 and count % number == 0 and best < number and best * (count // number) >= k:
            groups.append((number, best, "max" if score == "max" else "top2"))
    for group, kind, bias in itertools.product(groups, SCORES, names):
        plain = Formula(kind, False, 1.0, bias, None, *group).router(k, [own])
        assert plain is not None
        found = plain(logits, 0)
        if not np.array_equal(np.sort(found.experts, axis=1), np.sort(experts, axis=1)):
            continue
        scores = plain.weights_of(logits, experts, 0)
        for factor, rescaled in itertools.product(names, (True, False)):
            base = scores / scores.sum(axis=1, keepdims=True) if rescaled else scores
            if factor is not None:
                base = base * own[factor][experts]
            if not base.all():  # no factors
                continue
            scale = float(np.median(weights / base))
            if np.allclose(weights, base * scale, rtol=CLOSE, atol=1e-7):
                yield Formula(kind, rescaled, _plain(scale), bias, factor, *group)
    if k == 2:
        mixers = map(SparseMixer, sorted(fractions))
        yield from (m for m in mixers if _same(m, logits, experts, weights))


def _form(
    formula: Formula | SparseMixer,
    form: Form,
    tap: Tap,
    evaluated: Sequence[Seen],
    arrays: Mapping[str, FloatArray],
) -> tuple[Form, Product | None] | None:
    """The form of a layer's logits with which the formula gives its choice, each time it was evaluated."""
    k = evaluated[0].experts.shape[-1]
    router = formula if isinstance(formula, Router) else formula.router(k, [arrays])
    if router is None:
        return None
    for candidates in zip(*(list(tap.candidates(seen)) for seen in evaluated), strict=False):
        choices = (_choice(seen) for seen in evaluated)
        logits = (numbers for _, _, numbers in candidates)
        kind, product, _ = candidates[0]
        if kind == form and all(_same(router, n, *c) for n, c in zip(logits, choices, strict=True)):
            return kind, product
    return None


def _same(router: Router, logits: FloatArray, experts: IntArray, weights: FloatArray) -> bool:
    """Returns whether the router makes this choice, in any order."""
    found = router(logits, 0)
    ours, theirs = np.argsort(found.experts, axis=1), np.argsort(experts, axis=1)
    pairs = [(found.experts, experts), (found.weights, weights)]
    same = [(np.take_along_axis(a, ours, axis=1), np.take_along_axis(b, theirs, axis=1)) for a, b in pairs]
    return np.array_equal(*same[0]) and np.allclose(*same[1], rtol=CLOSE, atol=1e-6)


def _choice(seen: Seen) -> tuple[IntArray, FloatArray]:
    return seen.experts.cpu().numpy().astype(np.int32), seen.weights.float().cpu().numpy()


def _plain(scale: float) -> float:
    """The decimal number that was probably meant: where float32 could not tell them apart."""
    rounded = round(scale, 4)
    return rounded if abs(rounded - scale) < FLOAT32 * abs(scale) else scale


def _arrays(layer: MoeLayer, seen: Seen) -> dict[str, FloatArray]:
    """Numbers by expert that the router or its caller has, by name."""
    more, named = seen.more
    found = {f"argument {i}": a for i, a in enumerate((*more, *named.values())) if isinstance(a, Tensor)}
    for owner, module in (("router", layer.router), ("owner", layer.owner)):
        own = itertools.chain(module.named_parameters(), module.named_buffers())
        found |= {f"{owner} {name}": tensor for name, tensor in own if tensor.is_floating_point()}
    own_numbers = {n: t for n, t in found.items() if t.numel() == layer.count}
    return {n: t.float().flatten().cpu().numpy() for n, t in own_numbers.items()}


def _numbers(layer: MoeLayer) -> tuple[set[int], set[float]]:
    """The integers that may count groups, and the fractions, that the router, its caller and their config
    know."""
    config = getattr(layer.experts, "config", None)
    known = {**vars(layer.router), **vars(layer.owner), **(vars(config) if config is not None else {})}
    integers = {v for v in known.values() if type(v) is int and 0 < v < layer.count}
    return integers, {v for v in known.values() if type(v) is float and 0 < v < 1}
