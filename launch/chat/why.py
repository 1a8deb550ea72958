"""/why: where the time of the last answer went, in all and by layer, and what may make it faster: changes of
settings, each with the speed that it would have given by where the answer's time went."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from launch.bench.profile import LayerTime, PhaseProfile
from launch.chat.conversation import Reply
from launch.chat.tables import approximation
from launch.errors import WrongUsage
from launch.forecast import format_bytes
from launch.terminal.format import percent, three_digits
from launch.terminal.tables import Column, Table, each, grid
from protocol.messages import Welcome
from protocol.program import PROGRAM
from shm.segment import byte_size

SLOWEST = 5  # layers that are shown
NAMED = 0.03  # smaller shares of the time are summed up as "the rest"
LEAST_GAIN = 0.05  # of the speed; less is not worth a restart, nor above the noise
SMALLER = ("int8", "int4")
CAUSE_NAMES = {
    "workers": "experts on the host",
    "link": "waiting for the link",
    "device": "experts on the device",
    "attention": "attention and routers",
    "planning": "planning",
    "messages": "messages and sums",
    "head": "the head",
}


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
    lines = [*_facts(profile), stats.get("prefetch", {}).get("status")]
    lines += [stats.get("policy_status")] if stats.get("policy") == policy else []
    lines.append(f"fidelity: {approximation(answer.get('fidelity', {})) or 'exact'}")
    parts: list[RenderableType] = [_time(profile, policy), "", _layers(profile), ""]
    parts += [Text(line) for line in lines if line]
    return Group(*parts, "", _advice(levers(profile, stats, welcome, policy), profile))


def _time(profile: PhaseProfile, policy: str) -> Text:
    named = sorted(profile.shares.items(), key=lambda item: -item[1])
    words = [f"{CAUSE_NAMES[cause]} {percent(part)}" for cause, part in named if part >= NAMED]
    rest = sum(part for _, part in named if part < NAMED)
    words += [f"the rest {percent(rest)}"] if rest > 0.005 else []
    token = _milliseconds(profile.seconds / profile.rows)
    return Text(f"A token took {token} under {policy}: {', '.join(words)}.")


def _layers(profile: PhaseProfile) -> Table[LayerTime]:
    rates = profile.hit_rates

    def causes(layer: LayerTime) -> str:
        named = sorted(layer.causes.items(), key=lambda item: -item[1])[:3]
        return ", ".join(f"{cause} {_milliseconds(t)}" for cause, t in named if t >= NAMED * layer.seconds)

    columns = [
        Column[LayerTime]("slowest", lambda layer: f"layer {layer.layer}", text=True),
        Column[LayerTime]("per step", lambda layer: _milliseconds(layer.seconds)),
        Column[LayerTime]("hits", lambda layer: rates[layer.layer], each(percent)),
        Column[LayerTime]("causes", causes, text=True, style="dim"),
    ]
    return Table(columns, profile.layers[:SLOWEST])


def _facts(profile: PhaseProfile) -> Iterator[str]:
    """Yields a line each for hits, utilization, bytes moved and prefetching, where they apply."""
    moved, rows = profile.moved, max(profile.rows, 1)
    if profile.hit_rate is not None:
        yield (
            f"hits: {percent(profile.hit_rate)} of the needed experts were resident, and"
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


class Lever(NamedTuple):
    """A change of a setting, and the seconds that a token would take with it at least."""

    setting: str
    seconds: float
    effect: str


def levers(profile: PhaseProfile, stats: dict[str, Any], welcome: Welcome, policy: str) -> list[Lever]:
    """Returns the changes that would raise the speed of decoding by LEAST_GAIN or more, the largest gain
    first. `stats`: the engine's present Stats; `policy`: the answer's."""
    token = profile.seconds / profile.rows
    parts = {part: spent / profile.rows for part, spent in profile.tree["seconds"].items()}
    parts["host"] = min(parts["wait"], profile.host_busy * token)  # the rest of the wait is not for bytes
    every = list(_formats(token, parts, welcome))
    if welcome.device != "cpu" or welcome.emulation:
        every += _with_gpu(token, parts, profile, stats, policy)
    worth = [lever for lever in every if 0 < lever.seconds <= token / (1 + LEAST_GAIN)]
    return sorted(worth, key=lambda lever: lever.seconds)


def _formats(token: float, parts: dict[str, float], welcome: Welcome) -> Iterator[Lever]:
    on_cpu = welcome.device == "cpu"
    experts = parts["host"] + parts["link"] + on_cpu * parts["device"]
    backbone = on_cpu * (parts["attention"] + parts["head"])  # quantized on the CPU only
    kinds = (("--format", welcome.format, experts), ("--backbone-dtype", welcome.backbone_dtype, backbone))
    for option, present, reading in kinds:
        for name in SMALLER:
            if present and reading and (ratio := format_bytes(name) / format_bytes(present)) < 1:
                cost = f"changes answers; `{PROGRAM} score` measures by how much"
                effect = f"{1 - ratio:.0%} fewer bytes than {present} to read; {cost}"
                yield Lever(f"{option} {name}", token - reading * (1 - ratio), effect)


def _with_gpu(
    token: float, parts: dict[str, float], profile: PhaseProfile, stats: dict[str, Any], policy: str
) -> Iterator[Lever]:
    on_host, fetched = (profile.tree[f"{kind}_tiles"] / profile.rows for kind in ("host", "fetched"))
    host = profile.tree["host_busy_s"] / profile.tree["host_tiles"] if on_host else _cost(stats, "host")
    link = parts["link"] / fetched if fetched else _cost(stats, "link")
    beside, missing = token - parts["wait"] - parts["link"], on_host + fetched
    if host and link and policy != "tandem":  # which plans with both
        effect = "divides missing tiles between host and link, so that both end together"
        yield Lever("/policy tandem", beside + missing * host * link / (host + link), effect)
        if policy != "fiddler":
            effect = "computes a missing expert on the host where that is faster than fetching it"
            yield Lever("/policy fiddler", beside + missing * min(host, link), effect)
    cache = stats.get("cache", {})
    share = cache.get("capacity_tiles", 0) / max(cache.get("all_tiles", 0), 1)
    if 0 < share < 1:
        more = min(1.0, 2 * share)
        effect = "keeps more experts resident, if the device has the memory"
        saved = (parts["wait"] + parts["link"]) * (more - share) / (1 - share)
        yield Lever(f"--expert-cache {more:.2g}", token - saved, effect)


def _cost(stats: dict[str, Any], kind: str) -> float:
    """Returns the seconds of one tile and one row, as the engine measured them; 0 if it has not."""
    value = stats.get("costs", {}).get(kind, 0.0)
    return float(value[0] if isinstance(value, list) else value)


def _advice(changes: list[Lever], profile: PhaseProfile) -> RenderableType:
    if not changes:
        return Text(f"No setting is known that would make this {percent(LEAST_GAIN)} faster.")
    rows = [
        (Text(lever.setting, "bold"), f"at most {_speed(lever.seconds)}", Text(lever.effect, "dim"))
        for lever in changes
    ]
    options = any(lever.setting.startswith("--") for lever in changes)
    start = "; a setting with -- is given at the next start" if options else ""
    return Group(f"What would help, from {_speed(profile.seconds / profile.rows)}{start}:", grid(rows))


def _speed(seconds: float) -> str:
    return f"{three_digits(1 / seconds)} tok/s"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:#.3g} ms"
