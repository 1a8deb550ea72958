"""The costs that engines have measured on this machine, by which policies plan."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from launch.doctor.finding import Finding, Topic
from launch.terminal.format import count, distinct_names, rate
from pipeline.calibration.cost_cache import FOLDER, Record, measured_here
from shm.segment import byte_size

TOPIC = Topic("costs")
SHOWN = 4  # sets of costs; older ones are only counted
Kept = tuple[Path, Record]


def inspect(cache: Path) -> list[Finding]:
    """A finding for each of the newest sets of this machine's costs."""
    kept = measured_here(cache)
    if not kept:
        means = "an engine with a policy that plans by costs, e.g. fiddler, measures them in two seconds"
        return [TOPIC.ok("no costs have been measured on this machine yet", means)]
    names = distinct_names(record.model for _, record in kept)
    found = [_finding(path, record, names[record.model]) for path, record in kept[:SHOWN]]
    if len(kept) > SHOWN:
        where = f"{len(kept) - SHOWN} older sets, of other models or options, are in {cache / FOLDER}"
        found.append(TOPIC.ok(where, "doctor --model DIR shows the sets of one model"))
    return found


def of_model(cache: Path, fingerprints: Collection[str]) -> list[Kept]:
    """The costs that this machine measured with one of these stores, the newest first."""
    return [(path, record) for path, record in measured_here(cache) if record.setting.store in fingerprints]


def to_map(path: Path, record: Record) -> dict[str, Any]:
    """Map for JSON; `costs` are seconds per tile, as in a file for --costs."""
    return {"file": str(path)} | record.to_json()


def paragraphs(kept: Sequence[Kept]) -> list[tuple[str, list[str]]]:
    """A heading and lines for each set of one model's costs."""
    return [
        (_setting(record), [*explained(record), *[_load(record)] * record.loaded, _where(path)])
        for path, record in kept[:SHOWN]
    ]


def explained(record: Record) -> list[str]:
    """The costs of an expert and of a tile, for one token unless a line names more."""
    costs, tiles = record.costs, record.tiles
    host, device = (float(f(1, tiles)) for f in (costs.host_seconds, costs.device_seconds))
    link = float(costs.link_seconds(tiles))
    most = costs.rows[-1]
    many = [float(f(most, tiles)) for f in (costs.host_seconds, costs.device_seconds)]
    host_first = host <= link + device
    sooner = (
        "computed on the host sooner than moved" if host_first else "moved sooner than computed on the host"
    )
    return [
        f"one expert: host {_time(host)}, device {_time(device)}, move {_time(link)}",
        f"for one token, an expert that is not resident is {sooner}",
        f"for {most} tokens: host {_time(many[0])}, device {_time(many[1])}",
        f"one tile of {byte_size(record.tile_bytes)}: host {_rate(host, record)}, device"
        f" {_rate(device, record)}, link {_rate(link, record)}",
        f"round trip to the workers {_time(costs.round_trip)}, a layer without its experts"
        f" {_time(costs.other[0])}",
    ]


def _finding(path: Path, record: Record, name: str) -> Finding:
    first, *rest = explained(record)
    found = f"{name} ({_setting(record)}): {first}"
    if record.loaded:
        do = f"a start at half of that load or less measures them again; to do so in any case: rm {path}"
        return TOPIC.note(found, "\n".join([*rest, _load(record)]), do)
    return TOPIC.ok(found, "\n".join([*rest, _where(path)]))


def _load(record: Record) -> str:
    return f"too high: other programs were computing (load average {record.load:.1f} before measuring)"


def _where(path: Path) -> str:
    return f"from {path}: delete it to measure again; --costs FILE overrides it"


def _setting(record: Record) -> str:
    s = record.setting
    workers = count(len(s.workers), "worker") if s.workers else "no workers"
    emulated = f", emulated: {s.emulation}" if s.emulation else ""
    day = time.strftime("%Y-%m-%d", time.localtime(record.measured))
    return f"{s.format}, {workers}, {s.device}{emulated}; {day}"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _rate(seconds: float, record: Record) -> str:
    """`seconds`: of all tiles of an expert. The time of one tile, and its rate."""
    tile = seconds / record.tiles
    gbps = "" if not tile else f" ({rate(record.tile_bytes / tile)})"
    return f"{_time(tile)}{gbps}"
