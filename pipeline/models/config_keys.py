"""Typed reads of config.json: a key is required or has a default; unsupported variants are refused by name,
in a ModelError of one line that begins with `config.json:`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.errors import ModelError

Config = Mapping[str, Any]
MAX_INT, MAX_FLOAT = 1 << 31, 1e38  # beyond them, computing with it fails
MAX_SHOWN = 80  # characters of a value in an error


def required(config: Config, key: str, kind: type[int] | type[float]) -> Any:
    """A positive number; an int is accepted as a float. JSON's may be NaN, infinite, or have any digits."""
    value = config.get(key)
    right_kind = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not right_kind or value is None or not 0 < value < (MAX_INT if kind is int else MAX_FLOAT):
        raise ModelError(f"config.json: {key} must be a positive {kind.__name__}, it is {shown(value)}")
    return value


def optional(
    config: Config, key: str, kind: type[int] | type[float], default: int | float | None = None
) -> Any:
    """A positive number; `default` where it is missing or null."""
    return default if config.get(key) is None else required(config, key, kind)


def non_negative(config: Config, key: str, default: float) -> float:
    """A number from 0 on; `default` where it is missing or null."""
    return 0.0 if config.get(key) == 0 else float(optional(config, key, float, default))


def count(config: Config, key: str, default: int) -> int:
    """A whole number from 0 on; `default` where it is missing or null."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MAX_INT:
        raise ModelError(f"config.json: {key} must be a whole number from 0 on, it is {shown(value)}")
    return value


def flag(config: Config, key: str, default: bool) -> bool:
    """True or false; `default` where it is missing or null."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {key} must be true or false, it is {shown(value)}")
    return value


def shown(value: object) -> str:
    """For an error: a value of any size, shortened."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def expect(config: Config, key: str, allowed: tuple[object, ...]) -> None:
    """Refuse unsupported variants: `key`, where present, must have one of these values."""
    if key in config and config[key] not in allowed:
        known = ", ".join(map(repr, allowed))
        raise ModelError(f"config.json: {key} = {shown(config[key])} is not supported (only {known})")
