"""The wire types: for each annotation that messages.py may use, its checks and its encoding.

A check is the same on both sides, so what one side can encode the other side accepts. The functions here
raise MalformedMessage with the end of a sentence ("must be int, not str"); `codec.py` puts the message's
and the field's name in front. Knows no frames and no tags.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.checks import (
    Limits,
    check_float,
    check_int,
    check_ints,
    check_tree,
    exactly,
    shown,
    type_name,
    wrong,
)
from protocol.errors import MalformedMessage
from protocol.messages import ArraySpec

Buffer = Any  # anything with the buffer protocol: bytes, memoryview, zmq.Frame
Convert = Callable[[Any, Limits], Any]


@dataclass(frozen=True)
class WireType:
    """One annotation: `pack` checks an attribute and gives the msgpack value, `unpack` does the reverse.

    `name` is how the type is written in `codec.py`'s table and in errors."""

    name: str
    pack: Convert
    unpack: Convert


class ArrayType:
    """An array field: [dtype name, dimensions...] in the header, its bytes in a frame of its own."""

    def __init__(self, spec: ArraySpec) -> None:
        self.name = f"{spec.dtype}[{spec.ndim}d]"
        self._label = spec.dtype
        self._ndim = spec.ndim
        self._dtype = np.dtype(spec.dtype).newbyteorder("<")

    def pack(self, array: NDArray[Any], limits: Limits) -> tuple[list[Any], bytes | memoryview]:
        """The header's value and the frame. A large C-contiguous array's frame is a view of its memory."""
        if not isinstance(array, np.ndarray) or array.dtype != self._dtype or array.ndim != self._ndim:
            found = f"{array.dtype}[{array.ndim}d]" if isinstance(array, np.ndarray) else type_name(array)
            raise MalformedMessage(f"must be {self.name}, not {found}")
        nbytes = array.nbytes
        if nbytes > limits.frame:
            raise MalformedMessage(f"has {nbytes} bytes, more than the limit of {limits.frame}")
        declared = [self._label, *array.shape]
        if nbytes <= 4096 or not array.flags.c_contiguous:
            return declared, array.tobytes()  # below this a copy costs less than a view
        return declared, array.data.cast("B")

    def unpack(self, declared: Any, frame: Buffer, limits: Limits) -> NDArray[Any]:
        """A read-only array on the frame's own memory, which it references; everything that could make numpy
        allocate or read too much is checked first. Only a frame that lies unaligned in memory is copied,
        because kernels rely on alignment to the item size."""
        if type(declared) is not list or len(declared) != 1 + self._ndim or declared[0] != self._label:
            raise MalformedMessage(f"must be declared as [{self._label!r}] and {self._ndim} dimensions")
        size = self._dtype.itemsize
        shape = declared[1:]
        for length in shape:
            if type(length) is not int or not 0 <= length <= limits.frame:
                raise MalformedMessage(f"has an impossible dimension {shown(length)}")
            size *= length
        view = memoryview(frame)
        if size != view.nbytes or size > limits.frame:
            raise MalformedMessage(f"of shape {shape} needs {size} bytes, its frame has {view.nbytes}")
        array: NDArray[Any] = np.ndarray(shape, self._dtype, buffer=view.toreadonly())
        if not array.flags.aligned:
            array = array.copy()
            array.flags.writeable = False
        return array


def wire_type(annotation: Any) -> WireType | ArrayType:
    """The wire type of an annotation (with its extras). Raises TypeError for one that has none."""
    scalar = _SCALARS.get(annotation)
    if scalar is not None:
        return scalar
    extras = getattr(annotation, "__metadata__", ())
    if extras and isinstance(extras[0], ArraySpec):
        return ArrayType(extras[0])
    if extras == ("tree",):
        return WireType("map", check_tree, check_tree)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType) and len(arguments) == 2 and arguments[1] is types.NoneType:
        return _optional(_plain(wire_type(arguments[0])))
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        inner = _plain(wire_type(arguments[0]))
        return _many(inner, check_ints if inner is _SCALARS[int] else None)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return _record(annotation)
    raise TypeError(f"{annotation} has no wire type")


def fields_of(record: type) -> Iterator[tuple[str, WireType | ArrayType, bool]]:
    """Name, wire type and whether a receiver needs it (it has no default), in the record's order."""
    hints = typing.get_type_hints(record, include_extras=True)
    for field in dataclasses.fields(record):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        yield field.name, wire_type(hints[field.name]), required


def unknown_field(header: dict[Any, Any], known: set[str]) -> MalformedMessage:
    """The error for a map that holds a key which is no field."""
    return MalformedMessage(f"unknown field {shown(next(key for key in header if key not in known))}")


_CHECKS: dict[type, Convert] = {int: check_int, float: check_float} | {
    t: exactly(t) for t in (str, bool, bytes)
}
_SCALARS = {kind: WireType(kind.__name__, check, check) for kind, check in _CHECKS.items()}


def _plain(inner: WireType | ArrayType) -> WireType:
    if isinstance(inner, ArrayType):
        raise TypeError("an array can only be a message's own field")
    return inner


def _optional(inner: WireType) -> WireType:
    def or_nil(convert: Convert) -> Convert:
        return lambda value, limits: None if value is None else convert(value, limits)

    return WireType(f"{inner.name}?", or_nil(inner.pack), or_nil(inner.unpack))


def _many(inner: WireType, together: Callable[[Any, Limits], None] | None) -> WireType:
    """`together` checks all entries at once where that is much faster than one by one."""

    def each(source: type[Any], target: type[Any], convert: Convert) -> Convert:
        def all_of(values: Any, limits: Limits) -> Any:
            if type(values) is not source:
                raise wrong(source.__name__, values)
            if len(values) > limits.items:
                raise MalformedMessage(f"has {len(values)} entries, more than the limit of {limits.items}")
            if together:
                together(values, limits)
                return target(values)
            return target([convert(value, limits) for value in values])

        return all_of

    return WireType(f"[{inner.name}]", each(tuple, list, inner.pack), each(list, tuple, inner.unpack))


def _record(record: type) -> WireType:
    fields = [(name, _plain(inner), required) for name, inner, required in fields_of(record)]
    names = {name for name, _, _ in fields}

    def pack(value: Any, limits: Limits) -> dict[str, Any]:
        if type(value) is not record:
            raise wrong(record.__name__, value)
        return {name: _within(name, inner.pack, getattr(value, name), limits) for name, inner, _ in fields}

    def unpack(value: Any, limits: Limits) -> Any:
        if type(value) is not dict:
            raise wrong(f"map ({record.__name__})", value)
        given = {}
        for name, inner, required in fields:
            if name in value:
                given[name] = _within(name, inner.unpack, value[name], limits)
            elif required:
                raise MalformedMessage(f"field {name} is missing")
        if len(given) != len(value):
            raise unknown_field(value, names)
        return record(**given)

    return WireType(record.__name__, pack, unpack)


def _within(name: str, convert: Convert, value: Any, limits: Limits) -> Any:
    try:
        return convert(value, limits)
    except MalformedMessage as e:
        raise MalformedMessage(f"{name} {e}") from None
