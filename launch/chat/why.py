"""/why: what the last answer's tokens took their time for, layer by layer, and what could be tried."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from launch.chat.answer import in_bytes, share
from launch.chat.conversation import Reply
from launch.errors import WrongUsage
from launch.phase_profile import PhaseProfile
from protocol.messages import Welcome

SLOWEST = 5  # layers that are shown
NAMED = 0.03  # share of the time below which a cause is not named
WORDS = {
    "workers": "waiting for the workers",
    "link": "waiting for the link",
    "device": "experts on the device",
    "attention": "attention and routers",
    "planning": "planning",
    "messages": "messages to the workers and sums",
    "head": "the head",
}

# By cause: policies of which the first that is not in use may help, and the sentence that names it.
OTHER: dict[str, tuple[tuple[str, ...], str]] = {
    "workers": (
        ("fiddler", "bandwidth-split"),
        "It waits for the workers: more --expert-cache leaves them less, a smaller --format (int8, int4) has"
        " less to read, and a policy that shares the work, e.g. {}, may have the device do more of it.",
    ),
    "link": (
        ("fiddler", "all-host"),
        "It waits for the link: a policy that computes on the host what is not on the device, e.g. {}, moves"
        " less, and more --expert-cache keeps more there.",
    ),
    "device": (
        ("bandwidth-split", "fiddler"),
        "Experts on the device take most: a policy that has the host compute a part of them meanwhile, e.g."
        " {}, may be faster.",
    ),
    "planning": (
        ("all-host", "layerwise"),
        "Planning takes most: the layers are so small that deciding costs more than computing; {} decides"
        " least.",
    ),
}
ADVICE = {
    "attention": "Attention and what else is not an expert take most: a smaller --backbone-dtype (int8, int4)"
    " has less to read, and a shorter conversation (/reset) less to attend to.",
    "messages": "Messages take most: the layers are so small that sending costs more than computing; fewer"
    " --workers send less, and --workers 0 nothing.",
    "head": "The head takes most: the vocabulary is large beside the layers; a smaller --backbone-dtype"
    " (int8, int4) has less to read.",
}


def why_text(reply: Reply | None, stats: dict[str, Any], welcome: Welcome) -> RenderableType:
    """`stats`: the engine's now. Raises WrongUsage where there is no answer to explain."""
    if reply is None:
        raise WrongUsage("there is no answer to explain yet; ask something first")
    told = reply.done.stats
    counted = told.get("engine", {})
    if not counted.get("decode", {}).get("steps"):
        raise WrongUsage(
            "the last answer has one token at most, and that came of reading the prompt: nothing to explain"
        )
    profile = PhaseProfile(counted["decode"], stats.get("tile_bytes", 0))
    policy = told.get("policy", welcome.policy)
    parts: list[RenderableType] = [_time(profile, policy), "", _layers(profile), ""]
    parts += [Text(line) for line in facts(profile, told, stats.get("prefetch", {}))]
    same_cores = welcome.device == "cpu" and not welcome.emulation
    parts += ["", Text(advice(profile, policy, same_cores), "bold")]
    return Group(*parts)


def _time(profile: PhaseProfile, policy: str) -> Text:
    """Where the time of a token went, in one line."""
    text = Text(f"A token took {_milliseconds(profile.seconds / profile.rows)} under {policy}: ")
    named = [(cause, part) for cause, part in profile.shares.items() if part >= NAMED]
    named.sort(key=lambda item: -item[1])
    rest = 1.0 - sum(part for _, part in named)
    words = [f"{WORDS[cause]} {share(part, 1)}" for cause, part in named]
    words += [f"the rest {share(rest, 1)}"] if rest > 0.005 else []
    return text.append(", ".join(words) + ".")


def _layers(profile: PhaseProfile) -> Table:
    """The slowest layers and what each took its time for."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    slowest = profile.layers[:SLOWEST]
    table.add_column("slowest")
    for name in ("a step", "hits"):
        table.add_column(name, justify="right")
    table.add_column("of which", overflow="fold")
    rates = profile.hit_rates
    for layer in slowest:
        causes = sorted(layer.causes.items(), key=lambda item: -item[1])
        named = [(cause, spent) for cause, spent in causes if spent >= NAMED * layer.seconds]
        words = ", ".join(f"{cause} {_milliseconds(spent)}" for cause, spent in named[:3])
        rate = rates[layer.layer]
        hits = "-" if rate is None else share(rate, 1)
        table.add_row(f"layer {layer.layer}", _milliseconds(layer.seconds), hits, Text(words, "dim"))
    return table


def facts(profile: PhaseProfile, told: dict[str, Any], prefetch: dict[str, Any]) -> list[str]:
    """Hits, bytes, prediction's use, fidelity: a line for each that has something to say."""
    moved, rows = profile.moved, max(profile.rows, 1)
    lines = []
    if profile.hit_rate is not None:
        lines.append(f"hits: {share(profile.hit_rate, 1)} of the needed experts lay on the device as a whole")
    busy = f"host {share(profile.host_busy, 1)}, device {share(profile.device_busy, 1)} of the time"
    lines.append(f"busy: {busy}")
    if moved["demanded"]:
        late = share(moved["late"], moved["demanded"])
        also = f", {late} of it on its way already" if moved["late"] else ""
        lines.append(f"moved: {in_bytes(moved['demanded'] / rows)} a token when a step needed it{also}")
    if moved["predicted"]:
        used, wasted = (share(moved[kind], moved["predicted"]) for kind in ("useful", "wasted"))
        size = in_bytes(moved["predicted"] / rows)
        lines.append(f"prefetched: {size} a token, {used} of it of use, {wasted} dropped unused")
    if prefetch.get("says"):
        lines.append(prefetch["says"])
    return [*lines, f"fidelity: {fidelity_words(told.get('fidelity', {}))}"]


def fidelity_words(fidelity: dict[str, Any]) -> str:
    """What an answer's stats say of how it was approximated."""
    if fidelity.get("exact", True):
        return "exact"
    shares = {kind: part for kind, part in fidelity.items() if kind != "exact" and part > 0}
    if not shares:
        return "an approximate policy, and nothing was left out"
    words = ", ".join(f"{kind} {100 * part:.1f} %" for kind, part in shares.items())
    return f"approximate; of the weight that the routers gave: {words}"


def advice(profile: PhaseProfile, policy: str, same_cores: bool) -> str:
    """One sentence for the cause that takes most. `same_cores`: the device is the host's own cores."""
    cause = max(profile.causes.items(), key=lambda item: item[1])[0]
    if same_cores and cause in ("workers", "link", "device"):
        if policy != "all-host":
            return (
                "Experts take most: the device is these same cores, so what is moved is only copied; /policy"
                " all-host reads every expert where it lies."
            )
        return "Experts take most: a smaller --format (int8, int4) has less to read."
    if cause in OTHER:
        other = next(name for name in OTHER[cause][0] if name != policy)
        return OTHER[cause][1].format(f"/policy {other}")
    return ADVICE[cause]


def _milliseconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:#.3g} ms"
