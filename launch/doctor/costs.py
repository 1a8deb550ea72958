"""What policies plan with on this machine: the costs that engines have measured here and keep."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from launch.doctor.finding import Finding
from pipeline.assets import model_dir
from pipeline.calibration.cost_cache import FOLDER, Record, measured_here
from pipeline.models.shapes import short_name

TOPIC = "costs"
SHOWN = 4  # sets of costs; the others are counted
LOADED = 0.5  # load average for each core, from which on what was measured is not this machine's
Kept = tuple[Path, Record]


def inspect(cache: Path) -> list[Finding]:
    """A finding for each of the newest sets of costs of this machine."""
    kept = measured_here(cache)
    if not kept:
        means = "the first engine whose policy plans with costs (fiddler, say) measures them, in two seconds"
        return [Finding(TOPIC, "ok", "no costs have been measured here yet", means)]
    found = [_finding(path, record) for path, record in kept[:SHOWN]]
    if len(kept) > SHOWN:
        where = f"{len(kept) - SHOWN} older ones, of other models or options, are in {cache / FOLDER}"
        found.append(Finding(TOPIC, "ok", where, "doctor --model DIR shows those of a model"))
    return found


def of_model(cache: Path, fingerprints: Collection[str]) -> list[Kept]:
    """What was measured here with one of these stores, the newest first."""
    return [(path, record) for path, record in measured_here(cache) if record.setting.store in fingerprints]


def to_map(path: Path, record: Record) -> dict[str, Any]:
    """For JSON: `costs` are seconds per tile, as in a file for --costs."""
    return {"file": str(path)} | record.to_json()


def paragraphs(kept: Sequence[Kept]) -> list[tuple[str, list[str]]]:
    """For a person, of one model's: a heading and lines for each set."""
    return [(_setting(record), [*explained(record), _anew(path)]) for path, record in kept[:SHOWN]]


def explained(record: Record) -> list[str]:
    """What the costs say of an expert and of a tile; of one token, where nothing else is said."""
    costs, tiles = record.costs, record.tiles
    host, device = (float(f(1, tiles)) for f in (costs.host_seconds, costs.device_seconds))
    link = float(costs.link_seconds(tiles))
    most = costs.rows[-1]
    many = [float(f(most, tiles)) for f in (costs.host_seconds, costs.device_seconds)]
    if host <= link + device:
        pays = "one that is not on the device is sooner computed on the host than moved for one token"
    else:
        pays = "one that is not on the device is sooner moved there than computed on the host"
    return [
        f"an expert: host {_time(host)}, device {_time(device)}, moving it {_time(link)}",
        pays,
        f"for {most} tokens: host {_time(many[0])}, device {_time(many[1])}",
        f"a tile of {record.tile_bytes / 1e6:.2f} MB: host {_rate(host, record)}, device"
        f" {_rate(device, record)}, link {_rate(link, record)}",
        f"the workers' round trip {_time(costs.round_trip)}, a layer without its experts"
        f" {_time(costs.other[0])}",
    ]


def _finding(path: Path, record: Record) -> Finding:
    first, *rest = explained(record)
    found = f"{_name(record)} ({_setting(record)}): {first}"
    loaded = record.load > LOADED * record.setting.cores
    if loaded:
        rest.append(f"the load average was {record.load:.1f} just before: other programs computed, too")
    means = "\n".join(rest)
    if loaded:
        return Finding(TOPIC, "note", found, means, f"to have them measured anew: rm {path}")
    return Finding(TOPIC, "ok", found, f"{means}\n{_anew(path)}")


def _anew(path: Path) -> str:
    return f"kept in {path}: delete it to have them measured anew; --costs FILE overrides them"


def _name(record: Record) -> str:
    return "the embedded model" if record.model == str(model_dir()) else short_name(record.model)


def _setting(record: Record) -> str:
    s = record.setting
    count = len(s.workers)
    who = f"{count} worker{'' if count == 1 else 's'}" if count else "no workers"
    emulated = f", emulated: {s.emulation}" if s.emulation else ""
    day = time.strftime("%Y-%m-%d", time.localtime(record.measured))
    return f"{s.format}, {who}, {s.device}{emulated}; {day}"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds >= 0.9995e-3 else f"{1e6 * seconds:.3g} µs"


def _rate(seconds: float, record: Record) -> str:
    """Of all an expert's tiles: time of one, and bytes a second."""
    tile = seconds / record.tiles
    gbps = "" if not tile else f" ({record.tile_bytes / tile / 1e9:.3g} GB/s)"
    return f"{_time(tile)}{gbps}"
