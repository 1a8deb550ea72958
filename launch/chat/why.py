"""/why: where the time of the last answer went, in all and by layer, and the settings that may make it
faster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from launch.chat.conversation import Reply
from launch.chat.tables import approximation
from launch.errors import WrongUsage
from launch.profile import NOT_APPLICABLE, LayerTime, PhaseProfile, shown_hits
from launch.terminal.format import percent
from launch.terminal.tables import Column, Grid, Table
from pipeline.policies.view import PolicyRequest
from protocol.messages import Welcome
from protocol.program import PROGRAM
from shm.segment import byte_size

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
    lines += [_machine(each) for each in stats.get("machines") or ()]
    lines += [_disk(stats["disk"])] if "disk" in stats else []
    lines.append(f"fidelity: {approximation(answer.get('fidelity', {})) or 'exact'}")
    parts: list[RenderableType] = [_time(profile, policy, stats), "", _layers(profile, request), ""]
    parts += [Text(line) for line in lines if line]
    return Group(*parts, "", _advice(profile, stats, welcome, policy))


def _machine(machine: dict[str, Any]) -> str:
    """Returns a line about another machine that holds experts."""
    if machine["state"] != "ready":
        return f"machine {machine['name']} is {machine['state']}: {machine['why']}"
    return f"machine {machine['name']}: {machine['round_trip_us']:,.0f} us a layer"


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
