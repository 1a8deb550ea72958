"""What would make an answer faster, computed from where its time went: the changes of settings that are
possible on this engine, each with the speed that it would have given, and the best of them together.

A figure is an estimate where it rests on measured parts alone, and a bound where a part of the time is
assumed to shrink with the bytes read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launch.bench.profile import PhaseProfile
from pipeline.assets import model_dir
from protocol.messages import Welcome
from protocol.program import PROGRAM
from shm.layout import format_named

LEAST_GAIN = 0.05  # of the speed; less is not worth a restart, nor above the noise
SIDE = 1024  # of a matrix whose formats' sizes are compared
SMALLER = ("int8", "int4")
POLICY = "policy"  # the kind of levers
TOGETHER = 3  # levers that are combined, at most
# The embedded model's perplexity above that of bf16 experts, on its held-out text (docs/kernels.md).
EMBEDDED_COST = {"int8": 0.0002, "int4": 0.0069}
SCORE = f"changes answers; `{PROGRAM} score` measures by how much"

Parts = dict[str, float]  # seconds of a token by part of a step, see `_parts`


@dataclass(frozen=True)
class Lever:
    """A change: what to type, what it does, and what remains of each part of a token's time with it. Of the
    levers of one `kind` only one can be chosen."""

    kind: str
    setting: str
    effect: str
    parts: Callable[[Parts], Parts]
    seconds: float  # that a token would take
    bound: bool = False  # the seconds are the least that it could be


def levers(profile: PhaseProfile, stats: dict[str, Any], welcome: Welcome, policy: str) -> list[Lever]:
    """Those that would raise the speed of decoding by LEAST_GAIN or more, the largest gain first. `stats`:
    the engine's present Stats; `policy`: the answer's."""
    now = profile.seconds / profile.rows
    found = [*_processes(profile, stats, welcome), *_formats(profile, welcome)]
    found += _placements(profile, stats, welcome, policy)
    worth = [lever for lever in found if 0 < lever.seconds <= now / (1 + LEAST_GAIN)]
    return sorted(worth, key=lambda lever: lever.seconds)


def together(found: Sequence[Lever], profile: PhaseProfile) -> tuple[list[Lever], float]:
    """The best levers that can be combined, at most TOGETHER, and the seconds of a token with all of them.
    `found`: as `levers` returns them."""
    best = list({lever.kind: lever for lever in reversed(found)}.values())
    chosen = sorted(best, key=lambda lever: lever.seconds)[:TOGETHER]
    return chosen, sum(_parts(profile).values()) - sum(savings(chosen, profile))


def savings(chosen: Sequence[Lever], profile: PhaseProfile) -> list[float]:
    """The seconds of a token that each of these levers takes off what the others before it leave: a policy's,
    then those of the rest in their order."""
    parts, found = _parts(profile), {}
    # A policy divides the missing tiles anew; what it leaves to do shrinks with the others.
    for lever in sorted(chosen, key=lambda lever: lever.kind != POLICY):
        before, parts = parts, lever.parts(parts)
        found[lever.kind] = sum(before.values()) - sum(parts.values())
    return [found[lever.kind] for lever in chosen]


def has_workers(stats: dict[str, Any]) -> bool:
    """Whether worker processes compute the host's experts, not the coordinator itself."""
    return any(peer["role"] == "worker" for peer in stats.get("peers", ()))


def _processes(profile: PhaseProfile, stats: dict[str, Any], welcome: Welcome) -> Iterator[Lever]:
    if not has_workers(stats) or welcome.device != "cpu" or welcome.emulation:
        return
    effect = "no messages between processes; if the engine's process crashes, the whole engine restarts"

    def without(parts: Parts) -> Parts:
        # The experts' own computation stays: of each layer, the worker that took longest.
        return parts | {"submit": 0.0, "combine": 0.0, "idle": min(0.0, parts["idle"])}

    yield _lever("workers", "--workers 0", effect, without, profile)


def _formats(profile: PhaseProfile, welcome: Welcome) -> Iterator[Lever]:
    on_cpu, embedded = welcome.device == "cpu", welcome.model == str(model_dir())
    experts = ("host", "link", "device") if on_cpu else ("host", "link")
    backbone = ("attention", "head") if on_cpu else ()  # quantized on the CPU only
    kinds = (("--format", welcome.format, experts), ("--backbone-dtype", welcome.backbone_dtype, backbone))
    for option, present, shrinking in kinds:
        for name in SMALLER:
            if present and shrinking and (ratio := _bytes(name) / _bytes(present)) < 1:
                cost = SCORE
                if embedded and option == "--format" and present == "bf16":
                    cost = f"perplexity +{EMBEDDED_COST[name]:.2%} on held-out text"
                effect = f"{1 - ratio:.0%} fewer bytes than {present} to read; {cost}"
                yield _lever(
                    option, f"{option} {name}", effect, _scaled(shrinking, ratio), profile, bound=True
                )


def _placements(
    profile: PhaseProfile, stats: dict[str, Any], welcome: Welcome, policy: str
) -> Iterator[Lever]:
    parts, tree, rows = _parts(profile), profile.tree, profile.rows
    missing = (tree["host_tiles"] + tree["fetched_tiles"]) / rows
    host = tree["host_busy_s"] / tree["host_tiles"] if tree["host_tiles"] else _cost(stats, "host")
    fetched = tree["fetched_tiles"] / rows
    link = parts["link"] / fetched if fetched else _cost(stats, "link")
    if welcome.device == "cpu" and not welcome.emulation:
        # The device is these same cores, with torch's kernels instead of the workers', and copied tiles.
        tile = parts["host"] / tree["host_tiles"] * rows if tree["host_tiles"] else _cost(stats, "host")
        if policy != "all-host" and tile:
            effect = "with --device cpu resident tiles are only copies, and the host's kernels are faster"
            in_place = {"host": tile * profile.tiles / rows, "device": 0.0, "link": 0.0}
            yield _lever(POLICY, "/policy all-host", effect, lambda parts: parts | in_place, profile)
        return
    if host and link and policy != "tandem":  # which plans with both
        split = missing * host * link / (host + link)
        best = missing * min(host, link)
        effects = (
            ("tandem", "divides missing tiles between host and link, so that both end together", split),
            ("fiddler", "computes a missing expert on the host where that is faster than fetching it", best),
        )
        for name, effect, seconds in effects:
            if name != policy:
                replaced = _replaced(seconds)
                yield _lever(POLICY, f"/policy {name}", effect, replaced, profile, bound=True)
    cache = stats.get("cache", {})
    share = cache.get("capacity_tiles", 0) / max(cache.get("all_tiles", 0), 1)
    if 0 < share < 1:
        more = min(1.0, 2 * share)
        fewer = _scaled(("host", "idle", "link"), (1 - more) / (1 - share))
        effect = "keeps more experts resident, if the device has the memory"
        yield _lever("cache", f"--expert-cache {more:.2g}", effect, fewer, profile)


def _lever(
    kind: str,
    setting: str,
    effect: str,
    parts: Callable[[Parts], Parts],
    profile: PhaseProfile,
    bound: bool = False,
) -> Lever:
    return Lever(kind, setting, effect, parts, sum(parts(_parts(profile)).values()), bound)


def _scaled(names: Sequence[str], ratio: float) -> Callable[[Parts], Parts]:
    return lambda parts: parts | {name: parts[name] * ratio for name in names}


def _replaced(seconds: float) -> Callable[[Parts], Parts]:
    """The missing tiles take these seconds, whatever they took before."""
    return lambda parts: parts | {"host": 0.0, "idle": 0.0, "link": seconds}


def _parts(profile: PhaseProfile) -> Parts:
    """Seconds of a token by part of a step. Waiting for the host's experts is divided into `host`, the time
    in which they were computed, and `idle`, the rest: negative where the coordinator computed meanwhile."""
    parts = {part: spent / profile.rows for part, spent in profile.tree["seconds"].items()}
    host = profile.host_busy * profile.seconds / profile.rows
    wait = parts.pop("wait")
    return parts | {"host": host, "idle": wait - host}


def _cost(stats: dict[str, Any], kind: str) -> float:
    """Seconds of one tile and one row, as the engine measured them; 0 if it has not."""
    value = stats.get("costs", {}).get(kind, 0.0)
    return float(value[0] if isinstance(value, list) else value)


def _bytes(format_name: str) -> int:
    tile_format = format_named(format_name)
    return tile_format.head_bytes(SIDE, SIDE) + tile_format.tile_bytes(SIDE, SIDE)
