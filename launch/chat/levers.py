"""What would make an answer faster, computed from where its time went: the changes of settings that are
possible on this engine, each with the speed that it would have given.

A figure is an estimate where it rests on measured parts alone, and a bound where a part of the time is
assumed to shrink with the bytes read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launch.phase_profile import PhaseProfile
from protocol.messages import Welcome
from shm.layout import format_named

LEAST_GAIN = 0.05  # of the speed; less is not worth a restart, nor above the noise
SIDE = 1024  # of a matrix whose formats' sizes are compared
SMALLER = ("int8", "int4")


@dataclass(frozen=True)
class Lever:
    """A change: what to type, what it does, and the seconds that a token would take with it."""

    setting: str
    effect: str
    seconds: float
    bound: bool = False  # the seconds are the least that it could be


def levers(profile: PhaseProfile, stats: dict[str, Any], welcome: Welcome, policy: str) -> list[Lever]:
    """Those that would raise the speed of decoding by LEAST_GAIN or more, the largest gain first. `stats`:
    the engine's present Stats; `policy`: the answer's."""
    now = _now(profile)
    found = [*_processes(profile, stats, welcome), *_formats(profile, welcome)]
    found += _placements(profile, stats, welcome, policy)
    worth = [lever for lever in found if 0 < lever.seconds <= now / (1 + LEAST_GAIN)]
    return sorted(worth, key=lambda lever: lever.seconds)


def has_workers(stats: dict[str, Any]) -> bool:
    """Whether worker processes compute the host's experts, not the coordinator itself."""
    return any(peer["role"] == "worker" for peer in stats.get("peers", ()))


def _processes(profile: PhaseProfile, stats: dict[str, Any], welcome: Welcome) -> Iterator[Lever]:
    if not has_workers(stats) or welcome.device != "cpu" or welcome.emulation:
        return
    parts = _parts(profile)
    # The experts' own computation stays: of each layer, the worker that took longest.
    exchange = parts["submit"] + parts["combine"] + max(0.0, parts["wait"] - _busy(profile))
    effect = "no messages between processes; if the engine's process crashes, the whole engine restarts"
    yield Lever("--workers 0", effect, _now(profile) - exchange)


def _formats(profile: PhaseProfile, welcome: Welcome) -> Iterator[Lever]:
    parts, on_cpu = _parts(profile), welcome.device == "cpu"
    experts = _busy(profile) + parts["link"] + (parts["device"] if on_cpu else 0.0)
    backbone = parts["attention"] + parts["head"] if on_cpu else 0.0  # quantized on the CPU only
    kinds = (("--format", welcome.format, experts), ("--backbone-dtype", welcome.backbone_dtype, backbone))
    for option, present, spent in kinds:
        for name in SMALLER:
            if present and (ratio := _bytes(name) / _bytes(present)) < 1:
                effect = f"{1 - ratio:.0%} fewer bytes than {present} to read; rounds the weights"
                yield Lever(f"{option} {name}", effect, _now(profile) - spent * (1 - ratio), bound=True)


def _placements(
    profile: PhaseProfile, stats: dict[str, Any], welcome: Welcome, policy: str
) -> Iterator[Lever]:
    parts, tree, rows = _parts(profile), profile.tree, profile.rows
    missing = (tree["host_tiles"] + tree["fetched_tiles"]) / rows
    host = tree["host_busy_s"] / tree["host_tiles"] if tree["host_tiles"] else _cost(stats, "host")
    fetched = tree["fetched_tiles"] / rows
    link = parts["link"] / fetched if fetched else _cost(stats, "link")
    if welcome.device == "cpu" and not welcome.emulation:
        # The device is these same cores: what it computes, the host computes as fast, without a copy.
        if policy != "all-host" and fetched:
            effect = "with --device cpu a fetched tile is only a copy; every expert is read in place"
            yield Lever("/policy all-host", effect, _now(profile) - parts["link"])
        return
    if host and link:
        others = _now(profile) - parts["wait"] - parts["link"]
        split = missing * host * link / (host + link)
        best = missing * min(host, link)
        effects = (
            ("bandwidth-split", "divides missing tiles between host and link by their speeds", split),
            ("fiddler", "computes a missing expert on the host where that is faster than fetching it", best),
        )
        for name, effect, seconds in effects:
            if name != policy:
                yield Lever(f"/policy {name}", effect, others + seconds, bound=True)
    cache = stats.get("cache", {})
    share = cache.get("capacity_tiles", 0) / max(cache.get("all_tiles", 0), 1)
    if 0 < share < 1:
        more = min(1.0, 2 * share)
        waiting = (parts["wait"] + parts["link"]) * (more - share) / (1 - share)
        effect = "keeps more experts resident, if the device has the memory"
        yield Lever(f"--expert-cache {more:.2g}", effect, _now(profile) - waiting)


def _now(profile: PhaseProfile) -> float:
    return profile.seconds / profile.rows


def _busy(profile: PhaseProfile) -> float:
    return profile.host_busy * profile.seconds / profile.rows


def _parts(profile: PhaseProfile) -> dict[str, float]:
    """Seconds of a token by part of a step."""
    return {part: spent / profile.rows for part, spent in profile.tree["seconds"].items()}


def _cost(stats: dict[str, Any], kind: str) -> float:
    """Seconds of one tile and one row, as the engine measured them; 0 if it has not."""
    value = stats.get("costs", {}).get(kind, 0.0)
    return float(value[0] if isinstance(value, list) else value)


def _bytes(format_name: str) -> int:
    return format_named(format_name).tile_bytes(SIDE, SIDE)
