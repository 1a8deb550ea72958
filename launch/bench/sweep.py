"""Combinations of the settings of `bench --sweep`, and their report: a table, a JSON object, a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Protocol

from rich.console import RenderableType

from launch.bench.report import SWEPT, Figures, show_tables
from launch.command_line.options import SETTINGS, Axis, Options, axes
from launch.terminal.plot import Panel, Series, draw
from launch.terminal.tables import Column, Table

HEADINGS = {"cache": "cache", "batch": "batch", "prompt": "prompt", "gen": "new"}
# What a plot's x axis can be.
ALONG = {"cache": "expert cache, share of all tiles", "batch": "batch, requests at once"}
ALONG |= {"prompt": "prompt, tokens", "gen": "new tokens of an answer"}
HEADING = 3  # lines of what all settings have in common, above a picture


class Compared(Protocol):
    """The report of one setting's policies, measured or replayed."""

    @property
    def figures(self) -> list[Figures]: ...

    @property
    def without(self) -> list[str]: ...

    @property
    def about(self) -> list[str]: ...

    def to_json(self) -> dict[str, Any]: ...

    def parts(self) -> Iterator[RenderableType]: ...


@dataclass(frozen=True)
class Point:
    """One combination of settings; without a report where it could not be measured, with the reason."""

    settings: dict[str, Any]
    report: Compared | None
    left_out: str = ""

    def __str__(self) -> str:
        return ", ".join(_words(self.settings))


def _setting(name: str) -> Column[Figures]:
    return Column(HEADINGS[name], lambda row: _word(row.settings[name]), text=True)


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _words(settings: dict[str, Any]) -> list[str]:
    return [f"{HEADINGS[name]} {_word(value)}" for name, value in settings.items()]


@dataclass
class SweepReport:
    """One table with a row for each policy and setting, or one JSON object with every setting's report."""

    axes: Sequence[Axis]
    points: list[Point] = field(default_factory=list)
    interrupted: bool = False

    @property
    def reports(self) -> list[Compared]:
        """The reports of the settings that were measured."""
        return [point.report for point in self.points if point.report is not None]

    @property
    def rows(self) -> list[Figures]:
        return [
            replace(row, settings=point.settings)
            for point in self.points
            if point.report is not None
            for row in point.report.figures
        ]

    @property
    def _swept(self) -> list[str]:
        return [axis.name for axis in self.axes if axis.is_setting]

    def to_json(self) -> dict[str, Any]:
        return {
            "sweep": {axis.name: [str(value) for value in axis.values] for axis in self.axes},
            "points": [
                {"settings": point.settings, **point.report.to_json()}
                for point in self.points
                if point.report
            ],
            "left_out": [
                {"settings": point.settings, "reason": point.left_out}
                for point in self.points
                if point.report is None
            ],
            "interrupted": self.interrupted,
        }

    def parts(self) -> Iterator[RenderableType]:
        """The report as text."""
        settings = [_setting(name) for name in self._swept]
        notes = [f"{point} left out: {point.left_out}" for point in self.points if point.report is None]
        notes += [line for report in self.reports for line in report.without]
        notes += ["interrupted; the settings above are those that were finished"] * self.interrupted
        several = any(len(report.figures) > 1 for report in self.reports)
        about = [*self.about, *["x: decode relative to the setting's first policy"] * several]
        return show_tables([Table([*settings, *SWEPT], self.rows, gap=0)], about, notes)

    @property
    def about(self) -> list[str]:
        """Returns what all settings have in common."""
        first, *others = [report.about for report in self.reports]
        return [line for line in first if all(line in lines for lines in others)]

    def draw(self, path: Path) -> None:
        """Write a picture with a line for each policy, and each combination of the other settings, over one
        swept setting; bars for each policy where no setting is swept. Raises OutputFailed."""
        swept = [axis.name for axis in self.axes if axis.is_setting and len(axis.values) > 1]
        along = next((name for name in swept if name in ALONG), "")
        others = [name for name in swept if name != along]
        figures: dict[str, Callable[[Figures], Sequence[float]]] = {
            "decode, tok/s": lambda row: row.decode,
            "prefill, tok/s": lambda row: row.prefill,
        }
        panels = [[self._panel(title, of, along, others)] for title, of in figures.items()]
        draw(path, panels, "\n".join(self.about[:HEADING]))

    def _panel(
        self, title: str, of: Callable[[Figures], Sequence[float]], along: str, others: Sequence[str]
    ) -> Panel:
        lines: dict[str, dict[Any, Sequence[float]]] = {}
        for row in self.rows:
            label = ", ".join([row.request.label, *_words({name: row.settings[name] for name in others})])
            line, place = (label, row.settings[along]) if along else ("", label.replace(" ", "\n"))
            lines.setdefault(line, {})[place] = of(row)
        return Panel(title, [Series(label, values) for label, values in lines.items()], ALONG.get(along, ""))


def combinations(options: Options) -> Iterator[tuple[dict[str, Any], Options]]:
    """Every combination of the swept settings, and the command line with it. Raises WrongUsage."""
    every = axes(options.written)
    swept = [axis for axis in every if axis.is_setting]
    # the policies' options stay: Options.policies makes further policies of them
    rest = [f"{axis.name}={','.join(axis.values)}" for axis in every if not axis.is_setting]
    for values in product(*(axis.values for axis in swept)):
        settings = {axis.name: value for axis, value in zip(swept, values, strict=True)}
        given = {SETTINGS[name]: value for name, value in settings.items()}
        yield settings, replace(options, written=options.written | given | {"sweep": rest})
