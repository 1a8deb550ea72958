"""The report of `bench`, as one JSON object or as tables that fit 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from launch.bench.energy_table import energy_legend, energy_notes, energy_table, energy_to_map
from launch.bench.profile_table import (
    legend,
    policy_name,
    profile_tables,
    profile_to_map,
    routing_notes,
    spreads,
)
from launch.bench.result import PolicyResult, merged_notes
from launch.phase_profile import PhaseProfile
from launch.terminal.format import alike, count, model_name, percent
from launch.terminal.tables import make_table, render
from pipeline.engine.prefetch_meter import pause_note
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
    def energy(self) -> dict[str, Any]:
        """How the energy was measured; empty without --energy."""
        return dict(self.config.get("energy", {}))

    @property
    def model_name(self) -> str:
        return model_name(self.config["model"], article="")

    def to_json(self) -> dict[str, Any]:
        policies = [_result_to_map(result, self.results[0]) for result in self.results]
        for result, plain, profile in zip(self.results, policies, self.profiles, strict=True):
            plain["decode"] = profile_to_map(profile, result)
        if self.energy:
            for result, plain in zip(self.results, policies, strict=True):
                plain["energy"] = energy_to_map(result, self.results[0])
        notes = routing_notes(self.config["model"])
        return {"config": self.config, "policies": policies, "emulation": self.emulation, "notes": notes}

    def render(self) -> str:
        tables = [_table(self)]
        if profiles := self.profiles:
            tables += profile_tables(self.results, profiles)
        if self.energy:
            tables.append(energy_table(self.results, list(self.energy["counters"])))
        return render(*(part for table in tables for part in (table, "")), *self._footnotes())

    def _footnotes(self) -> list[Text]:
        c = self.config
        lines = [
            f"{self.model_name} on {c['device']}"
            + (f", {c['workers']} workers" if c["workers"] is not None else "")
            + f": experts {c['format']}, backbone {c['backbone_dtype']}",
            _cache(c),
            f"batch {c['batch']}: {count(c['prompt_len'], 'prompt token')} ({c['prompts']}),"
            f" {c['gen_len']} generated tokens, sampled",
            f"{count(c['rounds'], 'round')}, policies interleaved: median, and below it the range",
            warmed(c),
            *placed_by(c),
            *([f"{c['machine']}, {c['when'][:10]}"] if "machine" in c else []),
        ]
        if len(self.results) > 1:
            lines.append(f"x: speed relative to {self.results[0].request.label}, median over the rounds")
        lines.append("copied: to the device in decode")
        lines.append("workers' share: of decode's expert tiles; the device computed the others")
        lines += legend(self.results, self.profiles, c["prompts"])
        notes = [f"note: {note}" for note in routing_notes(c["model"])]
        if self.energy:
            lines += energy_legend(self.energy, len(self.results))
            notes += [f"note: {note}" for note in energy_notes(self.results, self.energy, self.emulation)]
        noted = [(r.request.name, r.notes) for r in self.results]
        noted += [
            (result.request.name, [f"{result.request.name}: {paused}"])
            for result, profile in zip(self.results, self.profiles, strict=False)
            if (paused := pause_note(profile.tree["paused_steps"], profile.steps))
        ]
        notes += [f"note: {note}" for note in merged_notes(noted)]
        notes += [f"note: {result.request.label} left out: {result.left_out}" for result in self.left_out]
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
    speeds = ("prefill\ntok/s", *("\nx",) * several, "first\ntoken ms", "decode\ntok/s", *("\nx",) * several)
    table = make_table(
        "\npolicy", numbers=(*speeds, "copied\nMB/token", "workers'\nshare"), gap=0, title=title
    )
    results = report.results
    prefill, first_token, decode = (
        spreads([[scale * value for value in result.figures(name)] for result in results], style)
        for name, scale, style in (
            ("prefill_tok_s", 1, ""),
            ("first_token_s", 1e3, ""),
            ("decode_tok_s", 1, "bold"),
        )
    )
    copied = alike([median(result.figures("moved_bytes_per_token")) / 1e6 for result in results])
    for i, result in enumerate(results):
        ratios = [f"{result.ratio(results[0], f'{phase}_tok_s'):.2f}" for phase in ("prefill", "decode")]
        table.add_row(
            policy_name(result.request, result.exact),
            prefill[i],
            *ratios[:1] * several,
            first_token[i],
            decode[i],
            *[Text(ratios[1], style="bold")] * several,
            copied[i],
            percent(median(result.figures("host_share"))),
        )
    return table


def _cache(config: dict[str, Any]) -> str:
    if config["cache_tiles"] is None:
        return "expert cache: none"
    size = byte_size(config["cache_tiles"] * config["tile_bytes"])
    share = "" if config["expert_cache"] is None else f", {percent(config['expert_cache'])} of all tiles"
    return f"expert cache: {config['cache_tiles']} tiles, {size}{share}"


def warmed(config: dict[str, Any]) -> str:
    """What each policy computes before it is measured."""
    read, new = config["warm_up_tokens"]
    lengths = f"{config['batch']} x {read} other tokens, {new} generated"
    return f"warm-up before each run, for all alike: {lengths}"


def placed_by(config: dict[str, Any]) -> list[str]:
    """What policies went by that lack a calibration, if any did."""
    names = config.get("uncalibrated")
    if not names:
        return []
    used = f"experts placed by their use in {config['counted_tokens']} tokens of other text"
    return [f"{', '.join(names)}: not calibrated, {used}"]
