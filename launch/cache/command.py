"""`launch.py cache`: list what is kept on disk and in shared memory, or with --prune remove some of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from launch.cache.entries import Entry, scan
from launch.cache.prune import remove, select
from launch.cache.report import describe, entry_to_json, table, to_json
from launch.command_line.options import Options
from launch.terminal.interrupts import Interrupts
from launch.terminal.output import print_json, show
from protocol.program import PROGRAM, user_folder
from protocol.visible import one_line
from shm.errors import ShmError
from shm.segment import byte_size

log = logging.getLogger("tandem")


async def cache(options: Options, interrupts: Interrupts) -> int:
    """1 where something that was to be removed could not be."""
    folder = user_folder("CACHE")
    entries = scan(folder)
    if "prune" in options.written:
        return _prune(options, folder, entries)
    if "json" in options.written:
        print_json(to_json(folder, entries))
    else:
        show(table(folder, entries), rendered=True)
    return 0


def _prune(options: Options, folder: Path, entries: Sequence[Entry]) -> int:
    written = options.written
    dry_run = "dry_run" in written
    selection = select(entries, written.get("older_than"), written.get("to"))
    removed, in_use, failed = [], list(selection.in_use), []
    for entry in selection.remove:
        try:
            if dry_run or remove(entry):
                removed.append(entry)
            else:
                in_use.append(entry)
        except (OSError, ShmError) as e:
            failed.append(entry)
            log.warning(f"{entry.path} could not be removed: {e}")
    rest = sum(entry.size for entry in entries if entry.on_disk and entry not in removed)
    if "json" in written:
        figures = {
            "dry_run": dry_run,
            "removed": [entry_to_json(entry) for entry in removed],
            "kept_in_use": [entry_to_json(entry) for entry in in_use],
            "failed": [entry_to_json(entry) for entry in failed],
            "freed_bytes": sum(entry.size for entry in removed),
        }
        print_json(to_json(folder, [entry for entry in entries if entry not in removed]) | figures)
    else:
        verb = "would remove" if dry_run else "removed"
        lines = [f"{verb}: {describe(entry)}" for entry in removed]
        lines += [f"kept: {describe(entry)}: in use by {entry.in_use or 'an engine'}" for entry in in_use]
        lines += _calibrations(removed, dry_run)
        size = byte_size(sum(entry.size for entry in removed))
        lines.append(f"{verb} {len(removed)} of {len(entries)}, {size}; {byte_size(rest)} stay on disk")
        if rest > written.get("to", rest):
            lines.append(f"that is more than --to {byte_size(written['to'])}: the rest is in use or unknown")
        show("\n".join(lines) + "\n")
    return 1 if failed else 0


def _calibrations(removed: Sequence[Entry], dry_run: bool) -> list[str]:
    """A warning where calibrations go: unlike the other kinds nothing makes them again by itself."""
    models = dict.fromkeys(one_line(entry.model) for entry in removed if entry.kind == "calibration")
    if not models:
        return []
    goes = "would go" if dry_run else "is gone"
    return [
        f"warning: the calibration of {', '.join(models)} {goes}; no start makes it again, only"
        f" `{PROGRAM} calibrate --text FILE`, in minutes"
    ]
