"""`launch.py bench --sweep`: `bench` for every combination of swept settings. Options of policies are further
policies of each comparison; the other settings are comparisons one after the other, in one engine as long as
the expert cache keeps its size. What was measured before a Ctrl-C or a failure is shown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any, Protocol

from rich.console import RenderableType

from launch.bench.command import check, compare, session
from launch.bench.plan import WARM_UP_NEW, WARM_UP_PROMPT, BenchPlan
from launch.bench.report import SWEPT, Figures, show_tables
from launch.command_line.options import SETTINGS, Axis, Options, axes
from launch.errors import WrongUsage
from launch.terminal.format import count
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import notice
from launch.terminal.output import print_json
from launch.terminal.plot import Panel, Series, draw
from launch.terminal.progress import ProgressCounter
from launch.terminal.tables import Column, Table, print_parts
from pipeline.config import KV_BLOCK, EngineConfig
from protocol.errors import RequestFailed

HEADINGS = {"cache": "cache", "batch": "batch", "prompt": "prompt", "gen": "new", "costs": "costs"}
# What a plot's x axis can be.
ALONG = {"cache": "expert cache, share of all tiles", "batch": "batch, requests at once"}
ALONG |= {"prompt": "prompt, tokens", "gen": "new tokens of an answer"}


class Compared(Protocol):
    """The report of one setting's policies, measured or replayed."""

    @property
    def figures(self) -> list[Figures]: ...

    @property
    def without(self) -> list[str]: ...

    def conditions(self, swept: Sequence[str]) -> list[str]: ...

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Point:
    """One combination of settings; without a report where it could not be measured, with the reason."""

    settings: dict[str, Any]
    report: Compared | None
    left_out: str = ""

    def plain(self) -> dict[str, Any]:
        """The settings for JSON: paths as text."""
        return {name: v if isinstance(v, int | float) else str(v) for name, v in self.settings.items()}

    def __str__(self) -> str:
        return ", ".join(f"{HEADINGS[name]} {_word(value)}" for name, value in self.settings.items())


def _setting(name: str) -> Column[Figures]:
    return Column(HEADINGS[name], lambda row: _word(row.settings[name]), text=True)


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


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
                {"settings": point.plain(), **point.report.to_json()} for point in self.points if point.report
            ],
            "left_out": [
                {"settings": point.plain(), "reason": point.left_out}
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
        about = [*self.reports[0].conditions(self._swept), "x: decode relative to the setting's first policy"]
        return show_tables([Table([*settings, *SWEPT], self.rows, gap=0)], about, notes)

    def draw(self, path: Path) -> None:
        """Write a picture with a line for each policy over one swept setting, and a column of panels for each
        combination of the others; bars for each policy where no setting is swept. Raises OutputFailed."""
        swept = [axis.name for axis in self.axes if axis.is_setting and len(axis.values) > 1]
        along = next((name for name in swept if name in ALONG), "")
        others = [name for name in swept if name != along]
        every = [{name: row.settings[name] for name in others} for row in self.rows]
        facets = [facet for i, facet in enumerate(every) if facet not in every[:i]]
        figures: dict[str, Callable[[Figures], Sequence[float]]] = {
            "decode, tok/s": lambda row: row.decode,
            "prefill, tok/s": lambda row: row.prefill,
        }
        panels = [[self._panel(title, of, along, facet) for facet in facets] for title, of in figures.items()]
        draw(path, panels, "\n".join(self.reports[0].conditions(self._swept)))

    def _panel(
        self, title: str, of: Callable[[Figures], Sequence[float]], along: str, facet: dict[str, Any]
    ) -> Panel:
        where = ", ".join(f"{HEADINGS[name]} {_word(value)}" for name, value in facet.items())
        lines: dict[str, dict[Any, Sequence[float]]] = {}
        for row in self.rows:
            if facet.items() <= row.settings.items():
                label = row.request.label
                line, place = (label, row.settings[along]) if along else ("", label.replace(" ", "\n"))
                lines.setdefault(line, {})[place] = of(row)
        series = [Series(label, values) for label, values in lines.items()]
        return Panel(f"{title}{': ' * bool(where)}{where}", series, ALONG.get(along, ""))


@dataclass(frozen=True)
class Comparison:
    """One combination of settings; `options`: the command line with them instead of --sweep."""

    settings: dict[str, Any]
    options: Options
    plan: BenchPlan


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


def comparisons(options: Options) -> list[Comparison]:
    """All, with an engine that is large enough for each. Raises WrongUsage; UsageError as BenchPlan.of."""
    pairs = list(combinations(options))
    if not options.connect:
        pairs = _in_one_size(pairs)
    # perplexities, unless asked for: they would take most of the time
    pairs = [(of, replace(o, written={"ppl_tokens": 0} | o.written)) for of, o in pairs]
    return [Comparison(of, each, BenchPlan.of(each)) for of, each in pairs]


def _in_one_size(pairs: Sequence[tuple[dict[str, Any], Options]]) -> list[tuple[dict[str, Any], Options]]:
    """Give every batch and length the same engine, so that only the cache's size needs another one."""
    written = [options.written for _, options in pairs]
    batches = [given.get("batch", 1) for given in written]
    longest = [
        max(given.get("prompt_len", 128) + given.get("gen_len", 64), WARM_UP_PROMPT + WARM_UP_NEW)
        for given in written
    ]
    size: dict[str, Any] = {"max_sequences": max(EngineConfig.max_sequences, *batches)}
    if max(batches) > EngineConfig.max_sequences:
        blocks = max(b * -(-tokens // KV_BLOCK) for b, tokens in zip(batches, longest, strict=True))
        size["kv_tokens"] = blocks * KV_BLOCK
    return [(of, replace(options, written=size | options.written)) for of, options in pairs]


async def sweep(options: Options, interrupts: Interrupts) -> int:
    """Run `bench` once for each combination of settings, and print one report. Raises as `bench`."""
    every = comparisons(options)
    caches = [list(group) for _, group in groupby(every, key=lambda each: each.settings.get("cache"))]
    runs = sum(each.plan.runs for each in every)
    policies, rounds = len(every[0].plan.policies), every[0].plan.rounds
    notice(
        f"sweep: {count(len(every), 'setting')} x {policies} policies x {rounds + 1} rounds = {runs} runs"
        + (f", {count(len(caches), 'engine')} one after the other" if len(caches) > 1 else "")
    )
    report = SweepReport(axes(options.written))
    bar = ProgressCounter("sweep", runs)
    try:
        for group in caches:
            async with session(group[0].options, interrupts) as (client, changes):
                for each in group:
                    where = f"{len(report.points) + 1}/{len(every)} {Point(each.settings, None)}: "
                    try:
                        with bar:
                            await check(client, each.plan)
                            compared = await compare(client, each.plan, each.options, changes, bar, where)
                    except (WrongUsage, RequestFailed) as e:
                        if isinstance(e, RequestFailed) and not e.usage:
                            raise
                        report.points.append(Point(each.settings, None, str(e)))
                        continue
                    report.points.append(Point(each.settings, compared))
    except (Exception, asyncio.CancelledError):
        report.interrupted = True
        if report.reports:
            _show(report, options)
        raise
    if not report.reports:
        raise WrongUsage(f"no setting can be measured: {report.points[0].left_out}")
    _show(report, options)
    if every[0].plan.plot is not None:
        report.draw(every[0].plan.plot)
    return 0


def _show(report: SweepReport, options: Options) -> None:
    if "json" in options.written:
        print_json(report.to_json())
    else:
        print_parts(*report.parts())
