"""Random valid messages, made from the annotations of messages.py alone."""

import dataclasses
import types
import typing
from typing import Any

from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from protocol.messages import TAGS, ArraySpec

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
    extras = getattr(annotation, "__metadata__", ())
    if extras and isinstance(extras[0], ArraySpec):
        shapes = hnp.array_shapes(min_dims=extras[0].ndim, max_dims=extras[0].ndim, min_side=0, max_side=40)
        return hnp.arrays(extras[0].dtype, shapes)
    if extras == ("tree",):
        return trees
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return st.none() | values(arguments[0])
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=5).map(tuple)
    return records(annotation)


def records(record: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(record, include_extras=True)
    return st.builds(
        record, **{field.name: values(hints[field.name]) for field in dataclasses.fields(record)}
    )


messages = st.sampled_from(sorted(TAGS.values(), key=lambda c: c.__name__)).flatmap(records)
