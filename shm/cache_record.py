"""The record of a cache folder's content and last use: `<cache folder>/<fingerprint>/about.json`.

The files beside it need not name the model that they were made for. The record's modification time is the
time of the last use: each reader and writer of the files sets it, because many file systems do not keep
access times. Folders made by older versions get a record at their next use. An error here never fails a
start.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from protocol.files import read_small
from shm.atomic_file import atomic_file

RECORD = "about.json"
MAX_RECORD = 1 << 16  # bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheRecord:
    """`kind`: store, backbone or calibration; `model`: its path, or its name where it has none; `format`: of
    the numbers, empty where there is none."""

    kind: str
    model: str
    format: str


def note_use(folder: Path, record: CacheRecord) -> None:
    """Record that the files in `folder` are used now; a missing record is written."""
    path = folder / RECORD
    try:
        if read_record(folder) == record:
            os.utime(path)
            return
        with atomic_file(path) as file:
            file.write(json.dumps(asdict(record)).encode())
    except OSError as e:
        log.debug(f"no use was noted in {folder}: {e.strerror}")


def read_record(folder: Path) -> CacheRecord | None:
    """The record of a folder; None where it has none, or a damaged one."""
    try:
        found = json.loads(read_small(folder / RECORD, MAX_RECORD, flags=os.O_NOFOLLOW))
        return CacheRecord(str(found["kind"]), str(found["model"]), str(found["format"]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def last_use(folder: Path) -> float | None:
    """Seconds since the epoch; None where the folder has no record."""
    try:
        return (folder / RECORD).lstat().st_mtime
    except OSError:
        return None


def remove_empty(folder: Path) -> None:
    """Remove a folder that holds nothing, or nothing but its record."""
    try:
        if os.listdir(folder) == [RECORD]:
            (folder / RECORD).unlink()
        folder.rmdir()
    except OSError as e:
        log.debug(f"{folder} stays: {e.strerror}")
