"""The report of `bench`, as one JSON object or as tables that fit 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from launch.bench.profile_table import legend, policy_name, profile_table, profile_to_map
from launch.bench.result import PolicyResult
from launch.phase_profile import PhaseProfile
from launch.terminal.format import model_name, percent, three_digits
from launch.terminal.tables import make_table, render
from shm.segment import byte_size


@dataclass(frozen=True)
class Report:
    """`config`: the engine and the workload, as in the JSON object."""

    config: dict[str, Any]
    results: Sequence[PolicyResult]
    emulation: str
    left_out: Sequence[PolicyResult] = ()  # policies that cannot run here

    @property
    def profiles(self) -> list[PhaseProfile]:
        """Each policy's decode profile; empty where the runs hold no counters of the engine."""
        tile_bytes = self.config["tile_bytes"]
        counted = all(run.decode for result in self.results for run in result.runs)
        return [result.decode(tile_bytes) for result in self.results] if counted else []

    @property
    def model_name(self) -> str:
        return model_name(self.config["model"], article="")

    def to_json(self) -> dict[str, Any]:
        policies = [_result_to_map(result, self.results[0]) for result in self.results]
        for result, plain, profile in zip(self.results, policies, self.profiles, strict=True):
            plain["decode"] = profile_to_map(profile, result)
        return {"config": self.config, "policies": policies, "emulation": self.emulation}

    def render(self) -> str:
        tables = [_table(self)]
        if profiles := self.profiles:
            tables.append(profile_table(self.results, profiles))
        return render(*(part for table in tables for part in (table, "")), *self._footnotes())

    def _footnotes(self) -> list[Text]:
        c = self.config
        lines = [
            f"{self.model_name} on {c['device']}"
            + (f", {c['workers']} workers" if c["workers"] is not None else "")
            + f": experts {c['format']}, backbone {c['backbone_dtype']}",
            _cache(c),
            f"batch {c['batch']}: {c['prompt_len']} prompt tokens ({c['prompts']}),"
            f" {c['gen_len']} generated tokens",
            f"{c['rounds']} rounds, policies interleaved: median, and below it the range",
        ]
        if len(self.results) > 1:
            lines.append(f"x: speed relative to {self.results[0].request.name}, median over the rounds")
        lines.append("MB/token: copied to the device in decode")
        lines.append("host: share of decode's expert tiles that the workers computed")
        lines += legend(self.results, self.profiles, c["prompts"])
        notes = [f"note: {note}" for result in self.results for note in result.notes]
        notes += [f"note: {result.request.name} left out: {result.left_out}" for result in self.left_out]
        return [*(Text(line, style="dim") for line in lines), *map(Text, dict.fromkeys(notes))]


def _result_to_map(result: PolicyResult, first: PolicyResult) -> dict[str, Any]:
    return {
        "name": result.request.name,
        "options": result.request.options,
        "exact": result.exact,
        **{
            figure: _spread(result.figures(figure))
            for figure in ("prefill_tok_s", "decode_tok_s", "first_token_s")
        },
        "prefill_ratio": result.ratio(first, "prefill_tok_s"),
        "decode_ratio": result.ratio(first, "decode_tok_s"),
        **{
            figure: median(result.figures(figure))
            for figure in ("moved_bytes", "moved_bytes_per_token", "host_share")
        },
        "notes": result.notes,
    }


def _spread(values: list[float]) -> dict[str, Any]:
    return {"median": median(values), "min": min(values), "max": max(values), "runs": values}


def _table(report: Report) -> Table:
    title = f"emulation: {report.emulation}" if report.emulation else ""
    several = len(report.results) > 1
    speeds = ("prefill\ntok/s", *("x",) * several, "first\ntoken ms", "decode\ntok/s", *("x",) * several)
    table = make_table("policy", numbers=(*speeds, "MB/\ntoken", "host"), title=title)
    first = report.results[0]
    for result in report.results:
        prefill, decode = ([result.ratio(first, f"{p}_tok_s")] * several for p in ("prefill", "decode"))
        table.add_row(
            policy_name(result.request, result.exact),
            _cell(result.figures("prefill_tok_s")),
            *(f"{ratio:.2f}" for ratio in prefill),
            _cell([1e3 * seconds for seconds in result.figures("first_token_s")]),
            _cell(result.figures("decode_tok_s"), "bold"),
            *(Text(f"{ratio:.2f}", style="bold") for ratio in decode),
            three_digits(median(result.figures("moved_bytes_per_token")) / 1e6),
            percent(median(result.figures("host_share"))),
        )
    return table


def _cell(values: list[float], style: str = "") -> Text:
    cell = Text(three_digits(median(values)), style=style)
    return cell.append(f"\n{three_digits(min(values))}-{three_digits(max(values))}", style="dim not bold")


def _cache(config: dict[str, Any]) -> str:
    if config["cache_tiles"] is None:
        return "expert cache: none"
    size = byte_size(config["cache_tiles"] * config["tile_bytes"])
    share = "" if config["expert_cache"] is None else f", {percent(config['expert_cache'])} of all tiles"
    return f"expert cache: {config['cache_tiles']} tiles, {size}{share}"
