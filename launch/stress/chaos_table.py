"""The chaos of a stress run, for a person."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.text import Text

MEGA = 1e6


def chaos_parts(chaos: dict[str, Any]) -> list[RenderableType]:
    """Of a report's "chaos"."""
    kinds = "; ".join(
        f"{sum(roles.values())} {kind} ({', '.join(f'{n} {role}' for role, n in roles.items())})"
        for kind, roles in chaos["faults"].items()
    )
    head = f"chaos, seed {chaos['seed']}: {kinds or 'no fault'}; {chaos['during_decode']} while requests ran"
    lines = [Text(head, style="bold")]
    if chaos["hostile_messages"]["sent"]:
        sent = sum(chaos["hostile_messages"]["sent"].values())
        lines.append(
            Text(f"{sent} hostile messages, {chaos['hostile_messages']['answered']} answers to them")
        )
    if chaos["kill_to_next_token_s"]["median"] is not None:
        lines.append(
            Text(
                f"from a kill to the next token: {_times(chaos['kill_to_next_token_s'])}; "
                f"of everybody: {_times(chaos['kill_to_every_next_token_s'])}"
            )
        )
    for role, found in (chaos["recovery"] or {}).items():
        if chaos["respawns"][role]:
            lines.append(
                Text(
                    f"{chaos['respawns'][role]} deaths of a {role}: ready again after "
                    f"{_seconds(found['ready_s'])}, up after {_seconds(found['whole_s'])} (medians)"
                )
            )
    if chaos["engine_after"]:
        lines.append(Text(_usage(chaos["engine_before"], chaos["engine_after"])))
    return list(lines)


def _usage(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Only what can be compared: roles that were there before and after."""
    parts = []
    for role in before:
        if role in after:
            memory = (
                f"{before[role]['private_bytes'] / MEGA:.0f} to {after[role]['private_bytes'] / MEGA:.0f} MB"
            )
            files = f"{before[role]['descriptors']} to {after[role]['descriptors']} descriptors"
            parts.append(f"{role} {memory}, {files}")
    return "before and after: " + "; ".join(parts)


def _times(found: dict[str, float | None]) -> str:
    return f"median {_seconds(found['median'])}, at most {_seconds(found['max'])}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:.0f} ms"
