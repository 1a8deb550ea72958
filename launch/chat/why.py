"""/why: where the time of the last answer went, in all and by layer, and the settings that may make it
faster. And the texts and tables of the chat's other commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from launch.chat.conversation import KEYS, Reply, Settings
from launch.errors import WrongUsage
from launch.profile import NOT_APPLICABLE, LayerTime, PhaseProfile, shown_hits
from launch.terminal.format import MISSING, count, model_name, percent
from launch.terminal.tables import Column, Grid, Table
from pipeline.arrays import PHASES
from pipeline.assets import model_dir
from pipeline.policies.presets import PRESETS, Preset
from pipeline.policies.view import PolicyRequest
from protocol.messages import Welcome
from protocol.program import PROGRAM
from shm.segment import byte_size

# ----------------------------------------------------------------------------------------------------------
# Texts and tables of a chat's commands: /help, /policy, /set and /stats, each within 80 columns, and the
# line below an answer.


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
        if mtp := g.get("sources", {}).get("mtp"):
            cost = f"{mtp['more_seconds']:+.1f} s"
            yield "by the MTP layer", f"{mtp['drafted']}, of which {mtp['accepted']} came true; {cost}"
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


# --- /why ---------------------------------------------------------------------------------------------------

SLOWEST = 5  # layers that are shown
NAMED = 0.03  # smaller shares of the time are summed up as "the rest"
LEAST_SHARE = 0.15  # of the time: less is not worth a change of settings
LARGER = ("f32", "bf16", "int8")  # formats than int4
CAUSE_NAMES = {
    "workers": "waiting for the workers",
    "link": "waiting for the link",
    "disk": "waiting for the disk",
    "device": "experts on the device",
    "attention": "attention and routers",
    "planning": "planning",
    "messages": "messages and sums",
    "head": "the head",
}

WITHOUT_WORKERS = {"workers": "experts on the host"}


def why_text(reply: Reply | None, stats: dict[str, Any], welcome: Welcome) -> RenderableType:
    """Explains an answer. `stats`: the engine's present Stats. Raises WrongUsage without an answer of several
    tokens."""
    if reply is None:
        raise WrongUsage("no answer to explain yet; ask something first")
    answer = reply.done.stats
    counters = answer.get("engine", {})
    if not counters.get("decode", {}).get("steps"):
        raise WrongUsage(
            "nothing to explain: the last answer has at most one token, which the prefill computed"
        )
    profile = PhaseProfile(counters["decode"], stats.get("tile_bytes", 0))
    policy = answer.get("policy", welcome.policy)
    options = stats.get("policy_options", {}) if stats.get("policy") == policy else {}
    request = PolicyRequest(policy, options)
    lines = [*_facts(profile, request), stats.get("prefetch", {}).get("status")]
    lines += [stats.get("policy_status")] if stats.get("policy") == policy else []
    lines += [_machine(each, _seconds(stats)) for each in stats.get("machines") or ()]
    lines += [_disk(stats["disk"])] if "disk" in stats else []
    lines.append(f"fidelity: {approximation(answer.get('fidelity', {})) or 'exact'}")
    parts: list[RenderableType] = [_time(profile, policy, stats), "", _layers(profile, request), ""]
    parts += [Text(line) for line in lines if line]
    return Group(*parts, "", _advice(profile, stats, welcome, policy))


def _seconds(stats: dict[str, Any]) -> float:
    """Returns the seconds of all steps since the engine's start."""
    return sum(sum(phase["seconds"].values()) for phase in stats["engine"].values())


def _machine(machine: dict[str, Any], seconds: float) -> str:
    """Returns a line about another machine that holds experts. `seconds`: of all steps."""
    if machine["state"] != "ready":
        return f"machine {machine['name']} is {machine['state']}: {machine['why']}"
    waited = percent(machine["waited_s"] / seconds) if seconds else "0%"
    return (
        f"machine {machine['name']}: {percent(machine['share'])} of each expert,"
        f" {machine['round_trip_us']:,.0f} us a layer, of which it computes {machine['computing_us']:,.0f};"
        f" {waited} of all steps was spent waiting for it alone"
    )


def _disk(disk: dict[str, Any]) -> str:
    """Returns a line about experts that are read from disk, since the engine's start."""
    needed = max(disk["hits"] + disk["misses"], 1)
    return (
        f"disk: {disk['resident_experts']} of {disk['all_experts']} experts are in memory;"
        f" {percent(disk['hits'] / needed)} of the needed ones were there, {byte_size(disk['bytes'])} were"
        f" read from {disk['file']}"
    )


def _time(profile: PhaseProfile, policy: str, stats: dict[str, Any]) -> Text:
    names = CAUSE_NAMES | ({} if "exchange" in stats else WITHOUT_WORKERS)
    named = sorted(profile.shares.items(), key=lambda item: -item[1])
    words = [f"{names[cause]} {percent(part)}" for cause, part in named if part >= NAMED]
    rest = sum(part for _, part in named if part < NAMED)
    words += [f"the rest {percent(rest)}"] if rest > 0.005 else []
    token = _milliseconds(profile.seconds / profile.rows)
    return Text(f"A token took {token} under {policy}: {', '.join(words)}.")


def _layers(profile: PhaseProfile, policy: PolicyRequest) -> Table[LayerTime]:
    rates = profile.hit_rates

    def causes(layer: LayerTime) -> str:
        named = sorted(layer.causes.items(), key=lambda item: -item[1])[:3]
        return ", ".join(f"{cause} {_milliseconds(t)}" for cause, t in named if t >= NAMED * layer.seconds)

    columns = [
        Column[LayerTime]("slowest", lambda layer: f"layer {layer.layer}", text=True),
        Column[LayerTime]("per step", lambda layer: _milliseconds(layer.seconds)),
        Column[LayerTime]("hits", lambda layer: shown_hits(rates[layer.layer], policy)),
        Column[LayerTime]("causes", causes, text=True, style="dim"),
    ]
    return Table(columns, profile.layers[:SLOWEST])


def _facts(profile: PhaseProfile, policy: PolicyRequest) -> Iterator[str]:
    """Yields a line each for hits, utilization, bytes moved and prefetching, where they apply."""
    moved, rows = profile.moved, max(profile.rows, 1)
    hits = shown_hits(profile.hit_rate, policy)
    if hits == NOT_APPLICABLE:
        yield f"hits: {hits}: {policy.name} keeps no experts on the device"
    elif hits is not None:
        yield (
            f"hits: {hits} of the needed experts were resident, and"
            f" {percent(profile.tile_hit_rate)} of their tiles"
        )
    host, device = percent(profile.host_busy), percent(profile.device_busy)
    yield (
        f"computing: the host (experts) {host} of the time, the device (attention, head, its experts)"
        f" {device}; otherwise they wait"
    )
    if moved["demanded"]:
        late = percent(moved["late"] / moved["demanded"])
        also = f", {late} of it already being prefetched" if moved["late"] else ""
        yield f"moved on demand: {byte_size(moved['demanded'] / rows)} per token{also}"
    if moved["predicted"]:
        used, wasted = (percent(moved[kind] / moved["predicted"]) for kind in ("useful", "wasted"))
        size = byte_size(moved["predicted"] / rows)
        yield f"prefetched: {size} per token, {used} of it used, {wasted} evicted unused"
    if profile.kept_share is not None:
        yield f"channels: {percent(profile.kept_share)} of the experts' were read"


def _advice(profile: PhaseProfile, stats: dict[str, Any], welcome: Welcome, policy: str) -> RenderableType:
    changes = dict(_changes(profile, stats, welcome, policy))
    rows = [(Text(setting, "bold"), Text(effect, "dim")) for setting, effect in changes.items()]
    if not rows:
        return Text("No setting is known that would make this faster.")
    more = f"`{PROGRAM} advise` predicts the speed of policies, formats and caches."
    return Group("What may help (what begins with -- is given at the next start):", Grid(rows), Text(more))


def _changes(
    profile: PhaseProfile, stats: dict[str, Any], welcome: Welcome, policy: str
) -> Iterator[tuple[str, str]]:
    """Yields changes of settings with their effects, for what took most of the time first."""
    cost = f"changes answers; `{PROGRAM} score` measures by how much"
    for cause, share in sorted(profile.shares.items(), key=lambda item: -item[1]):
        if share < LEAST_SHARE:
            return
        if cause in ("workers", "link") and policy != "tandem" and welcome.device != "cpu":
            yield "/policy tandem", "divides missing tiles between host and link, so that both end together"
        if (
            cause == "link"
            and 0 < stats.get("cache", {}).get("capacity_tiles", 0) < stats["cache"]["all_tiles"]
        ):
            yield "--expert-cache", "a larger one keeps more experts resident, if the device has the memory"
        if cause == "disk":
            yield "--host-memory", "a larger one has more experts in memory, if it is there"
            if welcome.format in LARGER:
                yield "--format int4", f"less is read of each expert; {cost}"
        if cause in ("workers", "messages") and welcome.device == "cpu" and "exchange" in stats:
            yield "--workers 0", "computes experts without other processes to wait for"
        if cause == "workers" and welcome.format in LARGER:
            yield "--format int4", f"fewer bytes than {welcome.format} to read; {cost}"
        if cause == "attention" and welcome.device == "cpu" and welcome.backbone_dtype in LARGER:
            yield "--backbone-dtype int4", f"fewer bytes than {welcome.backbone_dtype} to read; {cost}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:#.3g} ms"
