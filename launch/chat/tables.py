"""The tables of /help, /stats, /set and /policy; each fits 80 columns."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from launch.chat.answer import in_bytes, share, total
from launch.chat.commands import COMMANDS
from launch.chat.completion import describe
from launch.chat.conversation import Reply
from launch.chat.settings import KEYS, AnswerSettings, shown
from launch.phase_profile import PhaseProfile
from pipeline.policies.presets import PARTS, PRESETS
from protocol.messages import Welcome

KEYS_HELP = (
    ("Enter", "send"),
    ("Alt-Enter", "a new line; a paste keeps its lines"),
    ("Tab", "complete a command and what follows it"),
    ("Up, Ctrl-R", "earlier lines, also of earlier sessions"),
    ("Ctrl-C", "end the answer; at the prompt: clear the line"),
    ("//text", "send a text that begins with /"),
)
SUMMARY_HELP = (
    "Below an answer: tokens, speed, time to the first token, KV kept of the prompt's tokens, "
    "share of the experts computed on the host, bytes moved to the device."
)
PHASES = ("prefill", "decode")


def help_text() -> RenderableType:
    table = _grid(2)
    for command in COMMANDS.values():
        table.add_row(_call(f"/{command.name}", command.arguments), Text(command.help, "dim"))
    table.add_row("", "")
    for key, help in KEYS_HELP:
        table.add_row(key, Text(help, "dim"))
    return Group(table, "", Text(SUMMARY_HELP, "dim"))


def settings_table(settings: AnswerSettings) -> Table:
    table = _grid(3)
    for key, (_, help) in KEYS.items():
        table.add_row(key, shown(settings, key), Text(help, "dim"))
    return table


def policy_table(current: str) -> RenderableType:
    """The presets, and below them the parts that can be exchanged."""
    table = _grid(3)
    for preset in PRESETS.values():
        help = Text(describe(preset), "dim")
        if preset.parts:
            set_to = preset.parts | preset.defaults
            help.append("\n" + " ".join(f"{name}={value}" for name, value in set_to.items()))
        else:
            for option in preset.options:
                help.append(f"\n{option.name}={option.values} ({option.help})")
        chosen = preset.name == current
        table.add_row("*" if chosen else " ", Text(preset.name, "bold" if chosen else ""), help)
    return Group(table, "", "A preset's parts can be exchanged, and bring their options:", _parts_table())


def _parts_table() -> Table:
    table = _grid(2)
    for role, parts in PARTS.items():
        for part in parts.values():
            help = Text(part.help, "dim")
            for option in part.options:
                help.append(f"\n{option.name}={option.values} ({option.help})")
            table.add_row(f"{role}={part.name}", help)
    return table


def counters_table(reply: Reply | None, stats: dict[str, Any]) -> Table:
    """What the engine computed, where, and where its time went: for the last answer, and since its start."""
    columns: list[dict[str, Any]] = []
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    last = reply.done.stats if reply is not None else {}
    for name, tree in (("answer", last.get("engine", {})), ("engine", stats.get("engine", {}))):
        for phase in PHASES:
            if isinstance(tree.get(phase), dict):
                table.add_column(f"{name}\n{phase}", justify="right")
                columns.append(tree[phase])

    def row(name: str, *cells: str, dim: bool = False) -> None:
        table.add_row(Text(name, "dim" if dim else ""), *cells)

    row("steps", *(f"{c['steps']}" for c in columns))
    row("tokens computed", *(f"{c['rows']}" for c in columns))
    row("expert tiles", *(f"{total(c)}" for c in columns))
    row("  on the host", *(share(c["host_tiles"], total(c)) for c in columns))
    row("  resident on the device", *(share(c["resident_tiles"], total(c)) for c in columns))
    row("  fetched to the device", *(share(c["fetched_tiles"], total(c)) for c in columns))
    profiles = [PhaseProfile(c, stats.get("tile_bytes", 0)) for c in columns]
    moved = [profile.moved for profile in profiles]
    row("expert hits", *("-" if p.hit_rate is None else share(p.hit_rate, 1) for p in profiles))
    row("moved to the device", *(in_bytes(m["demanded"]) for m in moved))
    if any(m["predicted"] for m in moved):
        row("prefetched", *(in_bytes(m["predicted"]) for m in moved))
        row("  of use", *(share(m["useful"], m["predicted"]) for m in moved))
        row("  dropped unused", *(share(m["wasted"], m["predicted"]) for m in moved))
        row("  needed while on its way", *(in_bytes(m["late"]) for m in moved))
    for kind in profiles[0].fidelity if profiles else ():
        if any(p.fidelity[kind] for p in profiles):
            row(f"{kind} of routed weight", *(share(p.fidelity[kind], 1) for p in profiles))
    times = [sum(c["seconds"].values()) for c in columns]
    row("seconds", *(f"{time:.2f}" for time in times))
    for part in columns[0]["seconds"] if columns else ():
        spent = (c["seconds"].get(part, 0.0) for c in columns)
        row(f"  {part}", *(share(s, time) for s, time in zip(spent, times, strict=True)))
    return table


def engine_table(stats: dict[str, Any], welcome: Welcome) -> Table:
    """What the engine is and holds now."""
    table = _grid(2)
    kinds = (("experts", welcome.format), ("rest", welcome.backbone_dtype))
    formats = ", ".join(f"{what} {name}" for what, name in kinds if name)
    rows: list[tuple[str, str]] = [
        ("policy", f"{stats.get('policy', welcome.policy)} on {welcome.device}"),
        ("model", welcome.model + (f" ({formats})" if formats else "")),
        *_scheduler(stats.get("scheduler", {})),
        *_cache(stats.get("cache", {}), stats.get("tile_bytes", 0)),
    ]
    if says := stats.get("prefetch", {}).get("says"):
        rows.append(("prefetching", says))
    clients = stats.get("clients", {})
    if "connected" in clients:
        rows.append(("clients", f"{clients['connected']} connected"))
    if welcome.emulation:
        rows.append(("emulated", welcome.emulation))
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def _scheduler(s: dict[str, Any]) -> list[tuple[str, str]]:
    if not s:
        return []
    requests = f"{s['running']} running, {s['waiting']} waiting"
    if s.get("preemptions"):
        requests += f", {s['preemptions']} set aside so far"
    kv = f"{s['kv_tokens_used']} of {s['kv_tokens']} tokens in use"
    if "kv_tokens_kept" in s:
        count = s.get("conversations", 0)
        kv += f", {s['kv_tokens_kept']} kept for {count} conversation{'' if count == 1 else 's'}"
    rows = [("requests", requests), ("KV cache", kv)]
    if "kv_reused_tokens" in s:
        rows.append(("KV reused", f"{s['kv_reused_tokens']} tokens so far"))
    rows.append(("prefill", f"{s['prefill_chunk']} tokens a step"))
    return rows


def _cache(c: dict[str, Any], tile_bytes: int) -> list[tuple[str, str]]:
    if not c:
        return []
    held, room = c["resident_tiles"], c["capacity_tiles"]
    return [("expert cache", f"{held} of {room} tiles resident, {in_bytes(held * tile_bytes)}")]


def _grid(columns: int) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(columns - 1):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _call(name: str, arguments: str) -> Text:
    return Text.assemble(name, (f" {arguments}" if arguments else "", "dim"))
