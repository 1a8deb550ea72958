"""The one plot module: pictures made of rows of panels, each of lines or of bars.

    panel = Panel(
        "decode, tok/s",
        [Series("fiddler", {1: [11.2, 11.9, 12.4], 8: [40.0, 41.5]}), Series("dali", {1: [14.0], 8: [50.0]})],
        along="batch, requests at once",
    )
    draw(path, [[panel]], "Mixtral-8x7B on cpu", "EPYC, 8 cores")

A series has values at each place: a number on the x axis of lines, the name of a row of bars. Of several
values the median is drawn, and their range as an error bar.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from launch.command_line.checks import check_new_file, check_packages
from launch.errors import OutputFailed, WrongUsage
from launch.terminal.format import alike
from launch.terminal.log import notice
from shm.atomic_file import SHARED, atomic_file

KINDS = (".png", ".svg", ".pdf")
MARKS = "osD^vP*X<>"
WIDE = 8.0  # places whose largest is so many times the least are drawn on a logarithmic axis
DPI = 150
ROW = 0.42  # inches of a bar and the space below it
LINES = 3.4  # inches of a panel of lines
MOST_TICKS = 16
SIZES = {"axes.titlesize": 9, "axes.labelsize": 8, "legend.fontsize": 7}
SIZES |= {f"{axis}tick.labelsize": 8 for axis in "xy"} | {"errorbar.capsize": 3}


@dataclass(frozen=True)
class Series:
    """A line, or the bars of a panel."""

    label: str
    values: Mapping[Any, Sequence[float]]


@dataclass(frozen=True)
class Panel:
    """`along`: the x axis of lines; without it, the bars of one series."""

    title: str
    series: Sequence[Series]
    along: str = ""

    @property
    def places(self) -> list[Any]:
        """Every place of the series, in their order."""
        return list(dict.fromkeys(place for series in self.series for place in series.values))


def check_picture(path: Path) -> None:
    """Raises WrongUsage unless a picture can be made there."""
    check_packages("--plot", "matplotlib")
    if path.suffix.lower() not in KINDS:
        kinds = f"{', '.join(KINDS[:-1])} or {KINDS[-1]}"
        raise WrongUsage(f"--plot {path}: a picture's name ends in {kinds}")
    check_new_file("--plot", path)


def draw(path: Path, rows: Sequence[Sequence[Panel]], heading: str) -> None:
    """Write a picture of the panels, whole or not at all. The panels of a row have one y axis. Raises
    OutputFailed."""
    import matplotlib  # here, because it takes a second

    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # on its first use it logs a search for fonts
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = max(map(len, rows))
    heights = [max(LINES if panel.along else 1.5 + ROW * len(panel.places) for panel in row) for row in rows]
    with pyplot.style.context(["seaborn-v0_8-whitegrid", SIZES]):
        figure, grid = pyplot.subplots(
            len(rows),
            columns,
            sharey="row",
            squeeze=False,
            figsize=(2.0 + 3.8 * columns, 1.0 + sum(heights)),
            height_ratios=heights,
            layout="constrained",
        )
        for line, panels in zip(grid, rows, strict=True):
            for axes, panel in zip_longest(line, panels):
                if panel is None:
                    axes.set_axis_off()
                    continue
                (_lines if panel.along else _bars)(axes, panel)
                axes.set_title(panel.title)
                if any(series.label for series in panel.series):
                    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16 if panel.along else -0.1)}
                    axes.legend(ncols=2, handlelength=1.2, **place)
        figure.suptitle(heading, fontsize=10, x=0.01, ha="left")
        try:
            with atomic_file(path, SHARED) as file:
                figure.savefig(file, format=path.suffix[1:].lower(), dpi=DPI)
        except OSError as e:
            raise OutputFailed(f"{path}: {e.strerror}") from e
        finally:
            pyplot.close(figure)
    notice(f"wrote {path}")


def _middle(values: Sequence[Sequence[float]]) -> tuple[list[float], list[list[float]] | None]:
    """Returns medians, and their distances to the least and the most; None where every range is a point."""
    middle = [median(each) for each in values]
    below = [m - min(each) for m, each in zip(middle, values, strict=True)]
    above = [max(each) - m for m, each in zip(middle, values, strict=True)]
    return middle, [below, above] if any(below + above) else None


def _lines(axes: Any, panel: Panel) -> None:
    for i, series in enumerate(panel.series):
        places = sorted(series.values)
        middle, errors = _middle([series.values[place] for place in places])
        mark = MARKS[i % len(MARKS)]
        axes.errorbar(places, middle, yerr=errors, label=series.label, marker=mark, ms=4, lw=1.4)
    ticks = sorted(panel.places)
    if ticks[0] > 0 and ticks[-1] >= WIDE * ticks[0]:
        axes.set_xscale("log", base=2)
    if len(ticks) <= MOST_TICKS:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(panel.along)
    axes.grid(axis="x", visible=False)


def _bars(axes: Any, panel: Panel) -> None:
    places = [str(place) for place in panel.places]
    middle, errors = _middle([panel.series[0].values[place] for place in panel.places])
    bars = axes.barh(places, middle, xerr=errors, height=0.6)
    axes.bar_label(bars, alike(middle), padding=4, fontsize=8)
    axes.set_xlim(0, 1.25 * axes.dataLim.x1 or 1.0)
    axes.set_ylim(len(places) - 0.5, -0.5)  # the first place above
    axes.grid(axis="y", visible=False)
