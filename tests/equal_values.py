"""Equality of values to the bit."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import numpy as np


def same(a: Any, b: Any) -> bool:
    """Equality of type and value everywhere inside, of arrays bit by bit; NaN equals NaN."""
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and all(
            same(getattr(a, name), getattr(b, name)) for name in a.__struct_fields__
        )
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(
            same(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a)
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))
