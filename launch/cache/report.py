"""The cache's entries as a table or as JSON."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from launch.cache.entries import UNKNOWN, Entry
from launch.terminal.format import count
from launch.terminal.tables import make_table, render
from protocol.visible import one_line, visible
from shm.segment import byte_size

AGES = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))


def table(folder: Path, entries: Sequence[Entry]) -> str:
    """A row for each entry, the least recently used first, and the sums."""
    sums = _sums(folder, entries) + "\n"  # not wrapped: its path is to be copied
    if not entries:
        return visible(sums)
    used = any(entry.in_use for entry in entries)
    shown = make_table("kind", "model", "format", "last use", *["in use by"] * used, numbers=("size",))
    for entry in entries:
        shown.add_row(
            Text(entry.kind, style="dim" if entry.kind == UNKNOWN else ""),
            Text(_name(entry)),
            Text(_format(entry)),
            age(entry.last_use),
            *[Text(entry.in_use, style="green")] * used,
            byte_size(entry.size),
        )
    note = "unknown files are of another program or version, and are never removed\n"
    return render(shown, "") + note * any(entry.kind == UNKNOWN for entry in entries) + visible(sums)


def to_json(folder: Path, entries: Sequence[Entry]) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "bytes": sum(entry.size for entry in entries if entry.on_disk),
        "free_bytes": free_bytes(folder),
        "entries": [entry_to_json(entry) for entry in entries],
    }


def entry_to_json(entry: Entry) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "path": str(entry.path),
        "bytes": entry.size,
        "model": entry.model,
        "format": entry.format or None,
        "setting": entry.setting or None,
        "last_use": entry.last_use,
        "in_use": entry.in_use or None,
    }


def describe(entry: Entry) -> str:
    """In a few words: "store of Mixtral-8x7B in int4, 24.10 GB, used 3 days ago"."""
    of = "" if entry.kind == "unfinished" else " of"
    format = f" in {_format(entry)}" if entry.format else ""
    return f"{entry.kind}{of} {_name(entry)}{format}, {byte_size(entry.size)}, used {age(entry.last_use)}"


def _format(entry: Entry) -> str:
    """With what costs were measured with."""
    return one_line(", ".join(filter(None, (entry.format, entry.setting))))


def _name(entry: Entry) -> str:
    """Of its model, or of a file that tells none."""
    return one_line(entry.path.name if entry.kind in (UNKNOWN, "unfinished") else entry.model)


def age(then: float) -> str:
    seconds = time.time() - then
    for length, unit in AGES:
        if seconds >= length:
            return f"{count(int(seconds / length), unit)} ago"
    return "just now"


def free_bytes(folder: Path) -> int:
    """Of the disk that the cache folder is on, or would be."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(there).free


def _sums(folder: Path, entries: Sequence[Entry]) -> str:
    kept = [entry for entry in entries if not entry.on_disk]
    disk = [entry for entry in entries if entry.on_disk]
    text = f"{folder}: {byte_size(sum(entry.size for entry in disk))} in {_count(disk)},"
    text += f" {byte_size(free_bytes(folder))} free on its disk"
    if kept:
        text += f"; in shared memory: {byte_size(sum(entry.size for entry in kept))} in {_count(kept)}"
    return text


def _count(entries: Sequence[Entry]) -> str:
    return f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'}"
