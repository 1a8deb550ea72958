"""Checks of single values of a message: type, range and size. Knows no message.

Each check returns the value or raises MalformedMessage with the end of a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from protocol.errors import MalformedMessage

INT_MIN, INT_MAX = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True)
class Limits:
    """The most that a receiver allocates for one message."""

    header: int = 4 << 20  # bytes of the msgpack map, so also of any string in it
    frame: int = 256 << 20  # bytes of one array
    items: int = 1 << 20  # entries of one list
    keys: int = 4096  # entries of one map
    containers: int = 16384  # lists and maps in one header, all together
    depth: int = 16  # nesting of a Tree; the Tree itself is level 1


DEFAULT = Limits()


def wrong(expected: str, value: Any) -> MalformedMessage:
    if isinstance(value, int | float) and type(value) is not bool:
        return MalformedMessage(f"must be {expected}, not {shown(value)}")
    return MalformedMessage(f"must be {expected}, not {type_name(value)}")


def type_name(value: Any) -> str:
    return "nil" if value is None else type(value).__name__


def shown(value: Any) -> str:
    """An untrusted value for an error message: one line of bounded length."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str | bytes):
        return repr(value[:40])
    return repr(value) if isinstance(value, int | float) else type_name(value)


def check_int(value: Any, limits: Limits) -> int:
    if type(value) is int and INT_MIN <= value <= INT_MAX:
        return value
    raise wrong("int (64 bits, signed)", value)


def check_float(value: Any, limits: Limits) -> float:
    # Writers without a float type send 1.0 as the integer 1. NaN and infinity would poison averages of
    # measured times and make sampling undefined, so no scalar field takes them.
    if (type(value) is int and abs(value) <= INT_MAX) or (isinstance(value, float) and math.isfinite(value)):
        return float(value)
    raise wrong("finite float", value)


def exactly(kind: type) -> Callable[[Any, Limits], Any]:
    """The check for values of this type and of no subclass."""

    def check(value: Any, limits: Limits) -> Any:
        if type(value) is kind:
            return value
        raise wrong(kind.__name__, value)

    return check


check_str = exactly(str)


def check_tree(value: Any, limits: Limits) -> Any:
    if type(value) is not dict:
        raise wrong("map", value)
    _check_node(value, limits, limits.depth)
    return value


def _check_node(value: Any, limits: Limits, levels: int) -> None:
    kind = type(value)
    if value is None or kind in (str, bool, float):
        return  # NaN is harmless here: these values are shown, never computed with
    if kind is int:
        check_int(value, limits)
        return
    if kind not in (dict, list, tuple):
        raise wrong("nil, bool, int, float, str, list or map at every place", value)
    if levels == 0:
        raise MalformedMessage(f"is nested deeper than {limits.depth} levels")
    if len(value) > (limits.keys if kind is dict else limits.items):
        raise MalformedMessage(f"holds a {kind.__name__} of {len(value)} entries, more than the limit")
    for entry in value:
        if kind is dict:
            check_str(entry, limits)
            entry = value[entry]
        _check_node(entry, limits, levels - 1)


def check_ints(values: Any, limits: Limits) -> None:
    if values and (set(map(type, values)) != {int} or min(values) < INT_MIN or max(values) > INT_MAX):
        for value in values:
            check_int(value, limits)
