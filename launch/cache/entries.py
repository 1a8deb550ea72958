"""The entries of the disk cache, and the kept stores in shared memory. Read-only.

    <cache folder>/<fingerprint>/   store.bin | backbone.bin | calibration.safetensors
                                    about.json: `shm/disk_cache.py`; *.tmp and .NAME.*: being written
    <cache folder>/costs/*.json     measured costs; .NAME.*: being written
    <cache folder>/kernels/*.cubin  kernels compiled for a GPU; .NAME.*: being written
    /dev/shm/tandem-store-*         stores, in use or left by --keep-store

Everything else in the cache folder is unknown: not written by this program.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from launch.runtime import SHM
from launch.terminal.format import count, distinct_names
from pipeline.backbone import disk_cache as backbone_cache
from pipeline.calibration import cost_cache
from pipeline.calibration import file as calibration_file
from shm.disk_cache import FINGERPRINT, RECORD, STORE_FILE, UNFINISHED, CachedStore, last_use, read_record
from shm.errors import ShmError
from shm.locks import unused_store
from shm.segment import is_segment
from shm.store import Store, store_key
from workers.kernels.cuda.compiler import FILE_NAME as GPU_KERNELS
from workers.kernels.cuda.compiler import KEPT_IN as KERNEL_FOLDER

UNKNOWN = "unknown"
KINDS = {STORE_FILE: "store", backbone_cache.NAME: "backbone", calibration_file.NAME: "calibration"}
LOCKED = (UNFINISHED, backbone_cache.UNFINISHED)  # their writers hold a lock on them
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}")  # of `shm/atomic_file.py`
WRITING_SECONDS = 60.0  # a small file that has no lock may be written for so long


@dataclass(frozen=True)
class Entry:
    """One thing that can be removed, or that is unknown. `in_use`: by what, empty where by nothing."""

    kind: str  # store, backbone, calibration, costs, kernels, unfinished, kept store; or unknown
    path: Path  # its file, or what is unknown
    size: int  # bytes, with the files that belong to it
    last_use: float  # seconds since the epoch
    model: str = UNKNOWN
    format: str = ""
    in_use: str = ""
    setting: str = ""  # of costs, what else they were measured with

    @property
    def on_disk(self) -> bool:
        return self.kind != "kept store"

    @property
    def fingerprint(self) -> str:
        """The fingerprint of a store, a backbone or a calibration; of a kept store its first 16 digits."""
        return store_key(self.path.name) or self.path.parent.name


def scan(folder: Path) -> list[Entry]:
    """All entries, the least recently used first. Entries removed meanwhile are left out."""
    entries: list[Entry] = []
    for path in _children(folder):
        with suppress(FileNotFoundError):
            if path.is_symlink() or not path.is_dir():
                entries.append(_unknown(path))
            elif path.name == cost_cache.FOLDER:
                entries += [_costs(entry) for entry in _children(path)]
            elif path.name == KERNEL_FOLDER:
                entries += [_kernels(entry) for entry in _children(path)]
            elif FINGERPRINT.fullmatch(path.name):
                entries += _fingerprint_folder(path)
            else:
                entries.append(_unknown(path))
    for path in _children(SHM):
        if store_key(path.name) and is_segment(path):
            with suppress(FileNotFoundError):
                entries.append(_kept_store(path))
    names = distinct_names({entry.model for entry in entries} - {UNKNOWN})
    named = [replace(entry, model=names.get(entry.model, entry.model)) for entry in entries]
    return sorted(named, key=lambda entry: entry.last_use)


def writer_of(path: Path) -> str:
    """The writer of an unfinished file, for a person; empty for a file of a killed process."""
    if path.name in LOCKED:
        with suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return "its writer"
            finally:
                os.close(descriptor)
    elif time.time() - path.lstat().st_mtime < WRITING_SECONDS:
        return "its writer"
    return ""


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # missing, or of another user
        return []


def _fingerprint_folder(folder: Path) -> Iterator[Entry]:
    record, used = read_record(folder), last_use(folder)
    for path in _children(folder):
        kind = KINDS.get(path.name)
        if path.name == RECORD:
            continue
        if path.name in LOCKED or TEMPORARY.fullmatch(path.name):
            yield Entry("unfinished", path, *_size_and_time(path), in_use=writer_of(path))
        elif kind is None or path.is_symlink() or not path.is_file():
            yield _unknown(path)
        else:
            model, format = ("", "") if record is None else (record.model, record.format)
            if kind == "store" and not model:
                model, format = _of_cached_store(folder)
            size, written = _size_and_time(path)
            yield Entry(kind, path, size, used or written, model or UNKNOWN, format)


def _of_cached_store(folder: Path) -> tuple[str, str]:
    """Model and format of a store's file, from its manifest; empty where it is damaged."""
    with suppress(ShmError):
        store = CachedStore.open(folder.parent, folder.name)
        if store is not None:
            with store:
                return store.manifest.source, store.manifest.format
    return "", ""


def _costs(path: Path) -> Entry:
    size, used = _size_and_time(path)
    if TEMPORARY.fullmatch(path.name):
        return Entry("unfinished", path, size, used, in_use=writer_of(path))
    if cost_cache.PREFETCHER_FILE.fullmatch(path.name):
        return Entry("costs", path, size, used, model="every model", setting="process or thread")
    if not cost_cache.FILE_NAME.fullmatch(path.name):
        return _unknown(path)
    entry = Entry("costs", path, size, used)
    try:
        record = cost_cache.read(path)
    except (OSError, ValueError):  # damaged
        return entry
    made = record.setting
    workers = count(len(made.workers), "worker") if made.workers else "no workers"
    setting = f"{workers}, {made.device}" + (f", {made.emulation}" if made.emulation else "")
    return replace(entry, model=record.model, format=made.format, setting=setting)


def _kernels(path: Path) -> Entry:
    size, used = _size_and_time(path)
    if TEMPORARY.fullmatch(path.name):
        return Entry("unfinished", path, size, used, in_use=writer_of(path))
    if GPU_KERNELS.fullmatch(path.name):
        return Entry("kernels", path, size, used, model="every model", setting="GPU")
    return _unknown(path)


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


def _unknown(path: Path) -> Entry:
    size, used = _size_and_time(path)
    if path.is_dir() and not path.is_symlink():
        size = sum(_size_and_time(Path(top, name))[0] for top, _, names in os.walk(path) for name in names)
    return Entry(UNKNOWN, path, size, used)


def _size_and_time(path: Path) -> tuple[int, float]:
    status = path.lstat()
    return status.st_size, status.st_mtime
