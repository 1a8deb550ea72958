"""The options that presets and parts declare, and the reading of their values from text.

A class that declares options takes each of them by keyword, already parsed; defaults are defined here and
nowhere else.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, nan

from pipeline.errors import PolicyError

AUTO = "auto"


@dataclass(frozen=True)
class Choice:
    """An option with a few words as values."""

    name: str
    help: str
    default: str
    choices: tuple[str, ...]

    @property
    def values(self) -> str:
        """The accepted values, as text for messages."""
        return "|".join(self.choices)

    def parse(self, text: str) -> str:
        """The value. Raises PolicyError, without the policy's name, for any other text."""
        if text not in self.choices:
            near = did_you_mean(text, self.choices)
            raise PolicyError(f"{self.name}={text[:40]!r} must be {self.values}{near}")
        return text


PAUSE = Choice(
    name="pause",
    help="0: prefetching never pauses, also where few of its tiles are used",
    default="1",
    choices=("1", "0"),
)


@dataclass(frozen=True)
class Number:
    """An option that is a number from `low` to `high`."""

    name: str
    help: str
    default: float | None  # None: derived from the model, see `help`
    low: float
    high: float
    whole: bool = True
    auto: bool = False  # whether AUTO is a value too: what a calibration found

    @property
    def values(self) -> str:
        return f"{self.low}..{self.high}" + f" or {AUTO}" * self.auto

    def parse(self, text: str) -> float | str:
        """The value, an int if `whole`. Raises PolicyError as `Choice.parse`."""
        if self.auto and text == AUTO:
            return text
        try:
            # int() and float() would also take "1_000" and other alphabets' digits
            plain = text if text.isascii() and "_" not in text else ""
            value = int(plain) if self.whole else float(plain)
        except ValueError:
            value = nan
        if not isfinite(value):
            kind = "a whole number" if self.whole else "a number"
            raise PolicyError(f"{self.name}={text[:40]!r} must be {kind}, {self.values}")
        if not self.low <= value <= self.high:
            raise PolicyError(f"{self.name}={value:g} must be in {self.values}")
        return value


SEED = Number("seed", "the seed of all draws; by default the engine's --seed", None, 0, 2**63 - 1)
Option = Choice | Number
MAX_VALUE = 64  # characters of a value: it is kept, shown and given to every restarted coordinator
Value = str | int | float | None


def parse_options(
    preset: str, options: Iterable[Option], given: Mapping[str, object], seed: int
) -> dict[str, Value]:
    """Every declared option's value: the given text read, or the default. `seed` is the engine's.

    Raises PolicyError naming the preset and the reason, or the nearest option or value.
    """
    declared = {option.name: option for option in options}
    for name in given:
        if name not in declared:
            near = did_you_mean(name, declared)
            has = f"it has {', '.join(declared) or 'none'}"
            raise PolicyError(f"policy {preset} has no option {name[:40]!r}{near} ({has})")
    values: dict[str, Value] = {}
    for name, option in declared.items():
        default = seed if option is SEED else option.default
        if name not in given and default is None:
            values[name] = None
            continue
        # a client may have sent any type, and the engine's seed may be outside this option's range
        text = str(given.get(name, default))
        try:
            if len(text) > MAX_VALUE:
                raise PolicyError(f"{name}={text[:40]!r}... is too long; it must be {option.values}")
            values[name] = option.parse(text)
        except PolicyError as error:
            raise PolicyError(f"policy {preset}: {error}") from None
    return values


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The nearest known names as the middle of a sentence; empty where no name is near."""
    near = difflib.get_close_matches(word[:40], list(known), n=2, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""
