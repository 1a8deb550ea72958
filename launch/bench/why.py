"""Why a policy is as fast as it is: the second table of `bench`, of what the engine counted in decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from launch.phase_profile import PhaseProfile
from launch.terminal.format import three_digits
from pipeline.policies.view import PolicyRequest

if TYPE_CHECKING:
    from launch.bench.report import Entry

SHOWN = 0.0005  # shares below it are not worth a line
NONE = "-"


def why_table(entries: Sequence[Entry], profiles: Sequence[PhaseProfile], terminal: bool) -> Table:
    """A row for each policy. What no policy does has no column: it fits 80 columns."""
    table = Table(
        box=box.SIMPLE_HEAD if terminal else None,
        padding=(0, 0 if terminal else 1, 0, 0),
        show_edge=False,
        header_style="bold",
        leading=0 if terminal else 1,
    )
    moves = any(profile.moved["demanded"] for profile in profiles)
    predicts = any(profile.moved["predicted"] for profile in profiles)
    places = any(entry.placed_bytes for entry in entries)
    judged = any(entry.perplexity for entry in entries)
    table.add_column("policy", overflow="fold")
    names = ["hits", *["MB/tok\nneeded"] * moves, *["MB/tok\nahead", "ahead\nused"] * predicts]
    names += ["MB/tok\nplaced"] * places
    names += ["host\nbusy", "dev.\nbusy", "wait\nhost", *["wait\nlink"] * moves]
    for name in (*names, *["perp-\nlexity"] * judged):
        table.add_column(name, justify="right", no_wrap=True)
    for entry, profile in zip(entries, profiles, strict=True):
        moved, shares, rows = profile.moved, profile.shares, max(profile.rows, 1)
        cells = [_percent(profile.hit_rate)]
        cells += [_megabytes(moved["demanded"] / rows)] * moves
        if predicts:
            landed = moved["predicted"]
            cells += [_megabytes(landed / rows), _percent(moved["useful"] / landed if landed else None)]
        cells += [_megabytes(entry.placed_bytes)] * places
        cells += [_percent(share) for share in (profile.host_busy, profile.device_busy, shares["workers"])]
        cells += [_percent(shares["link"])] * moves
        table.add_row(_fidelity(entry, profile), *cells, *[_added(entry)] * judged)
    return table


def legend(entries: Sequence[Entry], profiles: Sequence[PhaseProfile], text: str) -> list[str]:
    """What is needed to read the table; each line fits 80 columns. `text`: what perplexities are of."""
    if not profiles:
        return []
    lines = ["hits: share of the needed experts that lay on the device when they were needed"]
    words = ["needed: moved when needed"]
    if any(profile.moved["predicted"] for profile in profiles):
        words.append("ahead: because predicted")
    if any(entry.placed_bytes for entry in entries):
        words.append("placed: by replacement")
    if any(profile.moved["demanded"] for profile in profiles) or len(words) > 1:
        lines.append("; ".join(words))
    lines.append("busy, wait: shares of decode's time; dev.: attention, experts there, head")
    kinds = {kind for p in profiles for kind, share in p.fidelity.items() if share >= SHOWN}
    if kinds:
        lines.append(f"{', '.join(sorted(kinds))}: shares of the routers' weight")
    judged = next((entry.perplexity for entry in entries if entry.perplexity), None)
    if judged is not None:
        lines.append(f"perplexity: against {judged.policy} on {judged.tokens} decoded tokens ({text})")
    return lines


def profile_to_map(profile: PhaseProfile, entry: Entry) -> dict[str, Any]:
    """For JSON: shares are 0..1, bytes are per token."""
    rows = max(profile.rows, 1)
    return {
        "hit_rate": profile.hit_rate,
        "hit_rate_by_layer": profile.hit_rates,
        "bytes_per_token": {kind: size / rows for kind, size in profile.moved.items()}
        | {"placed": entry.placed_bytes},
        "host_busy": profile.host_busy,
        "device_busy": profile.device_busy,
        "shares": profile.shares,
        "fidelity": {"exact": entry.exact, **profile.fidelity},
        "perplexity": None if entry.perplexity is None else entry.perplexity.to_map(),
    }


def policy_name(request: PolicyRequest, exact: bool) -> Text:
    """Its name, and below it its options and whether it approximates."""
    name = Text(request.name, style="bold")
    for option, value in request.options.items():
        name.append(f"\n{option}={value}", style="dim not bold")
    if not exact:
        name.append("\napproximate", style="yellow not bold")
    return name


def _fidelity(entry: Entry, profile: PhaseProfile) -> Text:
    """The name, and below it the shares of the routed weight that were not computed as the routers said."""
    name = Text(entry.request.name, style="bold")
    for kind, share in profile.fidelity.items():
        if share >= SHOWN:
            name.append(f"\n{kind} {share:.1%}", style="yellow not bold")
    return name


def _added(entry: Entry) -> Text:
    if entry.perplexity is None:
        return Text("" if entry.exact else NONE, style="dim")
    percent = entry.perplexity.percent
    return Text(f"{percent:+.2f}%" if abs(percent) < 9.995 else f"{percent:+.0f}%", style="yellow")


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.0%}"


def _megabytes(size: float) -> str:
    return "<0.01" if 0 < size < 1e4 else three_digits(size / 1e6)
