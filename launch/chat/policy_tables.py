"""What /policy and /help policy show: the presets, and the options of one with their values."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from launch.errors import WrongUsage
from launch.terminal.tables import make_grid
from pipeline.errors import PolicyError
from pipeline.policies.options import Option, Seed, Value
from pipeline.policies.presets import PARTS, PRESETS, Preset, make_policy
from pipeline.policies.view import PolicyRequest

SWITCH = "/policy NAME switches, /help policy NAME lists its options"
EXCHANGE = "A preset of five parts can take others; a part has options of its own:"


def describe(preset: Preset) -> str:
    return preset.help + ("" if preset.exact else " (approximate)")


def policy_list(current: str, given: Mapping[str, object]) -> RenderableType:
    """A line for each preset; the one in use is marked, with the options `given` to it."""
    table = make_grid(3, gap=1)
    for preset in PRESETS.values():
        chosen = preset.name == current
        name = Text(preset.name, "bold" if chosen else "")
        table.add_row("*" if chosen else " ", name, Text(describe(preset), "dim"))
    options = " ".join(f"{name}={value}" for name, value in given.items())
    lines = [Text(f"in use: {current} {options}")] if options else []
    return Group(table, "", *lines, Text(SWITCH, "dim"))


def policy_options(name: str, given: Mapping[str, object]) -> Table:
    """The options of a preset with their values, where the options `given` are set. Raises WrongUsage for an
    unknown preset."""
    try:
        values = _values(name, given)
    except PolicyError as e:
        raise WrongUsage(str(e)) from None
    table = make_grid(2)
    for option, value in values:
        shown = "the engine's" if isinstance(option, Seed) and option.name not in given else _shown(value)
        table.add_row(f"{option.name}={shown}", Text(_explained(option, value), "dim"))
    return table


def parts_help() -> RenderableType:
    """The parts that a preset's options can exchange."""
    table = make_grid(2)
    for role, parts in PARTS.items():
        for part in parts.values():
            help = Text(part.help, "dim")
            for option in part.options:
                help.append(f"\n{option.name}: {option.help} ({option.values.replace('|', ', ')})")
            table.add_row(f"{role}={part.name}", help)
    return Group("/policy NAME [OPTION=VALUE ...]", EXCHANGE, "", table, "", Text(SWITCH, "dim"))


def _explained(option: Option, value: Value) -> str:
    """What an option decides and the values it takes; of a part also what the one in use does."""
    parts = PARTS.get(option.name, {})
    if str(value) not in parts:
        return f"{option.help} ({option.values.replace('|', ', ')})"
    others = ", ".join(name for name in option.values.split("|") if name != value)
    return f"{option.help}: {parts[str(value)].help} (or {others})"


def _values(name: str, given: Mapping[str, object]) -> list[tuple[Option, Value]]:
    if name not in PRESETS:
        make_policy(PolicyRequest(name), 0)  # raises, with the nearest names
    return PRESETS[name].values(given, 0)


def _shown(value: Value) -> str:
    if value is None:
        return "auto"
    return f"{value:g}" if isinstance(value, float) else str(value)
