"""Names and numbers as the commands print them. Byte counts are formatted by `shm.segment.byte_size`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from pipeline.assets import model_dir
from pipeline.models.shapes import short_name

MISSING = "-"  # where a figure was not measured, or is a share of nothing
WIDTH = 5  # digits of a column's largest figure, of which decimals take what is left


def model_name(model: str, article: str = "the ") -> str:
    """Returns the last part of a model's path; "the embedded model"."""
    return f"{article}embedded model" if model == str(model_dir()) else short_name(model)


def distinct_names(models: Iterable[str]) -> dict[str, str]:
    """Returns the `model_name` of each; of folders with the same name the whole path. A name without a
    folder, as a calibration has, stays as it is."""
    names = {model: model_name(model) for model in models}
    counts = Counter(name for model, name in names.items() if model != name)
    return {model: model if counts[name] > 1 else name for model, name in names.items()}


def rate(bytes_a_second: float) -> str:
    """Returns a measured pace with three digits: "23.1 GB/s"."""
    return f"{bytes_a_second / 1e9:.3g} GB/s"


def percent(share: float | None, digits: int = 0) -> str:
    """Returns a share of 1 as "37%". 0% and 100% are exact: a share that only rounds to them is "<1%" or
    ">99%"."""
    if share is None:
        return MISSING
    least = 10.0**-digits  # percent
    value = 100 * share
    if abs(value) < 1e-9:  # a difference that only rounding left, and no "-0%"
        value = 0.0
    if 0 < value < least / 2:
        return f"<{least:g}%"
    if 100 - least / 2 <= value < 100:
        return f">{100 - least:g}%"
    return f"{value:.{digits}f}%"


def three_digits(value: float) -> str:
    """Returns a measured figure for a narrow column: 0, 0.123, 12.3, 1234, 12.3k."""
    if value == 0:
        return "0"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.3g}k"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def alike(values: Sequence[float]) -> list[str]:
    """Returns the figures of one column with the same number of decimals: two digits of the smallest, three
    of the largest, as far as the largest has at most WIDTH digits. 0 is exact: a smaller figure is
    "<0.01"."""
    sizes = [abs(value) for value in values if value]
    if not sizes:
        return [f"{value:.0f}" for value in values]
    before = [math.floor(math.log10(size)) + 1 for size in (min(sizes), max(sizes))]
    decimals = min(max(2 - before[0], 3 - before[1], 0), max(WIDTH - max(before[1], 1), 0), 3)
    least = 10.0**-decimals
    return [f"<{least:g}" if 0 < value <= least / 2 else f"{value:.{decimals}f}" for value in values]


def count(number: int, noun: str) -> str:
    """ "1 round", "2 rounds"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def merged_notes(noted: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Returns the notes of policies, by each one's name. A note that differs only in the policy's name before
    it comes once, after the names of all its policies."""
    names: dict[tuple[bool, str], list[str]] = {}
    for name, notes in noted:
        for note in notes:
            text = note.removeprefix(f"{name}: ")
            names.setdefault((text != note, text), []).append(name)
    return [", ".join(of) + f": {text}" if named else text for (named, text), of in names.items()]
