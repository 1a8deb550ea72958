"""Several sequences in one step of a transformers model: their new tokens are the rows of one batch [1, R].

What acts on rows alone (embeddings, norms, blocks, routers, head) is computed once for all. A *mixer*, a
module that looks at other tokens through the cache, is called in one of two ways:

- *split*: once for each sequence, with that sequence's rows, cache and mask;
- *rows*: once for all: only the cache's `update` and the attention function see sequences.

`trial.py` finds the mixers for which rows gives the same. Functions that take the cache, such as those that
make masks, are called for each sequence. A step of one sequence is the model's own forward.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.generic import attention
from pipeline.generic.caches import PerSequence, Rows, StepCache

CACHE = "cache"  # the argument of what takes one


class Packing:
    """Calls a decoder's mixers for the sequences of a step. Changes its modules for good."""

    _active: Packing | None = None  # the one in whose step masks are made

    def __init__(self, decoder: nn.Module) -> None:
        self.cache: StepCache | None = None  # set by `trial.py`
        self.mixers = dict(mixers_of(decoder))
        self.rows: set[type[nn.Module]] = set()  # kinds of mixers that are called once for all sequences
        self._step: Sequence[Rows] = ()  # of several sequences
        for mixer in self.mixers.values():
            mixer.forward = self._split(mixer, mixer.forward)
            for module in mixer.modules():
                attention.wrap(module)
                if hasattr(module, "expand_kv"):
                    attention.keep_latents(module)
        for name in {type(m).__module__ for m in decoder.modules()}:
            if "modeling_" in name:
                _wrap_functions(sys.modules[name])

    def __call__(self, decoder: nn.Module, tokens: Sequence[int], rows: Sequence[Rows]) -> Tensor:
        """The last hidden states float32 [R, H] of the rows' tokens, in order."""
        assert self.cache is not None
        device = next(decoder.parameters()).device
        positions = [p for r in rows for p in range(r.start, r.start + r.count)]
        both = torch.tensor([tokens, positions]).to(device)
        self._step = rows if len(rows) > 1 else ()
        self.cache.show(rows)
        Packing._active = self
        try:
            out = decoder(input_ids=both[:1], position_ids=both[1:], cache=self.cache, use_cache=True)
        finally:
            Packing._active = None
            self._step = ()
            self.cache.show(())
        hidden: Tensor = out.last_hidden_state
        return hidden[0]

    def _split(self, mixer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(forward).parameters)
        kind = type(mixer)

        def split(*args: Any, **kwargs: Any) -> Any:
            if not self._step or kind in self.rows:
                return forward(*args, **kwargs)
            named = {**dict(zip(names, args, strict=False)), **kwargs}
            step, cache = self._step, self.cache
            assert cache is not None
            outs = []
            for i, rows in enumerate(step):
                cache.show((rows,))
                outs.append(forward(**{k: _part(v, i, rows, step[-1].end) for k, v in named.items()}))
            cache.show(step)
            if not isinstance(outs[0], tuple):
                return torch.cat(outs, 1)
            others = (PerSequence(part, step) for part in list(zip(*outs, strict=True))[1:])
            return (torch.cat([o[0] for o in outs], 1), *others)

        return split

    def for_each(self, function: Callable[..., Any], named: dict[str, Any]) -> Any:
        """What a function of the model that takes the cache gives for each sequence."""
        cache, made = self.cache, []
        assert cache is not None
        for i, rows in enumerate(self._step):
            cache.show((rows,))
            made.append(function(**{k: _part(v, i, rows, self._step[-1].end) for k, v in named.items()}))
        cache.show(self._step)
        return None if all(mask is None for mask in made) else PerSequence(made, self._step)

    @classmethod
    def several(cls) -> Packing | None:
        """The packing in whose step of several sequences this is called."""
        return cls._active if cls._active is not None and cls._active._step else None


def _part(value: Any, number: int, rows: Rows, total: int) -> Any:
    """The part of a mixer's argument that belongs to one sequence."""
    if type(value) is PerSequence:
        return value[number]
    if isinstance(value, tuple | list):
        return type(value)(_part(v, number, rows, total) for v in value)
    if type(value) is dict:
        return {k: _part(v, number, rows, total) for k, v in value.items()}
    if isinstance(value, Tensor) and value.dim() > 1:
        for axis in dict.fromkeys((1, value.dim() - 1, value.dim() - 2)):  # where rows lie, in this order
            if axis and value.shape[axis] == total:
                return value.narrow(axis, rows.first, rows.count)
    return value


def mixers_of(decoder: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules below each decoder layer that take the cache."""
    for name, layers in decoder.named_modules():
        if name.rpartition(".")[2] == "layers" and isinstance(layers, nn.ModuleList):
            for i, layer in enumerate(layers):
                yield from _taking_cache(f"{name}.{i}", layer)


def _taking_cache(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        if CACHE in inspect.signature(child.forward).parameters:
            yield f"{name}.{child_name}", child
        else:
            yield from _taking_cache(f"{name}.{child_name}", child)


def _wrap_functions(modeling: Any) -> None:
    """Let the functions with a cache that a family's modules call, such as those that make masks, be called
    for each sequence in our steps."""
    for name, function in list(vars(modeling).items()):
        if isinstance(function, FunctionType) and not hasattr(function, "tandem"):
            signature = inspect.signature(function)
            if CACHE in signature.parameters:
                setattr(modeling, name, _each(function, signature))


def _each(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    def each(*args: Any, **kwargs: Any) -> Any:
        packing = Packing.several()
        if packing is None:
            return function(*args, **kwargs)
        named = dict(signature.bind(*args, **kwargs).arguments)
        return packing.for_each(function, {**named, **named.pop("kwargs", {})})

    each.tandem = True  # type: ignore[attr-defined]
    return each
