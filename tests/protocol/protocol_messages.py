"""Random valid messages, made from the annotations of messages.py alone."""

import types
import typing
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from protocol.messages import TAGS, Tree

texts = st.text(st.characters(codec="utf-8"), max_size=20)
integers = st.integers(-(2**63), 2**63 - 1)
leaves = st.none() | st.booleans() | integers | st.floats(allow_nan=False) | texts
trees = st.dictionaries(
    texts,
    st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)
SCALARS = {
    int: integers,
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: texts,
    bool: st.booleans(),
    bytes: st.binary(max_size=80),
}


def values(annotation: Any) -> st.SearchStrategy[Any]:
    if annotation in SCALARS:
        return SCALARS[annotation]
    if annotation == Tree:
        return trees
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is np.ndarray:
        shape, (dtype,) = map(typing.get_args, arguments)
        return hnp.arrays(
            dtype, hnp.array_shapes(min_dims=len(shape), max_dims=len(shape), min_side=0, max_side=40)
        )
    if origin is dict:
        return st.dictionaries(texts, texts, max_size=4)
    if origin in (typing.Union, types.UnionType):
        return st.none() | values(arguments[0])
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=5).map(tuple)
    return records(annotation)


def records(record: type) -> st.SearchStrategy[Any]:
    return st.builds(record, **{name: values(hint) for name, hint in typing.get_type_hints(record).items()})


messages = st.sampled_from(sorted(TAGS.values(), key=lambda c: c.__name__)).flatmap(records)
