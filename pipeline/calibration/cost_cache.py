"""Costs that earlier starts measured, so that a start need not measure them again:
`<cache folder>/costs/<store>-<setting>.json`, one file for each model, machine and configuration.

A file contains the setting that it was measured with, and is readable by its owner alone. It is written
completely or not at all; a file that is damaged, of another version or possibly written by another user is
removed, and its costs are measured again. This module imports no torch, and its errors never fail a start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pipeline.errors import PolicyError
from pipeline.policies.costs import MAX_FILE_BYTES, Costs
from protocol.errors import NotPrivate
from protocol.private_files import check_private, make_folders
from protocol.small_files import read_small
from shm.atomic_file import atomic_file
from shm.kernel_files import contents, parse_cpuinfo

FOLDER = "costs"
FILE_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}\.json")  # others in the folder are not touched
LOADED = 0.5  # load average for each core, from which on measured costs are too high
VERSION = 1  # of the files, and of how costs are measured

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setting:
    """Everything that measured costs depend on."""

    cpu: str
    cores: int  # that may be used
    device: str
    store: str  # fingerprint of the experts in this format and tile
    format: str
    backbone: str  # its dtype
    workers: tuple[int, ...]  # threads of each worker
    kernels: str
    prefetcher: str
    emulation: str

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.lease_key}.json"

    @property
    def lease_key(self) -> str:
        """Of the leases that keep its file from being removed: `shm/cache_lease.py`."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{self.store[:16]}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class Record:
    """Costs of a tile, the setting that they were measured with, and facts for a reader of the file."""

    setting: Setting
    model: str
    tiles: int  # of an expert
    tile_bytes: int
    measured: float  # seconds since the epoch
    load: float  # the machine's load average just before
    costs: Costs

    @property
    def loaded(self) -> bool:
        """Whether other programs were computing, so that the costs are too high."""
        return self.load > LOADED * self.setting.cores

    def outdated(self, load: float) -> bool:
        """Whether to measure again at this load average: the machine was busy, and is half as busy now."""
        return self.loaded and load <= self.load / 2

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"version": VERSION, "costs": self.costs.to_json()}

    @classmethod
    def from_json(cls, data: Any) -> Record:
        """The inverse of `to_json`. Anything else raises ValueError, TypeError, KeyError or PolicyError."""
        if data["version"] != VERSION:
            raise ValueError("it is of another version")
        plain = data["setting"]
        if plain.keys() != {field.name for field in fields(Setting)}:
            raise ValueError("it has no valid setting")
        kinds: dict[str, Callable[[Any], Any]] = {"cores": int, "workers": tuple}
        setting = Setting(**{name: kinds.get(name, str)(value) for name, value in plain.items()})
        record = cls(
            setting,
            str(data["model"]),
            int(data["tiles"]),
            int(data["tile_bytes"]),
            float(data["measured"]),
            float(data["load"]),
            Costs.from_json(data["costs"]),
        )
        if record.tiles < 1 or record.tile_bytes < 1:
            raise ValueError("its tiles have no size")
        return record


def processor() -> tuple[str, int]:
    """The machine's processor by name, and how many of its cores this process may use."""
    return parse_cpuinfo(contents(Path("/proc/cpuinfo")))[0], len(os.sched_getaffinity(0))


def find(cache: Path, setting: Setting) -> Record | None:
    """The record of exactly this setting; None without one."""
    path = cache / FOLDER / setting.name
    record = _read(path)
    if record is None or record.setting != setting:
        return None
    with suppress(OSError):  # a disk that cannot be written: its time of last use is not kept
        os.utime(path)
    return record


def keep(cache: Path, record: Record) -> None:
    """Write the record, replacing that of the same setting. A failure is logged."""
    folder = cache / FOLDER
    try:
        make_folders(folder)
        with atomic_file(folder / record.setting.name) as file:
            file.write(json.dumps(record.to_json(), indent=1).encode() + b"\n")
    except OSError as e:
        log.warning(f"costs could not be kept in {folder}, the next start measures them again: {e.strerror}")


def measured_here(cache: Path) -> list[tuple[Path, Record]]:
    """The records of this processor with as many cores, the newest first."""
    found = []
    for path in (cache / FOLDER).glob("*.json"):
        record = _read(path) if FILE_NAME.fullmatch(path.name) else None
        if record is not None and (record.setting.cpu, record.setting.cores) == processor():
            found.append((path, record))
    return sorted(found, key=lambda item: -item[1].measured)


def read(path: Path) -> Record:
    """A record of a file that only this user can have written. Raises OSError where it cannot be read,
    ValueError where it holds no such record."""
    try:
        raw = read_small(path, MAX_FILE_BYTES, flags=os.O_NOFOLLOW, check=check_private)
        return Record.from_json(json.loads(raw))
    except (NotPrivate, TypeError, KeyError, AttributeError, RecursionError, PolicyError) as e:
        raise ValueError(str(e)) from e


def _read(path: Path) -> Record | None:
    """The record of a file; a file without a valid record is removed."""
    try:
        return read(path)
    except OSError:
        return None
    except ValueError as e:
        log.warning(f"{path} is not used, its costs are measured again: {' '.join(str(e).split())[:100]}")
        with suppress(OSError):
            path.unlink()
        return None
