"""Reading a config.json: every key is required or has its default, and a variant that nobody has implemented
is refused by name at the start instead of giving wrong text.

Each refusal is a ModelError of one line that begins with `config.json:`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pipeline.errors import ModelError

Config = Mapping[str, Any]


def required(config: Config, key: str, kind: type[int] | type[float]) -> Any:
    """A number the config must have; an int is accepted for a float."""
    value = config.get(key)
    right_kind = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not right_kind or value is None or not 0 < value < math.inf:  # JSON may hold NaN and Infinity
        raise ModelError(f"config.json: {key} must be a positive {kind.__name__}, it is {value!r}")
    return value


def optional(config: Config, key: str, kind: type[int] | type[float]) -> Any:
    """A number that may be missing or null, which is None here; otherwise as `required`."""
    return None if config.get(key) is None else required(config, key, kind)


def from_zero(config: Config, key: str, default: float) -> float:
    """A number that may be 0, and `default` where it is missing or null."""
    return 0.0 if config.get(key) == 0 else float(optional(config, key, float) or default)


def count(config: Config, key: str, default: int) -> int:
    """A whole number from 0 on."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ModelError(f"config.json: {key} must be a whole number from 0 on, it is {value!r}")
    return value


def flag(config: Config, key: str, default: bool) -> bool:
    """True or false."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {key} must be true or false, it is {value!r}")
    return value


def expect(config: Config, key: str, allowed: tuple[object, ...]) -> None:
    """Refuse a variant: `key`, where present, must have one of these values."""
    if key in config and config[key] not in allowed:
        raise ModelError(
            f"config.json: {key} = {config[key]!r} is not supported (only {', '.join(map(repr, allowed))})"
        )
