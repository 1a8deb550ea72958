"""The options that presets and parts declare, and the reading of their values from text.

A class that declares options takes each of them by keyword, already parsed; defaults are defined here and
nowhere else.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite

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
class Whole:
    """An option that is a whole number from `low` to `high`."""

    name: str
    help: str
    default: int | None  # None: derived from the model's shape, see `help`
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


@dataclass(frozen=True)
class Seed(Whole):
    """The seed of a part's random draws; by default the engine's seed."""

    name: str = "seed"
    help: str = "the seed of all draws; by default the engine's --seed"
    default: int | None = None
    low: int = 0
    high: int = 2**63 - 1


@dataclass(frozen=True)
class Real:
    """An option that is a number from `low` to `high`."""

    name: str
    help: str
    default: float | None  # None: derived from the calibration, see `help`
    low: float
    high: float
    auto: bool = False  # whether AUTO is a value too: what a calibration found

    @property
    def values(self) -> str:
        return f"{self.low:g}..{self.high:g}" + f" or {AUTO}" * self.auto

    def parse(self, text: str) -> float | str:
        if self.auto and text == AUTO:
            return text
        try:
            # float() would also take "1_000" and other alphabets' digits
            value = float(text) if text.isascii() and "_" not in text else float("nan")
        except ValueError:
            value = float("nan")
        if not isfinite(value):
            raise PolicyError(f"{self.name}={text[:40]!r} must be a number, {self.values}")
        if not self.low <= value <= self.high:
            raise PolicyError(f"{self.name}={value:g} must be in {self.values}")
        return value


Option = Choice | Whole | Real
MAX_VALUE = 64  # characters of a value: it is kept, shown and given to every restarted coordinator
Value = str | int | float | None


def parse_options(
    preset: str,
    options: Iterable[Option],
    given: Mapping[str, object],
    seed: int,
    why_not: Callable[[str], str],
) -> dict[str, Value]:
    """Every declared option's value: the given text read, or the default. `seed` is the engine's; `why_not`:
    the reason why the preset does not have an option of this name, "" for an unknown one.

    Raises PolicyError naming the preset and the reason, or the nearest option or value.
    """
    declared = {option.name: option for option in options}
    for name in given:
        if name not in declared:
            why, near = why_not(name), did_you_mean(name, declared)
            has = f"it has {', '.join(declared) or 'none'}"
            raise PolicyError(
                f"policy {preset} has no option {name[:40]!r}" + (f" ({why})" if why else f"{near} ({has})")
            )
    values: dict[str, Value] = {}
    for name, option in declared.items():
        default = seed if isinstance(option, Seed) else option.default
        if name not in given and default is None:
            values[name] = None
            continue
        # a client may have sent any type, and the engine's seed may be outside this option's range
        text = str(given.get(name, default))
        try:
            values[name] = option.parse(text)
            if len(text) > MAX_VALUE:  # digits or spaces without a meaning
                raise PolicyError(f"{name}={text[:40]!r}... is too long; it must be {option.values}")
        except PolicyError as error:
            raise PolicyError(f"policy {preset}: {error}") from None
    return values


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The nearest known names as the middle of a sentence; empty where no name is near."""
    near = difflib.get_close_matches(word[:40], list(known), n=2, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""
