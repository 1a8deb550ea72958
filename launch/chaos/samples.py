"""Random valid messages, made from the annotations of messages.py; the same state gives the same message."""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from protocol.messages import Tree

INT_MIN, INT_MAX = -(1 << 63), (1 << 63) - 1
Make = Callable[[Random], Any]

EDGES = (0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, -(2**31), 2**32, INT_MAX, INT_MIN)
WORDS = ("", "a", "worker", "prefetcher", "loader", "coordinator", "shm", "cuda", "x" * 300, "\0", "é𝄞", "\n")
TREE_LEVELS = 3


def valid_message(random: Random, message: type) -> Any:
    """A message of this class that the codec accepts."""
    return _record(message)(random)


@functools.cache
def _record(record: type) -> Make:
    makes = [(name, _value(hint)) for name, hint in typing.get_type_hints(record).items()]
    return lambda random: record(**{name: make(random) for name, make in makes})


def _value(annotation: Any) -> Make:
    scalar = _SCALARS.get(annotation)
    if scalar is not None:
        return scalar
    if annotation == Tree:
        return functools.partial(_map, levels=TREE_LEVELS)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is np.ndarray:
        shape, dtype = map(typing.get_args, arguments)
        return functools.partial(_array, dimensions=len(shape), dtype=np.dtype(dtype[0]))
    if origin is dict:
        return lambda random: {f"{i}": _text(random) for i in range(random.randrange(4))}
    if origin in (typing.Union, types.UnionType):
        inner = _value(arguments[0])
        return lambda random: inner(random) if random.random() < 0.5 else None
    if origin is tuple:
        inner = _value(arguments[0])
        return lambda random: tuple([inner(random) for _ in range(random.randrange(4))])
    return _record(annotation)


def _integer(random: Random) -> int:
    shape = random.random()
    if shape < 0.6:
        return random.randrange(8)
    return random.choice(EDGES) if shape < 0.8 else random.randint(INT_MIN, INT_MAX)


def _float(random: Random) -> float:
    return random.choice((0.0, 1.0, -1.0, 1e-300, 1e300, random.uniform(-10, 10)))


def _text(random: Random) -> str:
    if random.random() < 0.5:
        return random.choice(WORDS)
    return "".join(chr(random.randrange(32, 0x2FF)) for _ in range(random.randrange(20)))


def _array(random: Random, dimensions: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    shape = tuple(random.randrange(9) for _ in range(dimensions))
    return np.frombuffer(random.randbytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)


def _map(random: Random, levels: int) -> dict[str, Any]:
    return {f"{i}": _node(random, levels - 1) for i in range(random.randrange(4))}


def _node(random: Random, levels: int) -> Any:
    if levels > 0 and random.random() < 0.4:
        if random.random() < 0.5:
            return [_node(random, levels - 1) for _ in range(random.randrange(4))]
        return _map(random, levels)
    return random.choice((None, True, _integer(random), _float(random), _text(random)))


_SCALARS: dict[Any, Make] = {
    int: _integer,
    float: _float,
    str: _text,
    bool: lambda random: random.random() < 0.5,
    bytes: lambda random: random.randbytes(random.randrange(80)),
}
