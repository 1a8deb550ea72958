"""/why: where the time of the last answer went, in all and by layer, and what may make it faster."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from launch.bench.profile import PhaseProfile
from launch.chat.conversation import Reply
from launch.chat.levers import LEAST_GAIN, Lever, has_workers, levers
from launch.errors import WrongUsage
from launch.terminal.format import percent, three_digits
from launch.terminal.tables import grid, make_table
from protocol.messages import Welcome
from shm.segment import byte_size

SLOWEST = 5  # layers that are shown
NAMED = 0.03  # smaller shares of the time are summed up as "the rest"
CAUSE_NAMES = {
    "workers": "waiting for the workers",
    "link": "waiting for the link",
    "device": "experts on the device",
    "attention": "attention and routers",
    "planning": "planning",
    "messages": "messages and sums",
    "head": "the head",
}


def why_text(reply: Reply | None, stats: dict[str, Any], welcome: Welcome) -> RenderableType:
    """`stats`: the engine's present Stats. Raises WrongUsage without an answer of several tokens."""
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
    parts: list[RenderableType] = [_time(profile, policy, has_workers(stats)), "", _layers(profile), ""]
    parts += [Text(line) for line in facts(profile, answer, stats.get("prefetch", {}))]
    if stats.get("policy") == policy and (status := stats.get("policy_status")):
        parts.append(Text(status))
    parts += [Text(line) for line in cost_changes(stats.get("cost_updates", {}))]
    changes = levers(profile, stats, welcome, policy)
    parts += ["", advice(changes, profile)]
    return Group(*parts)


def _time(profile: PhaseProfile, policy: str, workers: bool) -> Text:
    names = CAUSE_NAMES | ({} if workers else {"workers": "experts on the host"})
    text = Text(f"A token took {_milliseconds(profile.seconds / profile.rows)} under {policy}: ")
    named = [(cause, part) for cause, part in profile.shares.items() if part >= NAMED]
    named.sort(key=lambda item: -item[1])
    rest = 1.0 - sum(part for _, part in named)
    words = [f"{names[cause]} {percent(part)}" for cause, part in named]
    words += [f"the rest {percent(rest)}"] if rest > 0.005 else []
    return text.append(", ".join(words) + ".")


def _layers(profile: PhaseProfile) -> Table:
    table = make_table("slowest", numbers=("per step", "hits"))
    table.add_column("causes", overflow="fold")
    rates = profile.hit_rates
    for layer in profile.layers[:SLOWEST]:
        causes = sorted(layer.causes.items(), key=lambda item: -item[1])
        named = [(cause, spent) for cause, spent in causes if spent >= NAMED * layer.seconds]
        words = ", ".join(f"{cause} {_milliseconds(spent)}" for cause, spent in named[:3])
        cells = (f"layer {layer.layer}", _milliseconds(layer.seconds), percent(rates[layer.layer]))
        table.add_row(*cells, Text(words, "dim"))
    return table


def facts(profile: PhaseProfile, answer: dict[str, Any], prefetch: dict[str, Any]) -> list[str]:
    """A line each for hits, utilization, bytes moved, prefetching and fidelity, where they apply."""
    moved, rows = profile.moved, max(profile.rows, 1)
    lines = []
    if profile.hit_rate is not None:
        tiles = profile.tile_hit_rate
        of_tiles = "" if tiles == profile.hit_rate else f", and {percent(tiles)} of their tiles"
        lines.append(f"hits: {percent(profile.hit_rate)} of the needed experts were resident{of_tiles}")
    host, device = percent(profile.host_busy), percent(profile.device_busy)
    lines.append(
        f"computing: the host (experts) {host} of the time, the device (attention, head, its experts)"
        f" {device}; otherwise they wait"
    )
    if "GPU" in (idle := profile.idle):
        shares = ", ".join(f"{name} {percent(share)}" for name, share in idle.items())
        lines.append(f"idle, by the GPU's own clock: {shares} of the time")
    lines += _sides(profile)
    if moved["demanded"]:
        late = percent(moved["late"] / moved["demanded"])
        also = f", {late} of it already being prefetched" if moved["late"] else ""
        lines.append(f"moved on demand: {byte_size(moved['demanded'] / rows)} per token{also}")
    if moved["predicted"]:
        used, wasted = (percent(moved[kind] / moved["predicted"]) for kind in ("useful", "wasted"))
        size = byte_size(moved["predicted"] / rows)
        lines.append(f"prefetched: {size} per token, {used} of it used, {wasted} evicted unused")
    if prefetch.get("status"):
        lines.append(prefetch["status"])
    if profile.kept_share is not None:
        lines.append(f"channels: {percent(profile.kept_share)} of the experts' were read")
    if (channels := profile.channels) is not None:
        words = f"channels copied: {channels.moved / rows:.0f} per token"
        if channels.experts is not None:
            named, of_them = percent(channels.experts), percent(channels.recall)
            words += f"; predicted were {named} of the experts, and {of_them} of their channels;"
            words += f" {percent(channels.used)} of the predicted channels were used"
        lines.append(words)
    return [*lines, f"fidelity: {_fidelity(answer.get('fidelity', {}))}"]


def _sides(profile: PhaseProfile) -> list[str]:
    """Under plans that divide the missing tiles between host and link: the side that waited for the other,
    and what one more resident tile would do."""
    tree, rows = profile.tree, profile.rows
    on_host, fetched = tree["host_tiles"] / rows, tree["fetched_tiles"] / rows
    if not (on_host and fetched):
        return []
    waits = {name: tree["seconds"][part] / rows for part, name in (("wait", "host"), ("link", "link"))}
    words = " and ".join(f"{_milliseconds(spent)} for the {name}" for name, spent in waits.items())
    # both sides share what a missing tile takes: in the time of one on the link, the host computes some too
    each = sum(waits.values()) / (on_host + fetched)
    return [
        f"divided: of the missing tiles the host computed {on_host:.3g} and the link moved {fetched:.3g} per"
        f" token; the device waited {words}; each more that is resident when it is needed saves about"
        f" {_milliseconds(each)}"
    ]


def cost_changes(updates: dict[str, dict[str, float]]) -> list[str]:
    """A line where the costs that tokens are planned with are no longer those that were measured first."""
    names = {"host": "the host", "device": "the device", "link": "the link"}
    factors = {name: updates.get(side, {}).get("decode", 1.0) for side, name in names.items()}
    changed = [f"{name} takes {factor:.2f} times" for name, factor in factors.items() if factor != 1.0]
    return [f"costs: {', '.join(changed)} as long as was measured first; plans follow"] if changed else []


def _fidelity(fidelity: dict[str, Any]) -> str:
    if fidelity.get("exact", True):
        return "exact"
    shares = {kind: part for kind, part in fidelity.items() if kind != "exact" and part > 0}
    if not shares:
        return "the policy is approximate, but computed all experts as routed"
    words = ", ".join(f"{kind} {percent(part, 1)}" for kind, part in shares.items())
    return f"approximate; of the routed weight: {words}"


def advice(changes: list[Lever], profile: PhaseProfile) -> RenderableType:
    """The levers, the largest gain first."""
    if not changes:
        return Text(f"No setting is known that would make this {percent(LEAST_GAIN)} faster.")
    rows = [
        (Text(lever.setting, "bold"), _gain(lever.seconds, lever.bound), Text(lever.effect, "dim"))
        for lever in changes
    ]
    options = any(lever.setting.startswith("--") for lever in changes)
    start = "; a setting with -- is given at the next start" if options else ""
    now = _speed(profile.seconds / profile.rows)
    return Group(f"What would help, from {now}{start}:", grid(rows))


def _gain(seconds: float, bound: bool) -> str:
    return f"{'at most' if bound else 'about'} {_speed(seconds)}"


def _speed(seconds: float) -> str:
    return f"{three_digits(1 / seconds)} tok/s"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:#.3g} ms"
