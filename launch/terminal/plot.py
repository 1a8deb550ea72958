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
from dataclasses import dataclass, field
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
INK, FAINT, BLUE = "#333333", "#999999", "#3b6ea5"
MARKS = "osD^vP*X<>"
WIDE = 8.0  # places whose largest is so many times the least are drawn on a logarithmic axis
DPI = 150
ROW = 0.42  # inches of a bar and the space below it
LINES = 3.4  # inches of a panel of lines
MOST_TICKS = 16


@dataclass(frozen=True)
class Series:
    """`color`: of bars and lines; by default lines take the next of matplotlib's, bars are blue."""

    label: str
    values: Mapping[Any, Sequence[float]]
    color: str | None = None


@dataclass(frozen=True)
class Panel:
    """`along`: the x axis of lines; without it, bars: those of several series one behind the other. `words`:
    what stands behind each row's bars in place of their sum. `end`: of the axis with the values, by default
    their largest. `mark`: a place on the x axis of lines, and what it is."""

    title: str
    series: Sequence[Series]
    along: str = ""
    words: Mapping[Any, str] = field(default_factory=dict)
    end: float | None = None
    mark: tuple[float, str] | None = None

    @property
    def places(self) -> list[Any]:
        """Every place of the series, in their order."""
        return list(dict.fromkeys(place for series in self.series for place in series.values))

    @property
    def most(self) -> float:
        """The largest value."""
        return max(max(values) for series in self.series for values in series.values.values())


def check_picture(path: Path) -> None:
    """Raises WrongUsage unless a picture can be made there."""
    check_packages("--plot", "matplotlib")
    if path.suffix.lower() not in KINDS:
        kinds = f"{', '.join(KINDS[:-1])} or {KINDS[-1]}"
        raise WrongUsage(f"--plot {path}: a picture's name ends in {kinds}")
    check_new_file("--plot", path)


def draw(
    path: Path, rows: Sequence[Sequence[Panel]], heading: str, footnote: str = "", shared: bool = True
) -> None:
    """Write a picture of the panels, whole or not at all. `shared`: the panels of a row have one y axis.
    Raises OutputFailed."""
    import matplotlib  # here, because it takes a second

    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # on its first use it logs a search for fonts
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = max(map(len, rows))
    heights = [max(map(_height, panels)) for panels in rows]
    with pyplot.style.context("default"):
        figure, grid = pyplot.subplots(
            len(rows),
            columns,
            sharey="row" if shared else "none",
            squeeze=False,
            figsize=(2.0 + 3.8 * columns, 1.0 + sum(heights)),
            height_ratios=heights,
            layout="constrained",
        )
        for line, panels in zip(grid, rows, strict=True):
            most = max(panel.most for panel in panels)
            for axes, panel in zip_longest(line, panels):
                if panel is None:
                    axes.set_axis_off()
                elif panel.along:
                    _lines(axes, panel, most if shared else panel.most)
                else:
                    _bars(axes, panel)
        figure.suptitle(heading, fontsize=10, color=INK, x=0.01, ha="left")
        layout: Any = figure.get_layout_engine()
        layout.set(rect=(0, 0.03, 1, 0.97), w_pad=0.12, h_pad=0.08)
        figure.text(0.01, 0.008, footnote, fontsize=7.5, color=FAINT, va="bottom")
        try:
            with atomic_file(path, SHARED) as file:
                figure.savefig(file, format=path.suffix[1:].lower(), dpi=DPI)
        except OSError as e:
            raise OutputFailed(f"{path}: {e.strerror}") from e
        finally:
            pyplot.close(figure)
    notice(f"wrote {path}")


def _height(panel: Panel) -> float:
    return LINES if panel.along else 1.5 + ROW * len(panel.places)


def _middle(values: Sequence[Sequence[float]]) -> tuple[list[float], list[list[float]] | None]:
    """Medians, and their distances to the least and the most; None where every range is a point."""
    middle = [median(each) for each in values]
    below = [m - min(each) for m, each in zip(middle, values, strict=True)]
    above = [max(each) - m for m, each in zip(middle, values, strict=True)]
    return middle, [below, above] if any(below + above) else None


def _lines(axes: Any, panel: Panel, most: float) -> None:
    for i, series in enumerate(panel.series):
        places = sorted(series.values)
        middle, errors = _middle([series.values[place] for place in places])
        style = {"marker": MARKS[i % len(MARKS)], "ms": 4, "lw": 1.4, "capsize": 3, "color": series.color}
        axes.errorbar(places, middle, yerr=errors, label=series.label, **style)
    ticks = sorted(panel.places)
    if ticks[0] > 0 and ticks[-1] >= WIDE * ticks[0]:
        axes.set_xscale("log", base=2)
    step = -(-len(ticks) // MOST_TICKS)
    axes.set_xticks(ticks[::step], [f"{tick:g}" for tick in ticks[::step]])
    axes.minorticks_off()
    if panel.mark is not None:
        at, words = panel.mark
        axes.axvline(at, color=FAINT, lw=1, ls=":")
        axes.text(at, 0, f" {words}", color=FAINT, fontsize=8, rotation=90, va="bottom")
    axes.set_ylim(0, panel.end or 1.08 * most or 1.0)
    axes.set_xlabel(panel.along, fontsize=8, color=FAINT)
    _tidy(axes, panel, "y")


def _bars(axes: Any, panel: Panel) -> None:
    places = panel.places
    ends = [0.0] * len(places)
    furthest = ends  # of bars and their error bars
    for series in panel.series:
        middle, errors = _middle([series.values.get(place, (0.0,)) for place in places])
        if any(middle):
            style = {"color": series.color or BLUE, "height": 0.6, "ecolor": INK, "capsize": 2}
            axes.barh(range(len(places)), middle, left=ends, xerr=errors, label=series.label, **style)
        ends = [end + value for end, value in zip(ends, middle, strict=True)]
        furthest = ends if errors is None else [end + more for end, more in zip(ends, errors[1], strict=True)]
    for row, (place, figure) in enumerate(zip(places, alike(ends), strict=True)):
        place_of = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
        words = panel.words.get(place, figure)
        axes.annotate(words, (furthest[row], row), fontsize=8, color=INK, **place_of)
    most = max(furthest)
    axes.set_xlim(0, panel.end or 1.25 * most or 1.0)
    axes.set_yticks(range(len(places)), places)
    axes.set_ylim(len(places) - 0.5, -0.5)
    _tidy(axes, panel, "x")


def _tidy(axes: Any, panel: Panel, grid: str) -> None:
    """The style of all panels; `grid`: the axis with values."""
    axes.set_title(panel.title, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=INK, length=0)
    axes.grid(axis=grid, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color(FAINT)
    if any(series.label for series in panel.series) and (panel.along or len(panel.series) > 1):
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16 if panel.along else -0.1)}
        axes.legend(ncols=2, fontsize=7, frameon=False, handlelength=1.2, **place)
