"""The tables of /help, /stats and /set; each fits 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from launch.chat.commands import COMMANDS
from launch.chat.conversation import Reply
from launch.chat.settings import KEYS, AnswerSettings, value_text
from launch.phase_profile import PhaseProfile
from launch.terminal.format import count, model_name, percent
from launch.terminal.tables import make_grid, make_table
from pipeline.arrays import PHASES
from pipeline.assets import model_dir
from protocol.messages import Welcome
from shm.segment import byte_size

KEYS_HELP = (
    ("Enter", "send"),
    ("Alt-Enter", "begin a new line; a paste keeps its lines"),
    ("Tab", "complete a command and its arguments"),
    ("Up, Ctrl-R", "recall earlier lines, also of earlier sessions"),
    ("Ctrl-C", "cancel the answer; at the prompt: clear the line"),
    ("//text", "send a text that begins with /"),
)
SET_HELP = "/set KEY=VALUE [KEY=VALUE ...] changes the answers to come; /set KEY= restores a default."
SUMMARY_HELP = (
    "Below an answer: tokens, speed, time to the first token, prompt tokens with reused KV, "
    "share of the expert tiles computed on the host, bytes moved to the device; with an approximate "
    "policy also the shares of the routed weight that were not computed as routed."
)


def help_text() -> RenderableType:
    table = make_grid(2)
    for command in COMMANDS.values():
        table.add_row(_call(f"/{command.name}", command.arguments), Text(command.help, "dim"))
    table.add_row("", "")
    for key, help in KEYS_HELP:
        table.add_row(key, Text(help, "dim"))
    return Group(table, "", Text(SUMMARY_HELP, "dim"))


def settings_table(settings: AnswerSettings) -> Table:
    table = make_grid(3)
    for key, (_, help) in KEYS.items():
        table.add_row(key, value_text(settings, key), Text(help, "dim"))
    return table


def settings_help(settings: AnswerSettings, defaults: AnswerSettings) -> RenderableType:
    table = make_table("setting", "now", "default", "meaning")
    for key, (_, help) in KEYS.items():
        table.add_row(key, value_text(settings, key), value_text(defaults, key), Text(help, "dim"))
    return Group(SET_HELP, "", table)


def counters_table(reply: Reply | None, stats: dict[str, Any]) -> Table:
    """The engine's counters by phase, of the last answer and of all since the engine started."""
    last = reply.done.stats if reply is not None else {}
    columns = {
        f"{name}\n{phase}": tree[phase]
        for name, tree in (("answer", last.get("engine", {})), ("engine", stats.get("engine", {})))
        for phase in PHASES
        if isinstance(tree.get(phase), dict)
    }
    table = make_table("", numbers=columns)
    profiles = [PhaseProfile(tree, stats.get("tile_bytes", 0)) for tree in columns.values()]
    moved = [profile.moved for profile in profiles]

    def shares(name: str, parts: Iterable[float], wholes: Iterable[float]) -> None:
        pairs = zip(parts, wholes, strict=True)
        row(name, [part / whole if whole else None for part, whole in pairs], percent)

    def row(name: str, values: Sequence[Any], shown: Callable[[Any], str]) -> None:
        """Left out where every value is 0 or absent."""
        if any(values):
            table.add_row(name, *map(shown, values))

    table.add_row("steps", *(f"{p.steps}" for p in profiles))
    table.add_row("tokens computed", *(f"{p.rows}" for p in profiles))
    tiles = [p.tiles for p in profiles]
    table.add_row("expert tiles", *map(str, tiles))
    shares("  on the host", (p.tree["host_tiles"] for p in profiles), tiles)
    shares("  resident on the device", (p.tree["resident_tiles"] for p in profiles), tiles)
    shares("  fetched to the device", (p.tree["fetched_tiles"] for p in profiles), tiles)
    row("expert hits", [p.hit_rate for p in profiles], percent)
    if any(p.tile_hit_rate != p.hit_rate for p in profiles):
        row("tile hits", [p.tile_hit_rate for p in profiles], percent)
    row("moved on demand", [m["demanded"] for m in moved], byte_size)
    predicted = [m["predicted"] for m in moved]
    row("prefetched", predicted, byte_size)
    shares("  used", (m["useful"] for m in moved), predicted)
    shares("  evicted unused", (m["wasted"] for m in moved), predicted)
    row("  needed before complete", [m["late"] for m in moved], byte_size)
    for kind in profiles[0].fidelity if profiles else ():
        row(f"{kind} of routed weight", [p.fidelity[kind] for p in profiles], percent)
    table.add_row("seconds", *(f"{p.seconds:.2f}" for p in profiles))
    for part in profiles[0].tree["seconds"] if profiles else ():
        spent = (p.tree["seconds"].get(part, 0.0) for p in profiles)
        shares(f"  {part}", spent, (p.seconds for p in profiles))
    return table


def engine_table(stats: dict[str, Any], welcome: Welcome) -> Table:
    table = make_grid(2)
    kinds = (("experts", welcome.format), ("backbone", welcome.backbone_dtype))
    formats = ", ".join(f"{what} {name}" for what, name in kinds if name)
    model = model_name(welcome.model) if welcome.model == str(model_dir()) else welcome.model
    rows: list[tuple[str, str]] = [
        ("policy", f"{stats.get('policy', welcome.policy)} on {welcome.device}"),
        ("model", model + (f" ({formats})" if formats else "")),
        *_scheduler(stats.get("scheduler", {})),
        *_cache(stats.get("cache", {}), stats.get("tile_bytes", 0)),
    ]
    if status := stats.get("prefetch", {}).get("status"):
        rows.append(("prefetching", status))
    if welcome.device != "cpu" and (graphs := stats.get("graphs")):
        rows.append(("CUDA graphs", graphs))
    if link := stats.get("prefetcher"):
        rows.append(("prefetcher", _prefetcher(link)))
    if exchange := stats.get("exchange", {}).get("name"):
        rows.append(("workers", f"get work through {'shared memory' if exchange == 'shm' else 'sockets'}"))
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
        requests += f", {count(s['preemptions'], 'preemption')} so far"
    kv = f"{s['kv_tokens_used']} of {s['kv_tokens']} tokens in use"
    if "kv_tokens_kept" in s:
        kept = count(s.get("conversations", 0), "conversation")
        kv += f", {s['kv_tokens_kept']} kept for {kept}"
    rows = [("requests", requests), ("KV cache", kv)]
    if "kv_reused_tokens" in s:
        rows.append(("KV reused", f"{s['kv_reused_tokens']} tokens so far"))
    rows.append(("prefill", f"{s['prefill_chunk']} tokens per step"))
    return rows


def _cache(c: dict[str, Any], tile_bytes: int) -> list[tuple[str, str]]:
    if not c:
        return []
    resident, capacity = c["resident_tiles"], c["capacity_tiles"]
    return [("expert cache", f"{resident} of {capacity} tiles resident, {byte_size(resident * tile_bytes)}")]


def _prefetcher(link: dict[str, Any]) -> str:
    if reason := link.get("refusal"):
        state = f"copies nothing: {reason}"
    else:
        state = "copies what is predicted" if link["up"] else "being restarted"
    if total := link.get("lockable_bytes"):
        state += f"; {byte_size(link['locked_bytes'])} of {byte_size(total)} page-locked"
    return state


def _call(name: str, arguments: str) -> Text:
    return Text.assemble(name, (f" {arguments}" if arguments else "", "dim"))
