"""Tunings of this machine that are kept between starts: `<cache folder>/kernels/<machine>.json`, beside the
costs (`pipeline/calibration/cost_cache.py`).

A file contains the machine that it was measured on, and is readable by its owner alone. It is written
completely or not at all; a file that is damaged, of another version or possibly written by another user is
removed, and the machine is measured again. Errors never fail a start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from protocol.errors import NotPrivate
from protocol.private_files import check_private, make_folders
from protocol.small_files import read_small
from shm.atomic_file import atomic_file
from shm.kernel_files import contents, parse_cpuinfo
from workers.kernels import native
from workers.kernels.tuning import Tuning

FOLDER = "kernels"
FILE_NAME = re.compile(r"[0-9a-f]{16}\.json")  # others in the folder are not touched
MAX_BYTES = 1 << 16
LOADED = 0.5  # load average for each core, from which on the measurement may be wrong
LATEST = 1 << 40  # seconds since the epoch
VERSION = 2  # of the files, and of how is measured

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Machine:
    """What a tuning depends on."""

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
class Record:
    machine: Machine
    tuning: Tuning
    measured: float  # seconds since the epoch
    load: float  # the machine's load average just before

    @property
    def loaded(self) -> bool:
        """Whether other programs were computing, so that the choice may be wrong."""
        return self.load > LOADED * self.machine.cores

    def outdated(self, load: float) -> bool:
        """Whether to measure again at this load average: the machine was busy, and is half as busy now."""
        return self.loaded and load <= self.load / 2

    def to_json(self) -> dict[str, Any]:
        tuning = {"tuning": self.tuning.to_json(), "measured": self.measured, "load": self.load}
        return {"version": VERSION, "machine": asdict(self.machine)} | tuning

    @classmethod
    def from_json(cls, data: Any) -> Record:
        """The inverse of `to_json`. Anything else raises ValueError, TypeError, KeyError, AttributeError or
        ArithmeticError."""
        if data["version"] != VERSION:
            raise ValueError("it is of another version")
        plain = data["machine"]
        machine = Machine(
            str(plain["cpu"]), str(plain["flags"]), int(plain["cores"]), int(plain["kernels"]),
            tuple(map(str, plain["variants"])),
        )  # fmt: skip
        record = cls(machine, Tuning.from_json(data["tuning"]), float(data["measured"]), float(data["load"]))
        if record.tuning.choice.variant not in machine.variants:
            raise ValueError("it chooses a variant that its machine does not have")
        if not (0 <= record.measured <= LATEST and math.isfinite(record.load)):
            raise ValueError("it has no valid time or load")
        return record


def path_of(cache: Path, machine: Machine) -> Path:
    return cache / FOLDER / f"{machine.key}.json"


def find(cache: Path, machine: Machine) -> Record | None:
    """The record of exactly this machine; None without one."""
    path = path_of(cache, machine)
    try:
        record = read(path)
    except OSError:
        return None
    except ValueError as e:
        log.warning(f"{path} is not used, the kernels are measured again: {' '.join(str(e).split())[:100]}")
        with suppress(OSError):
            path.unlink()
        return None
    with suppress(OSError):  # a disk that cannot be written: its time of last use is not kept
        os.utime(path)
    return record if record.machine == machine else None


def keep(cache: Path, record: Record) -> None:
    """Write the record, replacing that of the same machine. A failure is logged."""
    path = path_of(cache, record.machine)
    try:
        make_folders(path.parent)
        with atomic_file(path) as file:
            file.write(json.dumps(record.to_json(), indent=1).encode() + b"\n")
    except OSError as e:
        log.warning(
            f"the choice of kernels could not be kept in {path.parent}, the next start measures again:"
            f" {e.strerror}"
        )


def read(path: Path) -> Record:
    """A record of a file that only this user can have written. Raises OSError where it cannot be read,
    ValueError where it holds no such record."""
    try:
        raw = read_small(path, MAX_BYTES, flags=os.O_NOFOLLOW, check=check_private)
        return Record.from_json(json.loads(raw))
    except (NotPrivate, TypeError, KeyError, AttributeError, RecursionError, ArithmeticError) as e:
        raise ValueError(str(e)) from e
