"""The further tables of `bench`: the engine's counters of decode, which explain each policy's speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from launch.bench.result import PolicyResult
from launch.phase_profile import ChannelFigures, PhaseProfile
from launch.terminal.format import MISSING, alike, percent
from launch.terminal.tables import make_table
from pipeline.models.shapes import is_shape
from pipeline.policies.view import PolicyRequest

APPROXIMATE = ("skipped", "substituted", "stale", "predicted", "left")


def profile_tables(results: Sequence[PolicyResult], profiles: Sequence[PhaseProfile]) -> list[Table]:
    """What was copied and hit, where the time went, what was approximated: a row for each policy, without
    columns that would be empty."""
    tables = [_cache_table(results, profiles), _time_table(results, profiles)]
    return [*tables, *_approximation_table(results, profiles)]


def _cache_table(results: Sequence[PolicyResult], profiles: Sequence[PhaseProfile]) -> Table:
    columns: dict[str, list[str]] = {"expert\nhits": [percent(profile.hit_rate) for profile in profiles]}
    if any(profile.tile_hit_rate != profile.hit_rate for profile in profiles):
        columns["tile\nhits"] = [percent(profile.tile_hit_rate) for profile in profiles]
    if any(profile.moved["demanded"] for profile in profiles):
        columns["on demand\nMB/token"] = alike([_per_token(profile, "demanded") for profile in profiles])
    if any(profile.moved["predicted"] for profile in profiles):
        columns["prefetched\nMB/token"] = alike([_per_token(profile, "predicted") for profile in profiles])
        columns["of it\nused"] = [
            percent(
                profile.moved["useful"] / profile.moved["predicted"] if profile.moved["predicted"] else None
            )
            for profile in profiles
        ]
    if any(profile.tree["wanted_experts"] for profile in profiles):
        columns["prefetches\nissued"] = [percent(profile.issued_share) for profile in profiles]
    if any(result.placed_bytes for result in results):
        columns["replaced\nMB/token"] = alike([result.placed_bytes / 1e6 for result in results])
    return _rows(results, columns)


def _time_table(results: Sequence[PolicyResult], profiles: Sequence[PhaseProfile]) -> Table:
    columns = {
        "workers\nbusy": [percent(profile.host_busy) for profile in profiles],
        "device\nbusy": [percent(profile.device_busy) for profile in profiles],
        "waiting for\nworkers": [percent(profile.shares["workers"]) for profile in profiles],
    }
    if any(profile.moved["demanded"] for profile in profiles):
        columns["waiting for\ncopies"] = [percent(profile.shares["link"]) for profile in profiles]
    return _rows(results, columns)


def _approximation_table(
    results: Sequence[PolicyResult], profiles: Sequence[PhaseProfile]
) -> Iterator[Table]:
    approximate = [(r, p) for r, p in zip(results, profiles, strict=True) if not r.exact]
    if not approximate:
        return
    masked = any(profile.kept_share is not None for _, profile in approximate)
    columns = {
        f"\n{kind}": [percent(profile.fidelity[kind], 1) for _, profile in approximate]
        for kind in approximate[0][1].fidelity
        if kind != "left" or masked
    }
    if masked:
        columns["channels\nread"] = [percent(profile.kept_share) for _, profile in approximate]
        columns |= _predicted_channels([profile.channels for _, profile in approximate])
    if any(result.perplexity for result, _ in approximate):
        columns["added\nperplexity"] = [_added(result) for result, _ in approximate]
    yield _rows([result for result, _ in approximate], columns)


def _predicted_channels(figures: Sequence[ChannelFigures | None]) -> dict[str, list[str]]:
    """Columns, where any were predicted."""
    if not any(found is not None and found.experts is not None for found in figures):
        return {}
    named = {"experts": "experts\npredicted", "recall": "channels\npredicted", "used": "of these\nused"}
    return {
        column: [percent(None if found is None else getattr(found, name)) for found in figures]
        for name, column in named.items()
    }


def _rows(results: Sequence[PolicyResult], columns: dict[str, list[str]]) -> Table:
    table = make_table("\npolicy", numbers=columns, gap=1)
    for result, *cells in zip(results, *columns.values(), strict=True):
        table.add_row(policy_name(result.request, exact=True), *cells)
    return table


def legend(results: Sequence[PolicyResult], profiles: Sequence[PhaseProfile], text: str) -> list[str]:
    """Explains the columns; each line fits 80 columns. `text`: the kind of text that perplexities are of."""
    if not profiles:
        return []
    lines = ["expert hits: share of the needed experts that were resident, in decode"]
    if any(profile.tile_hit_rate != profile.hit_rate for profile in profiles):
        lines.append("tile hits: the same of their tiles, where experts are resident in part")
    words = []
    if any(profile.moved["demanded"] for profile in profiles):
        words.append("on demand: a step waited for it")
    if any(profile.moved["predicted"] for profile in profiles):
        words.append("prefetched: before a step needed it")
    if words:
        lines.append("; ".join(words))
    if any(profile.tree["wanted_experts"] for profile in profiles):
        lines.append("prefetches issued: share of the experts that a prediction named, and that were")
        lines.append("neither resident nor under way, whose copy was ordered")
    if any(result.placed_bytes for result in results):
        lines.append("replaced: copied in the background, by the policy's replacement")
    lines.append("busy, waiting: shares of decode's time; the device computes attention, resident")
    lines.append("experts and the head")
    if not all(result.exact for result in results):
        masked = any(profile.kept_share is not None for profile in profiles)
        lines.append(f"{', '.join(APPROXIMATE[: None if masked else -1])}: shares of the routed weight")
        if masked:
            lines.append("left: in channels that were left out, by |u|; channels read: the share of them")
        if _predicted_channels([profile.channels for profile in profiles]):
            lines.append("experts, channels predicted: shares of those that a layer used, named by the layer")
            lines.append("before; of these used: share of the channels that predictions copied")
    judged = next((result.perplexity for result in results if result.perplexity), None)
    if judged is not None:
        lines.append(f"perplexity: relative to {judged.policy}, {judged.tokens} decoded tokens, {text}")
    return lines


def routing_notes(model: str) -> list[str]:
    """A note on hits where a model's weights, and so its routers, are random."""
    note = "random weights route at random: hits, and what depends on them, are not those of the real model"
    return [note] * is_shape(model)


def profile_to_map(profile: PhaseProfile, result: PolicyResult) -> dict[str, Any]:
    """For JSON: shares are 0..1, bytes are per token."""
    rows = max(profile.rows, 1)
    return {
        "hit_rate": profile.hit_rate,
        "hit_rate_by_layer": profile.hit_rates,
        "tile_hit_rate": profile.tile_hit_rate,
        "bytes_per_token": {kind: size / rows for kind, size in profile.moved.items()}
        | {"placed": result.placed_bytes},
        "prefetches": {
            "wanted": profile.tree["wanted_experts"],
            "issued": profile.tree["issued_experts"],
            "share": profile.issued_share,
            "paused_steps": profile.tree["paused_steps"],
        },
        "host_busy": profile.host_busy,
        "device_busy": profile.device_busy,
        "shares": profile.shares,
        "fidelity": {"exact": result.exact, **profile.fidelity},
        "channels_read": profile.kept_share,
        "channels": None if profile.channels is None else profile.channels._asdict(),
        "perplexity": None if result.perplexity is None else result.perplexity.to_map(),
    }


def policy_name(request: PolicyRequest, exact: bool) -> Text:
    """The first cell of a row: the policy's name, its options, and `approximate` where it is."""
    name = Text(request.name, style="bold")
    for option, value in request.options.items():
        name.append(f"\n{option}={value}", style="dim not bold")
    if not exact:
        name.append("\napproximate", style="yellow not bold")
    return name


def spreads(every: Sequence[Sequence[float]], style: str) -> list[Text]:
    """Of each row's values the median, and of several the range below it."""
    words = alike([of(values) for values in every for of in (median, min, max)])
    cells = []
    for values, middle, least, most in zip(every, words[::3], words[1::3], words[2::3], strict=True):
        between = " to " if least.startswith("-") else "-"
        cell = Text(middle, style=style)
        cells.append(
            cell.append(f"\n{least}{between}{most}", style="dim not bold") if len(values) > 1 else cell
        )
    return cells


def _added(result: PolicyResult) -> str:
    """By how much the approximation raises the perplexity."""
    if result.perplexity is None:
        return MISSING
    added = result.perplexity.percent
    return f"{added:+.2f}%" if abs(added) < 9.995 else f"{added:+.0f}%"


def _per_token(profile: PhaseProfile, kind: str) -> float:
    """Megabytes."""
    return profile.moved[kind] / max(profile.rows, 1) / 1e6
