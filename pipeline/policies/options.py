"""The options that a preset declares, and the reading of their values from text.

A preset is a `Policy` with a list of options. Its constructor takes each of them by keyword, already
checked; defaults live here and nowhere else.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from pipeline.errors import PolicyError
from pipeline.policies.view import Policy


@dataclass(frozen=True)
class Choice:
    """An option that is one of a few words."""

    name: str
    help: str
    default: str
    choices: tuple[str, ...]

    @property
    def values(self) -> str:
        """What may be given, for a person."""
        return "|".join(self.choices)

    def parse(self, text: str) -> str:
        """The value. Raises PolicyError, without the policy's name, for any other text."""
        if text not in self.choices:
            near = did_you_mean(text, self.choices)
            raise PolicyError(f"{self.name}={text[:40]!r} must be {self.values}{near}")
        return text


@dataclass(frozen=True)
class Whole:
    """An option that is a whole number from `low` to `high`."""

    name: str
    help: str
    default: int | None  # None: the engine's seed
    low: int
    high: int

    @property
    def values(self) -> str:
        return f"{self.low}..{self.high}"

    def parse(self, text: str) -> int:
        digits = text.strip()
        # int() alone would also take "1_000" and other alphabets' digits, and refuse very long ones oddly
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 20):
            raise PolicyError(f"{self.name}={text[:40]!r} must be a whole number, {self.values}")
        value = int(digits)
        if not self.low <= value <= self.high:
            raise PolicyError(f"{self.name}={value} must be in {self.values}")
        return value


Option = Choice | Whole


class Preset(Policy):
    """A policy with a name in the table of presets and declared options."""

    options: ClassVar[tuple[Option, ...]] = ()


def parse_options(preset: type[Preset], given: Mapping[str, str], seed: int) -> dict[str, str | int]:
    """Every declared option's value: the given text read, or the default. `seed` is the engine's.

    Raises PolicyError naming the preset and the nearest option or value.
    """
    declared = {option.name: option for option in preset.options}
    for name in given:
        if name not in declared:
            known = f"it has {', '.join(declared)}" if declared else "it has none"
            raise PolicyError(
                f"policy {preset.name} has no option {name[:40]!r}{did_you_mean(name, declared)} ({known})"
            )
    values: dict[str, str | int] = {}
    for name, option in declared.items():
        try:
            default = seed if option.default is None else option.default
            # a client may have sent any type, and the engine's seed may be outside this option's range
            values[name] = option.parse(str(given.get(name, default)))
        except PolicyError as error:
            raise PolicyError(f"policy {preset.name}: {error}") from None
    return values


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The nearest known names as the middle of a sentence, or nothing where none is near."""
    near = difflib.get_close_matches(word[:40], list(known), n=2, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""
