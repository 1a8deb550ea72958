"""`launch.py cache`: list what is kept on disk and in shared memory, or with --prune remove some of it.
Stores in use, files that are being written, and unknown files are never removed."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from launch.command_line.options import Options
from launch.runtime import SHM
from launch.terminal.format import count, distinct_names
from launch.terminal.interrupts import Interrupts
from launch.terminal.output import print_json, show
from launch.terminal.tables import UNBROKEN, Grid, render
from pipeline.backbone import disk_cache as backbone_cache
from pipeline.calibration import cost_cache, heat
from pipeline.calibration import file as calibration_file
from pipeline.models import facts
from protocol.errors import NotPrivate
from protocol.program import one_line, user_folder, visible
from shm.disk_cache import FINGERPRINT, RECORD, STORE_FILE, UNFINISHED, last_use, read_record, remove_empty
from shm.errors import ShmError
from shm.locks import is_locked, remove_kept, unused_store
from shm.segment import byte_size, is_segment
from shm.store import Store, store_key
from workers.kernels.cuda.compiler import FILE_NAME as GPU_KERNELS
from workers.kernels.cuda.compiler import KEPT_IN as KERNEL_FOLDER

# ----------------------------------------------------------------------------------------------------------
# The entries of the disk cache, and the kept stores in shared memory. Read-only.
#
#     <cache folder>/<fingerprint>/   store.bin | backbone.bin | calibration.safetensors | heat.json
#                                     about.json: `shm/disk_cache.py`; *.tmp and .NAME.*: being written
#     <cache folder>/costs/*.json     measured costs; .NAME.*: being written
#     <cache folder>/kernels/*.cubin  kernels compiled for a GPU; .NAME.*: being written
#     <cache folder>/facts/*.json     what transformers says of a model; .NAME.*: being written
#     /dev/shm/tandem-store-*         stores, in use or left by --keep-store
#
# Everything else in the cache folder is unknown: not written by this program.


UNKNOWN, EVERY = "unknown", "every model"
KINDS = {
    STORE_FILE: "store",
    backbone_cache.NAME: "backbone",
    calibration_file.NAME: "calibration",
    heat.NAME: "heat",
}
LOCKED = (UNFINISHED, backbone_cache.UNFINISHED)  # their writers hold a lock on them
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}")  # of `shm/atomic_file.py`
WRITING_SECONDS = 60.0  # a small file that has no lock may be written for so long


@dataclass(frozen=True)
class Entry:
    """One thing that can be removed, or that is unknown. `in_use`: by what, empty where by nothing."""

    kind: str  # store, backbone, calibration, heat, costs, kernels, facts, unfinished, kept store; or unknown
    path: Path  # its file, or what is unknown
    size: int  # bytes, with the files that belong to it
    last_use: float  # seconds since the epoch
    model: str = UNKNOWN
    format: str = ""
    in_use: str = ""
    setting: str = ""  # of costs, what else they were measured with; of facts, what model they are of

    @property
    def on_disk(self) -> bool:
        return self.kind != "kept store"

    @property
    def fingerprint(self) -> str:
        """Returns that of a store, a backbone or a calibration; of a kept store its first 16 digits."""
        return store_key(self.path.name) or self.path.parent.name

    def to_map(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "path": str(self.path),
            "bytes": self.size,
            "model": self.model,
            "format": self.format or None,
            "setting": self.setting or None,
            "last_use": self.last_use,
            "in_use": self.in_use or None,
        }


def scan(folder: Path) -> list[Entry]:
    """Returns all entries, the least recently used first. Entries removed meanwhile are left out."""
    entries: list[Entry] = []
    for path in _children(folder):
        with suppress(FileNotFoundError):
            folders = path.is_dir() and not path.is_symlink()
            if folders and path.name == cost_cache.FOLDER:
                entries += map(_costs, _children(path))
            elif folders and path.name == KERNEL_FOLDER:
                entries += map(_kernels, _children(path))
            elif folders and path.name == facts.FOLDER:
                entries += map(_facts, _children(path))
            elif folders and FINGERPRINT.fullmatch(path.name):
                entries += _fingerprint_folder(path)
            else:
                entries.append(_plain(path))
    for path in _children(SHM):
        if store_key(path.name) and is_segment(path):
            with suppress(FileNotFoundError):
                entries.append(_kept_store(path))
    names = distinct_names({entry.model for entry in entries} - {UNKNOWN})
    named = [replace(entry, model=names.get(entry.model, entry.model)) for entry in entries]
    return sorted(named, key=lambda entry: entry.last_use)


def writer_of(path: Path) -> str:
    """Names the writer of an unfinished file, for a person; "" for a file of a killed process."""
    if path.name in LOCKED:
        return "its writer" if _is_locked(path) else ""
    return "its writer" if time.time() - path.lstat().st_mtime < WRITING_SECONDS else ""


def _is_locked(path: Path) -> bool:
    """Tells whether a program holds a lock on a file."""
    with suppress(OSError):
        return is_locked(path, fcntl.LOCK_EX)
    return False


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # missing, or of another user
        return []


def _fingerprint_folder(folder: Path) -> Iterator[Entry]:
    record, used = read_record(folder), last_use(folder)
    model, format = (UNKNOWN, "") if record is None else (record.model, record.format)
    for path in _children(folder):
        if path.name == RECORD:
            continue
        entry = _plain(path)
        if path.name in KINDS and path.is_file() and not path.is_symlink():
            last = used or entry.last_use
            # An engine that reads experts from a store's file as it needs them holds a lock on it.
            in_use = "an engine" if path.name == STORE_FILE and _is_locked(path) else ""
            entry = Entry(KINDS[path.name], path, entry.size, last, model, format, in_use)
        yield entry


def _costs(path: Path) -> Entry:
    entry = _plain(path)
    if not cost_cache.FILE_NAME.fullmatch(path.name):
        return entry
    entry = replace(entry, kind="costs")
    try:
        record = cost_cache.read(path)
    except (OSError, ValueError):  # damaged
        return entry
    made = record.setting
    workers = count(len(made.workers), "worker") if made.workers else "no workers"
    setting = f"{workers}, {made.device}" + (f", {made.emulation}" if made.emulation else "")
    return replace(entry, model=record.model, format=made.format, setting=setting)


def _kernels(path: Path) -> Entry:
    entry = _plain(path)
    if GPU_KERNELS.fullmatch(path.name):
        return replace(entry, kind="kernels", model=EVERY, setting="GPU")
    return entry


def _facts(path: Path) -> Entry:
    entry = _plain(path)
    if not facts.FILE_NAME.fullmatch(path.name):
        return entry
    setting = ""
    with suppress(OSError, NotPrivate, ValueError, KeyError, TypeError):  # the name of a model is in none
        found = facts.read(path)
        setting = f"{count(found.layers, 'layer')}, {count(found.experts, 'expert')}"
    return replace(entry, kind="facts", setting=setting)


def _kept_store(path: Path) -> Entry:
    size, used = _size_and_time(path)
    with unused_store(store_key(path.name)) as unused:
        in_use = "" if unused else "an engine"
    try:
        with Store.attach(f"/{path.name}") as store:
            model, format = store.manifest.source, store.manifest.format
    except ShmError:
        model, format = "", ""
    return Entry("kept store", path, size, used, model or UNKNOWN, format, in_use)


def _plain(path: Path) -> Entry:
    """Returns what can be said of any path: an unfinished file, or something unknown."""
    size, used = _size_and_time(path)
    if path.name in LOCKED or TEMPORARY.fullmatch(path.name):
        return Entry("unfinished", path, size, used, in_use=writer_of(path))
    if path.is_dir() and not path.is_symlink():
        size = sum(_size_and_time(Path(top, name))[0] for top, _, names in os.walk(path) for name in names)
    return Entry(UNKNOWN, path, size, used)


def _size_and_time(path: Path) -> tuple[int, float]:
    status = path.lstat()
    return status.st_size, status.st_mtime


# --- the command --------------------------------------------------------------------------------------------

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
