"""The choice of an engine's kernels, and of what carries work to the workers: measured at the first start
on a machine, and kept."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from launch.processes.trials import TrialFailed, trial
from pipeline.config import ExchangeName
from shm.doorbell import library
from shm.file_locks import POLL_SECONDS
from workers.kernels.choice import DEFAULT, Choice
from workers.kernels.tuning import Tuning
from workers.kernels.tuning_file import Machine, Record, find, keep, measuring_alone

CHILD = "workers.kernels.tuning"
LIMIT = 10.0  # seconds; it takes one
PATIENCE = LIMIT + 1  # seconds for another process's measurement

log = logging.getLogger("tandem")


async def kept_or_measured(cache: Path, measuring: Callable[[], None]) -> Tuning | None:
    """Returns the tuning for an engine. Where it was not measured, the log says why."""
    try:
        record = await kernel_record(cache, measuring)
    except TrialFailed as e:
        log.warning(f"the kernels were not measured, the usual ones are used: {e}")
        return None
    if record is not None and record.tuning is None:
        log.warning(f"the kernels could not be measured, the usual ones are used: {record.failure}")
    return None if record is None else record.tuning


def choice_of(tuning: Tuning | None) -> Choice:
    """Returns the choice for all processes of an engine."""
    return DEFAULT if tuning is None else tuning.choice


def exchange_of(wanted: ExchangeName, workers: int, tuning: Tuning | None) -> str:
    """Returns what carries work to the workers: "zmq" or "shm"; empty without workers. `auto` is what was
    measured to be faster, shared memory where nothing was."""
    if not workers:
        return ""
    if wanted != "auto":
        return wanted
    trips = {} if tuning is None else tuning.round_trips
    return "zmq" if library() is None or (len(trips) == 2 and trips["zmq"] < trips["shm"]) else "shm"


async def kernel_record(cache: Path, measuring: Callable[[], None]) -> Record | None:
    """Returns what is kept of this machine, or else is measured in a child process and then kept.
    Where another process measures, its record is waited for. A measurement that fails is kept too, with the
    reason. None where nothing can be chosen. Raises TrialFailed where no child can be started."""
    machine = Machine.here()
    if (kept := _usable(cache, machine)) is not None:
        return kept
    measuring()
    async with _alone(cache, machine):
        kept = _usable(cache, machine)  # another process may have measured meanwhile
        return kept if kept is not None else await _measured(cache, machine)


def _usable(cache: Path, machine: Machine) -> Record | None:
    kept = find(cache, machine)
    return None if kept is None or kept.stale(time.time(), os.getloadavg()[0]) else kept


@asynccontextmanager
async def _alone(cache: Path, machine: Machine) -> AsyncIterator[None]:
    """Hold the measurement's lock during the block. A process that holds it for longer than a measurement
    takes is not waited for."""
    end = time.monotonic() + PATIENCE
    while True:
        with measuring_alone(cache, machine) as alone:
            if alone or time.monotonic() > end:
                yield
                return
        await asyncio.sleep(POLL_SECONDS)


async def _measured(cache: Path, machine: Machine) -> Record | None:
    load, failure, measured = os.getloadavg()[0], "", None
    async with trial(CHILD, {}) as child:
        try:
            measured = await child.result(LIMIT)
        except TrialFailed as e:
            failure = str(e)
    if measured is None and not failure:
        return None
    load = max(load, os.getloadavg()[0])  # programs that have just begun are seen only afterwards
    tuning: Tuning | None = None
    try:
        tuning = None if failure else msgspec.convert(measured, Tuning)
    except msgspec.ValidationError as e:
        failure = f"unexpected output: {e}"
    record = Record(machine, tuning, time.time(), load, failure)
    keep(cache, record)
    return record
