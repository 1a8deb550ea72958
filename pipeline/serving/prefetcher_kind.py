"""What copies tiles to the device, a process or a thread: with `--prefetcher auto` what the first start on a
machine with a GPU measured as better (`workers/copy_trial.py`), kept in the disk cache beside the costs.

Where CUDA's MPS is offered, the process shares the GPU through it, and is measured like that: it is another
kind then, and another machine, on which what was measured without it does not count.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.calibration import cost_cache
from pipeline.config import PrefetcherName
from pipeline.device import Device
from pipeline.errors import UsageError
from shm import kept_record
from shm.kept_record import KeptRecord
from workers import copy_trial, mps
from workers.copy_trial import Copying, Kind, Pace, Tick
from workers.cuda import CudaError

VERSION = 1
SHOWN: dict[Kind, str] = {"process": "process", "thread": "thread", "mps": "process under MPS"}
WIDTH = 2048  # of the matrices that kernels multiply meanwhile
READ = 1 << 27  # bytes of memory that they read meanwhile
PRODUCTS = 8  # of one round

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record(KeptRecord):
    """What was measured."""

    cpu: str
    machine_cores: int
    device: str
    mps: bool
    process: Pace
    thread: Pace
    measured: float  # seconds since the epoch
    load: float

    @property
    def cores(self) -> int:
        return self.machine_cores

    @property
    def kind(self) -> Kind:
        better = copy_trial.better(self.process, self.thread)
        return "mps" if self.mps and better == "process" else better

    @classmethod
    def from_json(cls, data: Any) -> Record:
        """The inverse of `to_json`. Anything else raises ValueError, TypeError or KeyError."""
        if data["version"] != VERSION:
            raise ValueError("it is of another version")
        paces = [Pace(**{name: float(number) for name, number in data[kind].items()}) for kind in KINDS]
        if not all(number > 0 for pace in paces for number in asdict(pace).values()):
            raise ValueError("its paces are not positive")
        place = str(data["cpu"]), int(data["machine_cores"]), str(data["device"]), bool(data["mps"])
        return cls(*place, paces[0], paces[1], float(data["measured"]), float(data["load"]))

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"version": VERSION}


KINDS: tuple[Copying, Copying] = ("process", "thread")


def prefetcher_kind(asked: PrefetcherName, device: Device, cache: Path, tick: Tick = lambda: None) -> Kind:
    """The kind for this engine. `tick` is called while it is measured. Where nothing can be measured, the
    process, which tries by itself whether it can map the device's memory."""
    if asked == "mps" and not (mps.offered() and not device.on_host):
        raise UsageError(mps.NO_MPS)
    if asked != "auto":
        return asked
    if device.on_host:  # copies within the host's memory: a thread of the coordinator would hold it up
        return "process"
    place = (*cost_cache.processor(), device.describe(), mps.offered())
    key = hashlib.sha256(json.dumps(place).encode()).hexdigest()[:16]
    path = cache / cost_cache.FOLDER / f"prefetcher-{key}.json"
    known = kept_record.find(path, Record.from_json, "the prefetcher's kind is")
    load = os.getloadavg()[0]
    if known is not None and not known.outdated(load):
        kept_record.note_use(path)
        return known.kind
    try:
        number = device.torch_device.index or 0
        paces = copy_trial.measure(number, lambda seconds: kernels(device, seconds, tick), tick)
    except (CudaError, OSError, torch.OutOfMemoryError) as e:
        log.warning(f"process or thread for the prefetcher could not be measured: {e}")
        return "mps" if mps.offered() else "process"
    record = Record(*place, paces["process"], paces["thread"], time.time(), load)
    kept_record.keep(path, record.to_json(), "the prefetcher's kind")
    log.info(described(record))
    return record.kind


def described(record: Record) -> str:
    """One line for a person."""
    names = ("mps" if record.mps else "process", "thread")
    parts = [
        f"{kind} {pace.alone / 1e9:.1f} GB/s, {pace.beside / 1e9:.1f} beside kernels, which take"
        f" {pace.slowdown:.2f} times as long"
        for kind, pace in zip(names, (record.process, record.thread), strict=True)
    ]
    return f"the prefetcher is a {SHOWN[record.kind]}: " + "; ".join(parts)


def kernels(device: Device, seconds: float, tick: Tick = lambda: None) -> float:
    """Compute on the device for so long: products, and reads of memory as decode does. Returns the median of
    a round's seconds."""
    wide = torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16, device=device.torch_device)
    memory = torch.zeros(READ // 4, device=device.torch_device)
    found: list[float] = []
    until = time.perf_counter() + seconds
    while not found or time.perf_counter() < until:
        tick()
        began = device.time_mark()
        for _ in range(PRODUCTS):
            wide = wide @ wide
            memory.sum()
        ended = device.time_mark()
        device.wait(device.fence())
        found.append(device.seconds_between(began, ended))
    return sorted(found)[len(found) // 2]
