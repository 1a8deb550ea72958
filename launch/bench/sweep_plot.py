"""`bench --sweep --plot`: a line for each policy over one swept setting, a column of panels for each
combination of the others; bars for each policy where no setting is swept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from launch.bench.plot import FAINT, INK, SPEED, save, tidy
from launch.bench.sweep_report import HEADINGS, Row, SweepReport
from pipeline.policies.view import PolicyRequest

WORDS = {"cache": "expert cache, share of all tiles", "batch": "batch, requests at once"}
WORDS |= {"prompt": "prompt, tokens", "gen": "new tokens of an answer"}
MARKS = "osD^vP*X<>"
WIDE = 8.0  # a largest value so many times the least is drawn on a logarithmic axis


def draw_sweep(report: SweepReport, path: Path) -> None:
    """Write the picture, whole or not at all. Raises OutputFailed."""
    import matplotlib  # here, because it takes a second

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = report.rows
    swept = [axis.name for axis in report.axes if axis.is_setting and len(axis.values) > 1]
    along = next((name for name in swept if name in WORDS), "")
    others = [name for name in swept if name != along]
    panels = list(dict.fromkeys(tuple((name, row.settings[name]) for name in others) for row in rows))
    figures: dict[str, Callable[[Row], Sequence[float]]] = {
        "decode, tok/s": lambda row: row.decode,
        "prefill, tok/s": lambda row: row.prefill,
    }
    if rows[0].joules:
        figures["decode, J/token"] = lambda row: row.joules
    policies = [PolicyRequest(*pair) for pair in _distinct(rows)]
    with pyplot.style.context("default"):
        figure, grid = pyplot.subplots(
            len(figures),
            len(panels),
            sharey="row",
            squeeze=False,
            figsize=(2.5 + 4.0 * len(panels), 3.6 * len(figures)),
            layout="constrained",
        )
        for line, (title, of) in zip(grid, figures.items(), strict=True):
            for axes, panel in zip(line, panels, strict=True):
                here = [row for row in rows if all(row.settings[name] == value for name, value in panel)]
                if along:
                    _lines(axes, along, policies, here, of)
                else:
                    _bars(axes, policies, here, of)
                where = ", ".join(f"{HEADINGS[name]} {value}" for name, value in panel)
                axes.set_title(f"{title}{': ' * bool(where)}{where}")
                tidy(axes, grid="y")
            line[0].set_ylim(bottom=0)  # of the whole line, once all of its values are there
        if along:
            handles, labels = grid[0][0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower left", ncols=4, fontsize=8, frameon=False)
        spread = "median; error bars: least and most of the rounds" if not report.replayed else "simulated"
        figure.suptitle("\n".join([*report.conditions, spread]), fontsize=9, color=INK, x=0.01, ha="left")
        save(figure, path)


def _distinct(rows: Sequence[Row]) -> list[tuple[str, dict[str, str]]]:
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for row in rows:
        found.setdefault(row.request.label, (row.request.name, row.request.options))
    return list(found.values())


def _errors(values: Sequence[Sequence[float]]) -> tuple[list[float], list[list[float]]]:
    """Medians, and the distances to the least and the most."""
    middle = [median(each) for each in values]
    below = [m - min(each) for m, each in zip(middle, values, strict=True)]
    return middle, [below, [max(each) - m for m, each in zip(middle, values, strict=True)]]


def _lines(
    axes: Any,
    along: str,
    policies: Sequence[PolicyRequest],
    rows: Sequence[Row],
    of: Callable[[Row], Sequence[float]],
) -> None:
    ticks = sorted({row.settings[along] for row in rows})
    for i, policy in enumerate(policies):
        mine = sorted(
            (row for row in rows if row.request == policy), key=lambda row: float(row.settings[along])
        )
        middle, errors = _errors([of(row) for row in mine])
        x = [row.settings[along] for row in mine]
        axes.errorbar(
            x, middle, yerr=errors, label=policy.label, marker=MARKS[i % len(MARKS)], ms=5, lw=1.4, capsize=3
        )
    if ticks and ticks[0] > 0 and ticks[-1] >= WIDE * ticks[0]:
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(WORDS[along], fontsize=8, color=FAINT)


def _bars(
    axes: Any,
    policies: Sequence[PolicyRequest],
    rows: Sequence[Row],
    of: Callable[[Row], Sequence[float]],
) -> None:
    shown = [row for policy in policies for row in rows if row.request == policy]
    middle, errors = _errors([of(row) for row in shown])
    axes.bar(range(len(shown)), middle, yerr=errors, color=SPEED, width=0.6, ecolor=INK, capsize=3)
    axes.set_xticks(range(len(shown)), [row.request.label.replace(" ", "\n") for row in shown])
