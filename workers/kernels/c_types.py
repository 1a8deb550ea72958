"""The structures of `c/kernels.h` for ctypes, and what its functions return."""

from __future__ import annotations

import ctypes
from typing import Any

POINTER, SIZE = ctypes.c_void_p, ctypes.c_int64
FAULTS = {
    1: "a row outside x",
    2: "offsets that do not fit the rows",
    3: "an item outside the layer",
    4: "buffers too small",
    5: "a position outside the KV cache",
    6: "no such layer",
    7: "arrays larger than their memory",
    8: "an item's rows are not ascending",
    9: "a crash while it was computed",
    10: "a mask that its format does not have, or no mask at all",
    11: "a Work of another generation",
}
SMALL_BUFFERS = 4


class Weights(ctypes.Structure):
    """A matrix, or with `channels` tiles. `channel_bits`: of gate and down, where they lie by channel."""

    _fields_ = tuple(
        (name, SIZE) for name in ("bits", "group", "inputs", "outputs", "channels", "channel_bits")
    )


class Matrix(ctypes.Structure):
    _fields_ = (("of", Weights), ("data", POINTER), ("bias", POINTER))


class Activations(ctypes.Structure):
    _fields_ = (("codes", POINTER), ("factors", POINTER))


class Host(ctypes.Structure):
    _fields_ = (
        ("team", POINTER),
        ("weights", Weights),
        ("tiles_data", POINTER),
        ("heads_data", POINTER),
        *((name, SIZE) for name in ("generation", "layers", "experts", "tiles")),
        *(
            (name, SIZE)
            for name in ("layer_bytes", "expert_bytes", "tile_bytes", "head_stride", "head_bytes")
        ),
        *((name, POINTER) for name in ("ticks", "memory")),
        *((name, SIZE) for name in ("memory_bytes", "needed")),
    )


class TallyNumbers(ctypes.Structure):
    _fields_ = (
        ("mass", ctypes.c_double),
        ("left", ctypes.c_double),
        ("kept", SIZE),
        ("channels", SIZE),
    )


def checked(fault: int) -> None:
    """Raises IndexError if a function has refused the numbers in its arrays."""
    if fault:
        raise IndexError(FAULTS[fault])


def typed(function: Any, *arguments: Any, result: Any = None) -> Any:
    """A C function with the types of its arguments and of its result: `checked` for one that can
    refuse its arrays."""
    function.argtypes, function.restype = arguments, result
    return function
