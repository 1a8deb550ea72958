"""Tunings of this machine that are kept between starts: `<cache folder>/kernels/<machine>.json`, beside the
costs (`pipeline/calibration/cost_cache.py`).

A file contains the machine that it was measured on; `shm/kept_record.py` says how it is kept. A measurement
that failed is kept too, with its reason: one that hangs would otherwise delay every start.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from shm import kept_record
from shm.kept_record import KeptRecord
from shm.kernel_files import contents, parse_cpuinfo
from workers.kernels import native
from workers.kernels.tuning import Tuning

FOLDER = "kernels"
FILE_NAME = re.compile(r"[0-9a-f]{16}\.json")  # others in the folder are not touched
RETRY = 86400.0  # seconds after which a measurement that failed is tried again


@dataclass(frozen=True)
class Machine:
    """The machine, as far as a tuning depends on it."""

    cpu: str
    flags: str  # of the processor, in order
    cores: int  # that may be used
    kernels: int  # version of the functions
    variants: tuple[str, ...]  # that can be used

    @classmethod
    def here(cls) -> Machine:
        cpu, flags = parse_cpuinfo(contents(Path("/proc/cpuinfo")))
        usable = (name for name in native.VARIANTS if isinstance(native.load(name), native.Library))
        cores = len(os.sched_getaffinity(0))
        return cls(cpu, " ".join(sorted(flags)), cores, native.VERSION, tuple(usable))

    @property
    def key(self) -> str:
        """The name of its file without the suffix, and of the leases that keep it from being removed."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Record(KeptRecord):
    """Either a tuning, or the reason why it could not be measured."""

    machine: Machine
    tuning: Tuning | None
    measured: Annotated[float, msgspec.Meta(ge=0, le=1 << 40)]  # seconds since the epoch
    load: Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # the machine's load average just before
    failure: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    version: Literal[5] = 5  # of the files, and of how is measured

    def __post_init__(self) -> None:
        """Raises ValueError where a record would contradict itself."""
        if self.tuning is not None and self.tuning.choice.variant not in self.machine.variants:
            raise ValueError("it chooses a variant that its machine does not have")
        if (self.tuning is None) != bool(self.failure):
            raise ValueError("it has neither a tuning nor the reason why it has none, or both")

    @property
    def cores(self) -> int:
        return self.machine.cores

    def stale(self, now: float, load: float) -> bool:
        """Tells whether to measure again at this time (seconds since the epoch) and load average."""
        failed = self.tuning is None and not 0 <= now - self.measured < RETRY
        return failed or self.outdated(load)


def path_of(cache: Path, machine: Machine) -> Path:
    return cache / FOLDER / f"{machine.key}.json"


def find(cache: Path, machine: Machine) -> Record | None:
    """The record of exactly this machine; None without one."""
    path = path_of(cache, machine)
    record = kept_record.find(path, _parse, "the kernels are")
    if record is None:
        return None
    kept_record.note_use(path)
    return record if record.machine == machine else None


def _parse(data: Any) -> Record:
    return msgspec.convert(data, Record)


def keep(cache: Path, record: Record) -> None:
    """Write the record, replacing that of the same machine. A failure is logged."""
    kept_record.keep(path_of(cache, record.machine), asdict(record), "the choice of kernels")


def read(path: Path) -> Record:
    """Returns the record of a file. Raises OSError, ValueError as `kept_record.read`."""
    return kept_record.read(path, _parse)
