"""`launch.py cache`: list what is kept on disk and in shared memory, or with --prune remove some of it.
Stores in use, files that are being written, and unknown files are never removed."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from launch.cache.entries import UNKNOWN, Entry, scan, writer_of
from launch.command_line.options import Options
from launch.terminal.interrupts import Interrupts
from launch.terminal.output import print_json, show
from launch.terminal.tables import UNBROKEN, Grid, render
from protocol.program import one_line, user_folder, visible
from shm.disk_cache import remove_empty
from shm.errors import ShmError
from shm.locks import remove_kept
from shm.segment import byte_size

DAY = 86400.0
SIZE_WIDTH = 8  # of "991.2 kB"

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
    chosen, in_use = select(entries, written.get("older_than"), written.get("to"))
    removed, failed = [], []
    for entry in chosen:
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
            "removed": [entry.to_map() for entry in removed],
            "kept_in_use": [entry.to_map() for entry in in_use],
            "failed": [entry.to_map() for entry in failed],
            "freed_bytes": sum(entry.size for entry in removed),
        }
        print_json(to_json(folder, [entry for entry in entries if entry not in removed]) | figures)
    else:
        verb = "would remove" if dry_run else "removed"
        lines = [f"{verb}: {describe(entry)}" for entry in removed]
        lines += [f"kept: {describe(entry)}: in use by {entry.in_use or 'an engine'}" for entry in in_use]
        size = byte_size(sum(entry.size for entry in removed))
        lines.append(f"{verb} {len(removed)} of {len(entries)}, {size}; {byte_size(rest)} stay on disk")
        show("\n".join(lines) + "\n")
    return 1 if failed else 0


def select(
    entries: Sequence[Entry], older_than: float | None, to_size: int | None
) -> tuple[list[Entry], list[Entry]]:
    """Returns the entries that a prune removes, and those that it would remove if they were not in use.
    `entries`: the least recently used first; `older_than`: days; `to_size`: bytes on disk at most."""
    remove: list[Entry] = []
    in_use: list[Entry] = []
    total = sum(entry.size for entry in entries if entry.on_disk)
    now = time.time()
    for entry in entries:
        old = older_than is not None and now - entry.last_use > older_than * DAY
        too_much = to_size is not None and entry.on_disk and total > to_size
        if entry.kind == UNKNOWN or not (old or too_much):
            continue
        if entry.in_use:
            in_use.append(entry)
            continue
        remove.append(entry)
        total -= entry.size * entry.on_disk
    return remove, in_use


def remove(entry: Entry) -> bool:
    """Remove an entry; False if it is in use now. Raises OSError, ShmError."""
    if entry.kind == "kept store":
        return remove_kept(entry.fingerprint)
    if entry.kind == "unfinished" and writer_of(entry.path):
        return False
    entry.path.unlink(missing_ok=True)  # an engine that has read or mapped it goes on
    remove_empty(entry.path.parent)
    return True


def table(folder: Path, entries: Sequence[Entry]) -> str:
    """A row for each entry, the least recently used first, and the sums."""
    sums = _sums(folder, entries) + "\n"  # not wrapped: its path is to be copied
    if not entries:
        return visible(sums)
    titles = ("kind", "last use", f"{'size':>{SIZE_WIDTH}}", "model and format")
    rows = [tuple(Text(title, "bold") for title in titles), *map(_row, entries)]
    note = "unknown files are of another program or version, and are never removed\n"
    unknown = any(entry.kind == UNKNOWN for entry in entries)
    return render(Grid(rows), "", plain_width=UNBROKEN) + note * unknown + visible(sums)


def _row(entry: Entry) -> tuple[Text, ...]:
    """Returns its cells; the last one has a path or name, which may be long."""
    name = Text(", ".join(filter(None, (_name(entry), _format(entry)))))
    if entry.in_use:
        name.append(f" (in use by {entry.in_use})", "green")
    kind = Text(entry.kind, "dim" * (entry.kind == UNKNOWN))
    size = f"{byte_size(entry.size):>{SIZE_WIDTH}}"
    return kind, Text(_used(entry)), Text(size), name


def to_json(folder: Path, entries: Sequence[Entry]) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "bytes": sum(entry.size for entry in entries if entry.on_disk),
        "free_bytes": _free_bytes(folder),
        "entries": [entry.to_map() for entry in entries],
    }


def describe(entry: Entry) -> str:
    """Describe an entry: "store of Mixtral-8x7B in int4, 24.10 GB, used 2026-11-20 17:05"."""
    of = "" if entry.kind == "unfinished" else " of"
    format = f" in {_format(entry)}" if entry.format else ""
    return f"{entry.kind}{of} {_name(entry)}{format}, {byte_size(entry.size)}, used {_used(entry)}"


def _format(entry: Entry) -> str:
    """Returns its format and, of costs, what else they were measured with."""
    return one_line(", ".join(filter(None, (entry.format, entry.setting))))


def _name(entry: Entry) -> str:
    """Returns its model's name, or that of a file that tells none."""
    return one_line(entry.path.name if entry.kind in (UNKNOWN, "unfinished") else entry.model)


def _used(entry: Entry) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_use))


def _free_bytes(folder: Path) -> int:
    """Returns the free space of the disk that the cache folder is on, or would be."""
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def _sums(folder: Path, entries: Sequence[Entry]) -> str:
    disk, kept = ([entry for entry in entries if entry.on_disk is on_disk] for on_disk in (True, False))
    text = f"{folder}: {_sum(disk)}, {byte_size(_free_bytes(folder))} free on its disk"
    return text + (f"; in shared memory: {_sum(kept)}" if kept else "")


def _sum(entries: Sequence[Entry]) -> str:
    noun = "entry" if len(entries) == 1 else "entries"
    return f"{byte_size(sum(entry.size for entry in entries))} in {len(entries)} {noun}"
