"""Costs that earlier starts measured, so that a start need not measure them again:
`<cache folder>/costs/<store>-<setting>.json`, one file for each model, machine and configuration.

A file contains the setting that it was measured with; `shm/kept_record.py` says how it is kept. This module
imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pipeline.errors import PolicyError
from pipeline.policies.costs import Costs
from shm import kept_record
from shm.kept_record import KeptRecord
from shm.kernel_files import contents, parse_cpuinfo

FOLDER = "costs"
FILE_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}\.json")  # others in the folder are not touched
VERSION = 3  # of the files, and of how costs are measured


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
class Record(KeptRecord):
    """Costs of a tile, the setting that they were measured with, and facts for a reader of the file."""

    setting: Setting
    model: str
    tiles: Annotated[int, Meta(ge=1)]  # of an expert
    tile_bytes: Annotated[int, Meta(ge=1)]
    measured: float  # seconds since the epoch
    load: float  # the machine's load average just before
    costs: Costs

    @property
    def cores(self) -> int:
        return self.setting.cores

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"version": VERSION, "costs": self.costs.to_json()}

    @classmethod
    def from_json(cls, data: Any) -> Record:
        """The inverse of `to_json`. Raises for anything else as `kept_record.read` expects."""
        if data["version"] != VERSION:
            raise ValueError("it is of another version")
        try:
            return msgspec.convert(data, cls)
        except PolicyError as e:
            raise ValueError(str(e)) from e


def processor() -> tuple[str, int]:
    """The machine's processor by name, and how many of its cores this process may use."""
    return parse_cpuinfo(contents(Path("/proc/cpuinfo"))), len(os.sched_getaffinity(0))


def find(cache: Path, setting: Setting) -> Record | None:
    """The record of exactly this setting; None without one."""
    path = cache / FOLDER / setting.name
    record = _find(path)
    if record is None or record.setting != setting:
        return None
    kept_record.note_use(path)
    return record


def keep(cache: Path, record: Record) -> None:
    """Write the record, replacing that of the same setting. A failure is logged."""
    kept_record.keep(cache / FOLDER / record.setting.name, record.to_json(), "costs")


def measured_here(cache: Path) -> list[tuple[Path, Record]]:
    """The records of this processor with as many cores, the newest first."""
    records = []
    for path in (cache / FOLDER).glob("*.json"):
        record = _find(path) if FILE_NAME.fullmatch(path.name) else None
        if record is not None and (record.setting.cpu, record.setting.cores) == processor():
            records.append((path, record))
    return sorted(records, key=lambda item: -item[1].measured)


def read(path: Path) -> Record:
    """Raises OSError, ValueError as `kept_record.read`."""
    return kept_record.read(path, Record.from_json)


def _find(path: Path) -> Record | None:
    return kept_record.find(path, Record.from_json, "its costs are")
