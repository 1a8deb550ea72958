"""/why: where the time of the last answer went, in all and by layer, and what may make it faster."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from launch.chat.conversation import Reply
from launch.errors import WrongUsage
from launch.phase_profile import PhaseProfile
from launch.terminal.format import percent
from launch.terminal.tables import make_table
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

# By cause: a sentence, and policies of which it names the first that is not in use.
POLICY_ADVICE: dict[str, tuple[tuple[str, ...], str]] = {
    "workers": (
        ("fiddler", "bandwidth-split"),
        "Most of the time is spent waiting for the workers: a larger --expert-cache leaves them fewer"
        " experts, a smaller --format (int8, int4) fewer bytes, and a policy that divides the experts"
        " between host and device, e.g. {}, may give more of them to the device.",
    ),
    "link": (
        ("fiddler", "all-host"),
        "Most of the time is spent waiting for the link: a policy that computes experts that are not"
        " resident on the host, e.g. {}, moves less, and a larger --expert-cache keeps more resident.",
    ),
    "device": (
        ("bandwidth-split", "fiddler"),
        "Most of the time is spent on experts on the device: a policy that gives some of them to the host"
        " at the same time, e.g. {}, may be faster.",
    ),
    "planning": (
        ("all-host", "layerwise"),
        "Most of the time is spent on planning: for layers as small as these a decision costs more than"
        " the computation; {} decides least.",
    ),
}
ADVICE = {
    "attention": "Most of the time is spent on attention and other layers than experts: a smaller"
    " --backbone-dtype (int8, int4) reads fewer bytes, a shorter conversation (/reset) less KV.",
    "messages": "Most of the time is spent on messages: for layers as small as these sending costs more than"
    " computing; fewer --workers need fewer messages, and --workers 0 needs none.",
    "head": "Most of the time is spent on the head: the vocabulary is large relative to the layers; a smaller"
    " --backbone-dtype (int8, int4) reads fewer bytes.",
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
    parts: list[RenderableType] = [_time(profile, policy), "", _layers(profile), ""]
    parts += [Text(line) for line in facts(profile, answer, stats.get("prefetch", {}))]
    same_cores = welcome.device == "cpu" and not welcome.emulation
    parts += ["", Text(advice(profile, policy, same_cores), "bold")]
    return Group(*parts)


def _time(profile: PhaseProfile, policy: str) -> Text:
    text = Text(f"A token took {_milliseconds(profile.seconds / profile.rows)} under {policy}: ")
    named = [(cause, part) for cause, part in profile.shares.items() if part >= NAMED]
    named.sort(key=lambda item: -item[1])
    rest = 1.0 - sum(part for _, part in named)
    words = [f"{CAUSE_NAMES[cause]} {percent(part)}" for cause, part in named]
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
        lines.append(f"hits: {percent(profile.hit_rate)} of the needed experts were resident")
    host, device = percent(profile.host_busy), percent(profile.device_busy)
    lines.append(f"busy: host {host}, device {device} of the time")
    if moved["demanded"]:
        late = percent(moved["late"] / moved["demanded"])
        also = f", {late} of it already being prefetched" if moved["late"] else ""
        lines.append(f"moved on demand: {byte_size(moved['demanded'] / rows)} per token{also}")
    if moved["predicted"]:
        used, wasted = (percent(moved[kind] / moved["predicted"]) for kind in ("useful", "wasted"))
        size = byte_size(moved["predicted"] / rows)
        lines.append(f"prefetched: {size} per token, {used} of it used, {wasted} evicted unused")
    if prefetch.get("says"):
        lines.append(prefetch["says"])
    return [*lines, f"fidelity: {_fidelity(answer.get('fidelity', {}))}"]


def _fidelity(fidelity: dict[str, Any]) -> str:
    if fidelity.get("exact", True):
        return "exact"
    shares = {kind: part for kind, part in fidelity.items() if kind != "exact" and part > 0}
    if not shares:
        return "the policy is approximate, but computed all experts as routed"
    words = ", ".join(f"{kind} {percent(part, 1)}" for kind, part in shares.items())
    return f"approximate; of the routed weight: {words}"


def advice(profile: PhaseProfile, policy: str, same_cores: bool) -> str:
    """One sentence for the largest cause. `same_cores`: the device is emulated on the host's cores."""
    cause = max(profile.causes.items(), key=lambda item: item[1])[0]
    if same_cores and cause in ("workers", "link", "device"):
        if policy != "all-host":
            return (
                "Most of the time is spent on experts: with --device cpu the device is these same cores, so"
                " a fetched tile is only a copy; /policy all-host reads every expert in place."
            )
        return "Most of the time is spent on experts: a smaller --format (int8, int4) reads fewer bytes."
    if cause in POLICY_ADVICE:
        policies, sentence = POLICY_ADVICE[cause]
        return sentence.format(f"/policy {next(name for name in policies if name != policy)}")
    return ADVICE[cause]


def _milliseconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:#.3g} ms"
