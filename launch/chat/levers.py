"""What would make an answer faster: the changes of settings that are possible on this engine, each with the
speed that it would have given by where the answer's time went (`launch/forecast.py`).

A figure is an estimate where it rests on measured parts alone, and a bound where a part of the time is
assumed to shrink with the bytes read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launch.bench.profile import PhaseProfile
from launch.forecast import TokenTime, format_bytes
from pipeline.assets import model_dir
from protocol.messages import Welcome
from protocol.program import PROGRAM

LEAST_GAIN = 0.05  # of the speed; less is not worth a restart, nor above the noise
SMALLER = ("int8", "int4")
# The embedded model's perplexity above that of bf16 experts, on its held-out text (docs/kernels.md).
EMBEDDED_COST = {"int8": 0.0002, "int4": 0.0069}
SCORE = f"changes answers; `{PROGRAM} score` measures by how much"


@dataclass(frozen=True)
class Lever:
    """A change: what to type, what it does, and the seconds that a token would take with it."""

    setting: str
    effect: str
    seconds: float
    bound: bool = False  # the seconds are the least that it could be


def levers(profile: PhaseProfile, stats: dict[str, Any], welcome: Welcome, policy: str) -> list[Lever]:
    """Changes that would raise the speed of decoding by LEAST_GAIN or more, the largest gain first. `stats`:
    the engine's present Stats; `policy`: the answer's."""
    now, token = profile.seconds / profile.rows, TokenTime.of(profile)
    every = [*_processes(token, stats, welcome), *_formats(token, welcome)]
    every += _placements(token, profile, stats, welcome, policy)
    worth = [lever for lever in every if 0 < lever.seconds <= now / (1 + LEAST_GAIN)]
    return sorted(worth, key=lambda lever: lever.seconds)


def has_workers(stats: dict[str, Any]) -> bool:
    """Whether worker processes compute the host's experts, not the coordinator itself."""
    return any(peer["role"] == "worker" for peer in stats.get("peers", ()))


def _processes(token: TokenTime, stats: dict[str, Any], welcome: Welcome) -> Iterator[Lever]:
    if has_workers(stats) and welcome.device == "cpu" and not welcome.emulation:
        effect = "no messages between processes; if the engine's process crashes, the whole engine restarts"
        # The experts' own computation stays: of each layer, the worker that took longest.
        without = token.with_parts(submit=0.0, combine=0.0, idle=min(0.0, token.parts["idle"]))
        yield Lever("--workers 0", effect, without)


def _formats(token: TokenTime, welcome: Welcome) -> Iterator[Lever]:
    on_cpu, embedded = welcome.device == "cpu", welcome.model == str(model_dir())
    experts = ("host", "link", "device") if on_cpu else ("host", "link")
    backbone = ("attention", "head") if on_cpu else ()  # quantized on the CPU only
    kinds = (("--format", welcome.format, experts), ("--backbone-dtype", welcome.backbone_dtype, backbone))
    for option, present, shrinking in kinds:
        for name in SMALLER:
            if present and shrinking and (ratio := format_bytes(name) / format_bytes(present)) < 1:
                cost = SCORE
                if embedded and option == "--format" and present == "bf16":
                    cost = f"perplexity +{EMBEDDED_COST[name]:.2%} on held-out text"
                effect = f"{1 - ratio:.0%} fewer bytes than {present} to read; {cost}"
                yield Lever(f"{option} {name}", effect, token.scaled(shrinking, ratio), bound=True)


def _placements(
    token: TokenTime, profile: PhaseProfile, stats: dict[str, Any], welcome: Welcome, policy: str
) -> Iterator[Lever]:
    tree, rows = profile.tree, profile.rows
    on_host, fetched = tree["host_tiles"] / rows, tree["fetched_tiles"] / rows
    if welcome.device == "cpu" and not welcome.emulation:
        # The device is these same cores, with torch's kernels instead of the workers', and copied tiles.
        tile = token.parts["host"] / on_host if on_host else _cost(stats, "host")
        if policy != "all-host" and tile:
            effect = "with --device cpu resident tiles are only copies, and the host's kernels are faster"
            in_place = token.with_parts(host=tile * profile.tiles / rows, device=0.0, link=0.0)
            yield Lever("/policy all-host", effect, in_place)
        return
    missing = on_host + fetched
    host = tree["host_busy_s"] / tree["host_tiles"] if on_host else _cost(stats, "host")
    link = token.parts["link"] / fetched if fetched else _cost(stats, "link")
    if host and link and policy != "tandem":  # which plans with both
        effect = "divides missing tiles between host and link, so that both end together"
        yield Lever("/policy tandem", effect, token.missing_divided(missing, host, link), bound=True)
        if policy != "fiddler":
            effect = "computes a missing expert on the host where that is faster than fetching it"
            yield Lever("/policy fiddler", effect, token.missing_cheapest(missing, host, link), bound=True)
    cache = stats.get("cache", {})
    share = cache.get("capacity_tiles", 0) / max(cache.get("all_tiles", 0), 1)
    if 0 < share < 1:
        more = min(1.0, 2 * share)
        fewer = token.scaled(("host", "idle", "link"), (1 - more) / (1 - share))
        effect = "keeps more experts resident, if the device has the memory"
        yield Lever(f"--expert-cache {more:.2g}", effect, fewer)


def _cost(stats: dict[str, Any], kind: str) -> float:
    """Seconds of one tile and one row, as the engine measured them; 0 if it has not."""
    value = stats.get("costs", {}).get(kind, 0.0)
    return float(value[0] if isinstance(value, list) else value)
