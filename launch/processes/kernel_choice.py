"""Which kernels an engine's processes use: measured at the first start on a machine, and kept."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from launch.processes.trials import TrialFailed, trial
from workers.kernels.choice import DEFAULT, Choice
from workers.kernels.tuning import Tuning
from workers.kernels.tuning_file import Machine, Record, find, keep

CHILD = "workers.kernels.tuning"
LIMIT = 10.0  # seconds; it takes one

log = logging.getLogger("tandem")


async def kernel_choice(cache: Path, measuring: Callable[[], None]) -> Choice:
    """For all processes of an engine: as kept in this cache folder, or measured now, after a call of
    `measuring`. The default one where it cannot be measured."""
    try:
        record = await kernel_record(cache, measuring)
    except TrialFailed as e:
        log.warning(f"the kernels were not measured, the usual ones are used: {e}")
        record = None
    return DEFAULT if record is None else record.tuning.choice


async def kernel_record(cache: Path, measuring: Callable[[], None], again: bool = False) -> Record | None:
    """What is kept of this machine, or else is measured in a child process and kept; `again`: in any case.
    None where nothing can be chosen. Raises TrialFailed."""
    kept = None if again else find(cache, Machine.here())
    if kept is not None and not kept.outdated(os.getloadavg()[0]):
        return kept
    measuring()
    load = os.getloadavg()[0]
    async with trial(CHILD, {}) as child:
        found = await child.result(LIMIT)
    if found is None:
        return None
    load = max(load, os.getloadavg()[0])  # programs that have just begun are seen only afterwards
    record = Record(Machine.here(), Tuning.from_json(found), time.time(), load)
    keep(cache, record)
    return record
