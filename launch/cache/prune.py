"""Selects and removes entries of the cache. Entries in use and unknown files are never removed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from launch.cache.entries import UNKNOWN, Entry, writer_of
from protocol.sockets import runtime_root
from shm.cache_lease import unused_entry
from shm.cache_record import remove_empty
from shm.locks import remove_kept

DAY = 86400.0


@dataclass(frozen=True)
class Selection:
    """The entries that a prune removes, and those that it would remove if they were not in use."""

    remove: tuple[Entry, ...]
    in_use: tuple[Entry, ...]


def select(entries: Sequence[Entry], older_than: float | None, to_size: int | None) -> Selection:
    """`entries`: the least recently used first; `older_than`: days; `to_size`: bytes on disk at most."""
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
    return Selection(tuple(remove), tuple(in_use))


def remove(entry: Entry) -> bool:
    """Remove an entry; False if it is in use now. Raises OSError, ShmError."""
    match entry.kind:
        case "kept store":
            return remove_kept(entry.fingerprint, runtime_root())
        case "unfinished":
            if writer_of(entry.path):
                return False
            _unlink(entry)
            return True
    with unused_entry(entry.path.parent.parent, entry.lease_key) as unused:
        if unused:
            _unlink(entry)
        return unused


def _unlink(entry: Entry) -> None:
    entry.path.unlink(missing_ok=True)
    remove_empty(entry.path.parent)
