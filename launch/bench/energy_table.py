"""What `bench --energy` adds to the report: joules a token, where they went, and how they were measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.table import Table

from launch.bench.profile_table import policy_name, spreads
from launch.bench.result import PolicyResult
from launch.terminal.format import MISSING, alike
from launch.terminal.tables import make_table

COARSE = 5  # a phase shorter than so many changes of a counter is measured within a fifth
LONGER = {"prefill": "longer prompts or more requests", "decode": "longer answers"}


def energy_table(results: Sequence[PolicyResult], parts: Sequence[str]) -> Table:
    """A row for each policy, all of which were measured."""
    several = len(results) > 1
    shown = parts if len(parts) > 1 else ()
    numbers = ["prefill\nJ/token", "decode\nJ/token", *["\nx"] * several, "with\nidle"]
    table = make_table("\npolicy", numbers=(*numbers, *(f"\n{part}" for part in shown)), gap=0)
    prefill = spreads([result.figures("prefill_j_token") for result in results], "")
    decode = spreads([result.figures("decode_j_token") for result in results], "bold")
    with_idle = alike([_total(result, "decode") for result in results])
    columns = [alike([_of_part(result, part) for result in results]) for part in shown]
    for i, result in enumerate(results):
        ratio = energy_ratio(result, results[0])
        table.add_row(
            policy_name(result.request, result.exact),
            prefill[i],
            decode[i],
            *[MISSING if ratio is None else f"{ratio:.2f}"] * several,
            with_idle[i],
            *(column[i] for column in columns),
        )
    return table


def energy_ratio(result: PolicyResult, first: PolicyResult) -> float | None:
    """Of decode, to the first policy; None where the idle machine took as much as a run."""
    if min(result.figures("decode_j_token") + first.figures("decode_j_token")) <= 0:
        return None
    return result.ratio(first, "decode_j_token")


def energy_legend(energy: dict[str, Any], policies: int) -> list[str]:
    """Explains the columns. `energy`: of the report's config. `policies`: how many have a row; 0 for a table
    with only decode's joules."""
    idle = ", ".join(f"{part} {watts:.1f} W" for part, watts in energy["idle_watts"].items())
    lines = [
        f"J/token{' of decode' * (not policies)}: less the power of this machine, engine loaded and idle:"
    ]
    lines.append(f"{idle}{'; with idle: of decode, that power included' * bool(policies)}")
    if policies > 1:
        lines.append("x after J/token: decode's, relative to the first policy; below 1 is less energy")
    if policies and len(energy["counters"]) > 1:
        lines.append(f"{', '.join(energy['counters'])}: their parts of decode's J/token")
    names = [name for of_part in energy["counters"].values() for name in of_part]
    lines.append(f"energy counters: {', '.join(names)}")
    read, slowest = (f"{1e3 * energy[name]:.0f} ms" for name in ("read_every_s", "resolution_s"))
    lines.append(f"read every {read}, changed every {slowest}, interpolated between")
    return lines


def energy_notes(results: Sequence[PolicyResult], energy: dict[str, Any], emulation: str) -> list[str]:
    notes = [f"without a counter: {line}" for line in energy["unread"]]
    if emulation:
        notes.append("the joules are this machine's, which waits as long as the emulated one computes")
    if any(min(result.figures("decode_j_token")) <= 0 for result in results):
        notes.append("runs took no more than the idle machine; other programs ran, then or while it was idle")
    for phase, longer in LONGER.items():
        shortest = min(run.energy[phase].seconds for result in results for run in result.runs)
        if shortest < COARSE * energy["resolution_s"]:
            notes.append(f"{phase} took {1e3 * shortest:.0f} ms, so its joules are coarse; measure {longer}")
    return notes


def energy_to_map(result: PolicyResult, first: PolicyResult) -> dict[str, Any]:
    """For JSON: J/token without idle power, with the rounds; the rest are medians."""
    found: dict[str, Any] = {}
    for phase in LONGER:
        values = result.figures(f"{phase}_j_token")
        of_phase = [run.energy[phase] for run in result.runs]
        found[phase] = {
            "j_token": {"median": median(values), "min": min(values), "max": max(values), "runs": values},
            "j_token_by_part": {part: _of_part(result, part, phase) for part in of_phase[0].joules},
            "j_token_with_idle": _total(result, phase),
            "tokens": of_phase[0].tokens,
            "seconds": median(energy.seconds for energy in of_phase),
        }
    return found | {"decode_ratio": energy_ratio(result, first)}


def _total(result: PolicyResult, phase: str) -> float:
    return median(run.energy[phase].total_j_token for run in result.runs)


def _of_part(result: PolicyResult, part: str, phase: str = "decode") -> float:
    return median(run.energy[phase].per_token(part) for run in result.runs)
