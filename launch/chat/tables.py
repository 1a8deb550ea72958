"""Texts and tables of a chat's commands: /help, /policy, /set and /stats, each within 80 columns, and the
line below an answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from launch.chat.conversation import KEYS, Reply, Settings
from launch.profile import PhaseProfile
from launch.terminal.format import MISSING, count, model_name, percent
from launch.terminal.tables import Grid
from pipeline.arrays import PHASES
from pipeline.assets import model_dir
from pipeline.policies.presets import PRESETS, Preset
from protocol.messages import Welcome
from shm.segment import byte_size


class Command(NamedTuple):
    """A command of a chat. `arguments`: as /help shows them, "" where it takes none."""

    arguments: str
    help: str


COMMANDS = {
    "help": Command("", "show this list"),
    "reset": Command("", "clear the conversation; the system message stays"),
    "system": Command("[TEXT|off]", "show, set or remove the system message"),
    "stats": Command("", "show what the engine runs, holds and has done"),
    "why": Command("", "explain the speed of the last answer"),
    "policy": Command("[NAME [OPTION=VALUE]]", "list the policies, or switch to one"),
    "set": Command("[KEY=VALUE ...]", "show or change settings; KEY= for default"),
    "save": Command("FILE", "save the conversation as JSON"),
    "load": Command("FILE", "continue a saved conversation"),
    "retry": Command("", "ask the last question again"),
    "quit": Command("", "end the chat, like Ctrl-D; also exit"),
}
KEYS_HELP = (
    ("Enter", "send"),
    ("Alt-Enter", "begin a new line; a paste keeps its lines"),
    ("Tab", "complete a command and its arguments"),
    ("Up, Ctrl-R", "recall earlier lines, also of earlier sessions"),
    ("Ctrl-C", "cancel the answer; at the prompt: clear the line"),
    ("//text", "send a text that begins with /"),
)
SWITCH = "/policy NAME OPTION=VALUE switches; Tab lists the options"


def help_text() -> RenderableType:
    commands = [
        (Text.assemble(f"/{name} ", (command.arguments, "dim")), Text(command.help, "dim"))
        for name, command in COMMANDS.items()
    ]
    keys = [(key, Text(help, "dim")) for key, help in KEYS_HELP]
    return Grid([*commands, ("", ""), *keys])


def settings_table(settings: Settings, defaults: Settings) -> RenderableType:
    def word(value: object) -> str:
        return MISSING if value is None else str(value)

    return Grid(
        [
            (key, word(settings[key]), Text(f"{meaning(key)} (default {word(defaults[key])})", "dim"))
            for key in KEYS
        ]
    )


def meaning(key: str) -> str:
    """Returns what a setting does."""
    return KEYS[key].help.partition(" (default")[0]


def describe(preset: Preset) -> str:
    return preset.help + ("" if preset.exact else " (approximate)")


def policy_list(current: str, given: Mapping[str, object]) -> RenderableType:
    """Returns a line for each preset; the one in use is marked, with the options `given` to it."""
    rows = [
        ("*" * chosen, Text(preset.name, "bold" * chosen), Text(describe(preset), "dim"))
        for preset in PRESETS.values()
        for chosen in [preset.name == current]
    ]
    options = " ".join(f"{name}={value}" for name, value in given.items())
    lines = [Text(f"in use: {current} {options}")] if options else []
    return Group(Grid(rows, gap=1), "", *lines, Text(SWITCH, "dim"))


def engine_table(stats: dict[str, Any], welcome: Welcome) -> RenderableType:
    return Grid([*_engine(stats, welcome)])


def _engine(stats: dict[str, Any], welcome: Welcome) -> Iterator[tuple[str, str]]:
    kinds = (
        ("experts", welcome.format),
        ("backbone", welcome.backbone_dtype),
        ("KV cache", welcome.kv_dtype),
    )
    formats = ", ".join(f"{what} {name}" for what, name in kinds if name)
    model = model_name(welcome.model) if welcome.model == str(model_dir()) else welcome.model
    yield "policy", f"{stats.get('policy', welcome.policy)} on {welcome.device}"
    yield "model", model + (f" ({formats})" if formats else "")
    if s := stats.get("scheduler"):
        yield "requests", f"{s['running']} running, {s['waiting']} waiting"
        kept = f"{s['kv_tokens_kept']} kept"
        yield "KV cache", f"{s['kv_tokens_used']} of {s['kv_tokens']} tokens in use, {kept}"
        reused = f"{s['kv_reused_tokens']} tokens reused by {count(s['kv_hits'], 'request')}"
        blocks = f"{count(s['kv_shared_blocks'], 'block')} shared, {s['kv_evicted_blocks']} evicted"
        yield "prefixes", f"{reused}, {blocks}"
    if (g := stats.get("speculation")) and g["drafted"]:
        cost = f"{g['more_seconds']:+.1f} s in {count(g['steps'], 'step')}"
        yield "guessed tokens", f"{g['drafted']}, of which {g['accepted']} came true; {cost}"
    if c := stats.get("cache"):
        size = byte_size(c["resident_tiles"] * stats.get("tile_bytes", 0))
        yield "expert cache", f"{c['resident_tiles']} of {c['capacity_tiles']} tiles resident, {size}"
    for device in stats.get("devices", ()):
        first, end = device["layers"]
        there = f"{device.get('resident_tiles', 0)} of {device.get('capacity_tiles', 0)} tiles resident"
        yield device["device"], f"layers with experts {first + 1} to {end}, {there}"
    for phase in PHASES:
        if isinstance(tree := stats.get("engine", {}).get(phase), dict):
            yield phase, _work(PhaseProfile(tree, stats.get("tile_bytes", 0)))
    if welcome.emulation:
        yield "emulated", welcome.emulation


def _work(profile: PhaseProfile) -> str:
    """Describes the steps of a phase since the engine started."""
    took = f"{profile.seconds:.{1 if profile.seconds >= 1 else 2}f} s"
    words = f"{count(profile.rows, 'token')} in {count(profile.steps, 'step')} and {took}"
    if not profile.tiles:
        return words
    places = [
        f"{percent(profile.tree[f'{kind}_tiles'] / profile.tiles)} {kind}"
        for kind in ("host", "resident", "fetched")
        if profile.tree[f"{kind}_tiles"]
    ]
    moved = f"; {byte_size(profile.copied)} moved" if profile.copied else ""
    return f"{words}; tiles: {', '.join(places)}{moved}"


def summary(reply: Reply, emulation: str, max_tokens: int) -> list[str]:
    """Returns the parts of the line below an answer."""
    stats = reply.done.stats
    parts = [count(reply.tokens, "token")]
    if stats.get("decode_tok_s"):
        parts.append(f"{stats['decode_tok_s']:.1f} tok/s")
    if reply.first_s is not None:
        parts.append(f"first {reply.first_s:.2f} s")
    if "kv_reused_tokens" in stats:
        parts.append(f"KV {stats['kv_reused_tokens']}/{stats.get('prompt_tokens', 0)}")
    phases = [phase for phase in stats.get("engine", {}).values() if isinstance(phase, dict)]
    if tiles := sum(PhaseProfile(phase, 0).tiles for phase in phases):
        parts.append(f"host {percent(sum(phase['host_tiles'] for phase in phases) / tiles)}")
        parts.append(f"{byte_size(sum(phase['fetched_bytes'] for phase in phases))} moved")
    if reply.done.reason == "length":
        parts.append("cut at max_tokens" if reply.tokens >= max_tokens else "cut at the context's end")
    elif reply.done.reason == "cancelled":
        parts.append("cancelled")
    if note := approximation(stats.get("fidelity", {})):
        parts.append(note)
    if emulation:
        parts.append(f"emulated: {emulation}")
    return parts


def approximation(fidelity: dict[str, Any]) -> str:
    """Returns "approximate" with each kind's share of the routed weight, "" for an exact answer."""
    if fidelity.get("exact", True):
        return ""
    shares = [
        (kind, part) for kind, part in fidelity.items() if kind not in ("exact", "kv_cache") and part > 0
    ]
    words = [f"{percent(part, 1)} {kind}" for kind, part in shares]
    if "kv_cache" in fidelity:
        words.append(f"KV cache in {fidelity['kv_cache']}")
    return f"approximate: {', '.join(words)}" if words else "approximate: all computed as routed"
