"""The part of a stress report on injected faults, as text."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.text import Text

from launch.stress.chaos import DOWN_SECONDS
from launch.terminal.format import MISSING, count
from shm.segment import byte_size


def chaos_parts(chaos: dict[str, Any]) -> list[RenderableType]:
    kinds = "; ".join(
        f"{kind} {sum(roles.values())} ({', '.join(f'{role} {n}' for role, n in roles.items())})"
        for kind, roles in chaos["faults"].items()
    )
    head = (
        f"injected faults, seed {chaos['seed']}: {kinds or 'none'}; {chaos['during_decode']} during requests"
    )
    lines = []
    if chaos["hostile_messages"]["sent"]:
        sent = sum(chaos["hostile_messages"]["sent"].values())
        answers = count(chaos["hostile_messages"]["answered"], "answer")
        lines.append(f"hostile messages: {sent} sent, {answers}; the others were refused, as intended")
    if chaos["kill_to_next_token_s"]["median"] is not None:
        any_answer, every = (chaos[f"kill_to_{which}next_token_s"] for which in ("", "every_"))
        lines.append(
            f"from a kill ({chaos['kills_measured']} during answers) to the next token of any answer:"
            f" {_times(any_answer)}; of every answer: {_times(every)}"
        )
        if together := chaos["kills_with_all_workers_down"]:
            lines.append(
                f"in {together} of these {chaos['kills_measured']} every worker had been killed or stopped"
                f" within {DOWN_SECONDS:g} s before the kill or until the token: answers then wait for the"
                " first worker to be up again"
            )
    for role, found in (chaos["recovery"] or {}).items():
        if deaths := chaos["respawns"][role]:
            lines.append(
                f"{role} restarted {count(deaths, 'time')}: ready after "
                f"{_seconds(found['ready_s'])}, up after {_seconds(found['whole_s'])} (medians)"
            )
    if chaos["engine_after"]:
        lines.append(_usage(chaos["engine_before"], chaos["engine_after"]))
    return [Text(head, style="bold"), *map(Text, lines)]


def _usage(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Memory and descriptors of the roles that existed before and after."""
    parts = []
    for role in before:
        if role in after:
            memory = (byte_size(used[role]["private_bytes"]) for used in (before, after))
            files = (str(used[role]["descriptors"]) for used in (before, after))
            parts.append(f"{role} {' to '.join(memory)}, {' to '.join(files)} descriptors")
    return "private memory, before to after: " + "; ".join(parts)


def _times(found: dict[str, float | None]) -> str:
    return f"median {_seconds(found['median'])}, maximum {_seconds(found['max'])}"


def _seconds(value: float | None) -> str:
    return MISSING if value is None else f"{value * 1000:.0f} ms"
