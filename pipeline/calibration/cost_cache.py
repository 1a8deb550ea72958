"""Costs that earlier starts measured, so that a start need not measure them again:
`<cache folder>/costs/<store>-<setting>.json`, one file for each model, machine and configuration.

A file contains the setting that it was measured with. It is written completely or not at all, and readable by
its owner alone. One that is damaged, of another version or possibly written by another user is removed, and
its content is measured again. Errors never fail a start. This module imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pipeline.errors import PolicyError
from pipeline.policies.costs import Costs
from protocol.errors import NotPrivate
from protocol.files import check_private, read_small
from shm import atomic_file
from shm.kernel_files import contents, parse_cpuinfo

log = logging.getLogger(__name__)

FOLDER = "costs"
FILE_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}\.json")  # others in the folder are not touched
MAX_BYTES = 1 << 20


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
    emulation: str

    @property
    def name(self) -> str:
        """The name of its file."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{self.store[:16]}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


@dataclass(frozen=True)
class Record:
    """Costs of a tile, the setting that they were measured with, and facts for a reader of the file."""

    setting: Setting
    model: str
    tiles: Annotated[int, Meta(ge=1)]  # of an expert
    tile_bytes: Annotated[int, Meta(ge=1)]
    measured: float  # seconds since the epoch
    costs: Costs
    version: Literal[4] = 4  # of the files, and of how costs are measured


def processor() -> tuple[str, int]:
    """The machine's processor by name, and how many of its cores this process may use."""
    return parse_cpuinfo(contents(Path("/proc/cpuinfo"))), len(os.sched_getaffinity(0))


def find(cache: Path, setting: Setting) -> Record | None:
    """The record of exactly this setting; None without one. It is in use now, which keeps its file from being
    removed first."""
    path = cache / FOLDER / setting.name
    record = _find(path)
    if record is None or record.setting != setting:
        return None
    with suppress(OSError):  # a disk that cannot be written
        os.utime(path)
    return record


def keep(cache: Path, record: Record) -> None:
    """Write the record, replacing that of the same setting. A failure is logged."""
    path = cache / FOLDER / record.setting.name
    unkept = f"costs could not be kept in {path.parent}, the next start measures again"
    atomic_file.keep(path, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n", log, unkept)


def measured_here(cache: Path) -> list[tuple[Path, Record]]:
    """The records of this processor with as many cores, the newest first."""
    records = []
    for path in (cache / FOLDER).glob("*.json"):
        record = _find(path) if FILE_NAME.fullmatch(path.name) else None
        if record is not None and (record.setting.cpu, record.setting.cores) == processor():
            records.append((path, record))
    return sorted(records, key=lambda item: -item[1].measured)


def read(path: Path) -> Record:
    """The record of a file that only this user can have written. Raises OSError where the file cannot be
    read, ValueError where it has no such record."""
    try:
        raw = read_small(path, MAX_BYTES, flags=os.O_NOFOLLOW, check=check_private)
        return msgspec.json.decode(raw, type=Record)
    except (NotPrivate, PolicyError, RecursionError) as e:
        raise ValueError(str(e)) from e


def _find(path: Path) -> Record | None:
    """The record of a file; None without one. A file without a valid record is removed."""
    try:
        return read(path)
    except OSError:
        return None
    except ValueError as e:
        reason = " ".join(str(e).split())[:100]
        log.warning(f"{path} is not used, its costs are measured again: {reason}")
        with suppress(OSError):
            path.unlink()
        return None
