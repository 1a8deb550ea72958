"""The second table of `bench`: the engine's counters of decode, which explain each policy's speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from launch.bench.result import PolicyResult
from launch.phase_profile import PhaseProfile
from launch.terminal.format import MISSING, percent, three_digits
from launch.terminal.tables import make_table
from pipeline.policies.view import PolicyRequest

SHOWN = 0.0005  # smaller shares of the routed weight have no line


def profile_table(results: Sequence[PolicyResult], profiles: Sequence[PhaseProfile]) -> Table:
    """A row for each policy. A column that would be empty is left out, so that it fits 80 columns."""
    moves = any(profile.moved["demanded"] for profile in profiles)
    predicts = any(profile.moved["predicted"] for profile in profiles)
    places = any(result.placed_bytes for result in results)
    judged = any(result.perplexity for result in results)
    names = ["hits", *["demand\nMB/tok"] * moves, *["pref.\nMB/tok", "pref.\nused"] * predicts]
    names += ["placed\nMB/tok"] * places
    names += ["host\nbusy", "dev.\nbusy", "wait\nhost", *["wait\nlink"] * moves]
    table = make_table("policy", numbers=(*names, *["perp-\nlexity"] * judged), gap=0)
    for result, profile in zip(results, profiles, strict=True):
        moved, shares, rows = profile.moved, profile.shares, max(profile.rows, 1)
        cells = [percent(profile.hit_rate)]
        cells += [_megabytes(moved["demanded"] / rows)] * moves
        if predicts:
            landed = moved["predicted"]
            cells += [_megabytes(landed / rows), percent(moved["useful"] / landed if landed else None)]
        cells += [_megabytes(result.placed_bytes)] * places
        cells += [percent(share) for share in (profile.host_busy, profile.device_busy, shares["workers"])]
        cells += [percent(shares["link"])] * moves
        table.add_row(_fidelity(result, profile), *cells, *[_added(result)] * judged)
    return table


def legend(results: Sequence[PolicyResult], profiles: Sequence[PhaseProfile], text: str) -> list[str]:
    """Explains the columns; each line fits 80 columns. `text`: the kind of text that perplexities are of."""
    if not profiles:
        return []
    lines = ["hits: share of the needed experts that were resident"]
    words = ["demand: tiles that a step needed"]
    if any(profile.moved["predicted"] for profile in profiles):
        words.append("pref.: prefetched")
    if any(result.placed_bytes for result in results):
        words.append("placed: by replacement")
    if any(profile.moved["demanded"] for profile in profiles) or len(words) > 1:
        lines.append("; ".join(words))
    lines.append("busy, wait: shares of decode's time; dev.: attention, resident experts, head")
    kinds = {kind for p in profiles for kind, share in p.fidelity.items() if share >= SHOWN}
    if kinds:
        lines.append(f"{', '.join(sorted(kinds))}: shares of the routed weight")
    judged = next((result.perplexity for result in results if result.perplexity), None)
    if judged is not None:
        lines.append(f"perplexity: relative to {judged.policy}, {judged.tokens} decoded tokens, {text}")
    return lines


def profile_to_map(profile: PhaseProfile, result: PolicyResult) -> dict[str, Any]:
    """For JSON: shares are 0..1, bytes are per token."""
    rows = max(profile.rows, 1)
    return {
        "hit_rate": profile.hit_rate,
        "hit_rate_by_layer": profile.hit_rates,
        "bytes_per_token": {kind: size / rows for kind, size in profile.moved.items()}
        | {"placed": result.placed_bytes},
        "host_busy": profile.host_busy,
        "device_busy": profile.device_busy,
        "shares": profile.shares,
        "fidelity": {"exact": result.exact, **profile.fidelity},
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


def _fidelity(result: PolicyResult, profile: PhaseProfile) -> Text:
    """The name, and below it the shares of the routed weight that were computed otherwise than routed."""
    name = Text(result.request.name, style="bold")
    for kind, share in profile.fidelity.items():
        if share >= SHOWN:
            name.append(f"\n{kind} {percent(share, 1)}", style="yellow not bold")
    return name


def _added(result: PolicyResult) -> Text:
    """By how much the approximation raises the perplexity."""
    if result.perplexity is None:
        return Text("" if result.exact else MISSING, style="dim")
    added = result.perplexity.percent
    return Text(f"{added:+.2f}%" if abs(added) < 9.995 else f"{added:+.0f}%", style="yellow")


def _megabytes(size: float) -> str:
    return "<0.01" if 0 < size < 1e4 else three_digits(size / 1e6)
