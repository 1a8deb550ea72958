"""The report of a sweep, of engines or of a trace: one table with a row for each policy and setting, or one
JSON object with the whole report of each setting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from launch.bench.energy_table import energy_legend
from launch.bench.profile_table import policy_name, spreads
from launch.bench.replay_report import Report as ReplayReport
from launch.bench.report import Report, warmed
from launch.bench.result import PolicyResult
from launch.command_line.sweep import Axis
from launch.terminal.format import MISSING, alike, model_name, percent
from launch.terminal.tables import make_table, render
from pipeline.policies.view import PolicyRequest

HEADINGS = {"cache": "cache", "batch": "batch", "prompt": "prompt", "gen": "new", "costs": "costs"}


@dataclass(frozen=True)
class Point:
    """One combination of settings; without a report where it could not be measured, with the reason."""

    settings: dict[str, Any]
    report: Report | ReplayReport | None
    left_out: str = ""


@dataclass(frozen=True)
class Row:
    """One policy at one point. Each figure has a value for each measured round; a replay has one."""

    settings: dict[str, Any]
    request: PolicyRequest
    exact: bool
    prefill: Sequence[float]  # tok/s
    decode: Sequence[float]
    ratio: float | None  # decode's, to the point's first policy
    moved: float  # bytes a token in decode
    hits: float | None  # of needed experts, in decode
    host_share: float
    joules: Sequence[float] = ()  # of a token of decode, less idle power; empty without --energy


@dataclass
class SweepReport:
    axes: Sequence[Axis]
    points: list[Point] = field(default_factory=list)
    interrupted: bool = False

    @property
    def measured(self) -> list[Point]:
        return [point for point in self.points if point.report is not None]

    @property
    def rows(self) -> list[Row]:
        return [row for point in self.measured for row in _rows(point)]

    @property
    def replayed(self) -> bool:
        return isinstance(self.measured[0].report, ReplayReport)

    def to_json(self) -> dict[str, Any]:
        points = [
            {"settings": _plain(point.settings), **point.report.to_json()}
            for point in self.points
            if point.report is not None
        ]
        missing = [
            {"settings": _plain(point.settings), "reason": point.left_out}
            for point in self.points
            if point.report is None
        ]
        swept = {axis.name: [str(value) for value in axis.values] for axis in self.axes}
        return {"sweep": swept, "points": points, "left_out": missing, "interrupted": self.interrupted}

    def render(self) -> str:
        return render(self._table(), "", *self._footnotes())

    @property
    def conditions(self) -> list[str]:
        """What all points have in common, as short lines."""
        report = self.measured[0].report
        if isinstance(report, ReplayReport):
            header = report.header
            lines = [f"{model_name(header.model, article='')}, replayed: {report.path.name}"]
            return lines + [f"costs: {report.costs_of}"] * ("costs" not in self._settings)
        assert report is not None
        c = report.config
        fixed = {"batch": c["batch"], "prompt": c["prompt_len"], "gen": c["gen_len"]}
        words = [f"{HEADINGS[name]} {value}" for name, value in fixed.items() if name not in self._settings]
        if "cache" not in self._settings and c["expert_cache"] is not None:
            words.append(f"cache {percent(c['expert_cache'])} of all tiles")
        lines = [f"{report.model_name} on {c['device']}: experts {c['format']}"]
        lines += [f"emulation: {report.emulation}"] * bool(report.emulation)
        return lines + [", ".join(words)] * bool(words)

    @property
    def _settings(self) -> list[str]:
        return [axis.name for axis in self.axes if axis.is_setting]

    def _table(self) -> Table:
        rows, names = self.rows, self._settings
        several = any(row.ratio != 1 for row in rows)
        numbers = ["prefill\ntok/s", "decode\ntok/s", *["\nx"] * several, "copied\nMB/token", "expert\nhits"]
        numbers.append("workers'\nshare")
        joules = alike([median(row.joules) for row in rows]) if rows[0].joules else []
        numbers += ["J/\ntoken"] * bool(joules)
        table = make_table(*(f"\n{HEADINGS[name]}" for name in names), "\npolicy", numbers=numbers, gap=0)
        prefill = spreads([row.prefill for row in rows], "")
        decode = spreads([row.decode for row in rows], "bold")
        moved = alike([row.moved / 1e6 for row in rows])
        before: dict[str, Any] = {}
        for i, row in enumerate(rows):
            new = row.settings != before
            shown = [_word(row.settings[name]) if new else "" for name in names]
            before = row.settings
            table.add_row(
                *shown,
                policy_name(row.request, row.exact),
                prefill[i],
                decode[i],
                *[Text(MISSING if row.ratio is None else f"{row.ratio:.2f}", style="bold")] * several,
                moved[i],
                percent(row.hits),
                percent(row.host_share),
                *joules[i : i + 1],
            )
        return table

    def _footnotes(self) -> list[Text]:
        lines = self.conditions
        report = self.measured[0].report
        if isinstance(report, Report):
            rounds = report.config["rounds"]
            lines += [f"median of {rounds} rounds, and below it the least and the most"] * (rounds > 1)
            swept = {"batch": "batch"} if "batch" in self._settings else {}
            lines.append(warmed(report.config | swept))
        else:
            lines.append("tok/s: of the layers alone, simulated")
        if isinstance(report, Report) and report.energy:
            lines += energy_legend(report.energy, policies=0)
        lines.append("x: decode relative to the setting's first policy; copied, hits, share: of decode")
        notes = [
            f"note: {words_of(point.settings)} left out: {point.left_out}"
            for point in self.points
            if point.report is None
        ]
        notes += list(dict.fromkeys(self._policies_left_out()))
        notes += ["note: interrupted; the settings above are those that were finished"] * self.interrupted
        return [*(Text(line, style="dim") for line in lines), *map(Text, notes)]

    def _policies_left_out(self) -> Iterator[str]:
        for point in self.measured:
            if isinstance(point.report, ReplayReport):
                yield from (f"note: {name} left out: {why}" for name, why in point.report.left_out.items())
            elif point.report is not None:
                for result in point.report.left_out:
                    yield f"note: {result.request.label} left out: {result.left_out}"


def _rows(point: Point) -> Iterator[Row]:
    report = point.report
    if isinstance(report, Report):
        first = report.results[0]
        profiles = report.profiles
        for i, result in enumerate(report.results):
            yield _measured(point, result, first, profiles[i].hit_rate if profiles else None)
    elif report is not None:
        fastest = report.results[0].outcome.decode
        for one in report.results:
            prefill, decode = one.outcome.prefill, one.outcome.decode
            yield Row(
                point.settings,
                one.request,
                one.outcome.exact,
                [prefill.tok_s if prefill.seconds else 0.0],
                [decode.tok_s if decode.seconds else 0.0],
                decode.tok_s / fastest.tok_s if decode.seconds and fastest.seconds else None,
                decode.moved * report.header.tile_bytes / max(decode.rows, 1),
                decode.hit_rate,
                decode.host_share or 0.0,
            )


def _measured(point: Point, result: PolicyResult, first: PolicyResult, hits: float | None) -> Row:
    return Row(
        point.settings,
        result.request,
        result.exact,
        result.figures("prefill_tok_s"),
        result.figures("decode_tok_s"),
        result.ratio(first, "decode_tok_s"),
        median(result.figures("moved_bytes_per_token")),
        hits,
        median(result.figures("host_share")),
        result.figures("decode_j_token") if result.runs[0].energy else (),
    )


def words_of(settings: dict[str, Any]) -> str:
    """The settings on one line."""
    return ", ".join(f"{HEADINGS[name]} {_word(value)}" for name, value in settings.items())


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """For JSON: paths as text."""
    return {name: v if isinstance(v, int | float) else str(v) for name, v in settings.items()}
