"""The measurement of the kernels at a start: not at each start where it fails; which choice is kept, and with
which load it was measured. The child that measures is replaced by a script, or by its result."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from launch.doctor import machine
from launch.processes import trials
from launch.processes.trials import TrialFailed, choice_of, exchange_of, kept_or_measured, kernel_record
from shm.doorbell import library
from workers.kernels.choice import DEFAULT, Choice, Prefetch
from workers.kernels.native import best
from workers.kernels.tuning import Tuning
from workers.kernels.tuning_file import FOLDER, RETRY, Machine, find, keep

pytestmark = pytest.mark.skipif(best() is None, reason="nothing compiled")

BUSY = 10.0 * len(os.sched_getaffinity(0))  # load average
FOUND = Tuning(Choice("avx2", Prefetch("nta", 2048)), {"int4": 2.0}, {"int4": 1.0})


class Measured:
    """Takes the place of a measurement in a child process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, outcome: object) -> None:
        self.runs = 0
        self._outcome = outcome
        monkeypatch.setattr(trials, "trial", self._trial)

    @asynccontextmanager
    async def _trial(self, module: str, config: dict[str, Any]) -> AsyncIterator[Measured]:
        yield self

    async def result(self, limit: float) -> object:
        self.runs += 1
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


def loads(monkeypatch: pytest.MonkeyPatch, *values: float) -> None:
    """The machine's load average, each time it is read; then the last one."""
    left = list(values)
    monkeypatch.setattr(os, "getloadavg", lambda: (left.pop(0) if len(left) > 1 else left[0], 0.0, 0.0))


async def test_a_measurement_that_hangs_ends_with_its_children_and_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its child has its pipes, which would otherwise be waited for."""
    runs = tmp_path / "runs"
    (tmp_path / "scripted_tuning.py").write_text(
        "import os, time\n"
        f"def main(config):\n    print('ran', file=open({str(runs)!r}, 'a'))\n    os.fork(); time.sleep(60)\n"
    )
    monkeypatch.setattr(trials, "KERNELS", "scripted_tuning")
    monkeypatch.setattr(trials, "KERNELS_LIMIT", 0.7)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    loads(monkeypatch, 0.1)
    async with asyncio.timeout(60):
        for _ in range(2):
            assert choice_of(await kept_or_measured(tmp_path, lambda: None)) == DEFAULT
    reason = "no result within 0.7 s"
    assert caplog.messages == [f"the kernels could not be measured, the usual ones are used: {reason}"] * 2
    record = find(tmp_path, Machine.here())
    assert record is not None
    assert record.failure == reason
    *_, finding = machine.kernels(record, tmp_path)
    assert finding.found == f"the kernels could not be measured: {reason}"


async def test_a_failure_is_kept_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch, TrialFailed("no memory"))
    for _ in range(2):
        record = await kernel_record(tmp_path, lambda: None)
        assert record is not None
        assert (record.tuning, record.failure, measured.runs) == (None, "no memory", 1)
    keep(tmp_path, replace(record, measured=record.measured - RETRY))
    await kernel_record(tmp_path, lambda: None)
    assert measured.runs == 2


@pytest.mark.skipif(library() is None, reason="no shared memory")
def test_auto_takes_the_exchange_that_was_faster() -> None:
    slow = replace(FOUND, round_trips={"zmq": 1e-4, "shm": 3e-4})
    fast = replace(FOUND, round_trips={"zmq": 3e-4, "shm": 1e-4})
    assert exchange_of("auto", 2, slow) == "zmq"
    assert exchange_of("auto", 2, fast) == "shm"
    assert exchange_of("auto", 2, FOUND) == exchange_of("auto", 2, None) == "shm"
    assert exchange_of("shm", 2, slow) == "shm"
    assert exchange_of("zmq", 2, fast) == "zmq"
    assert exchange_of("auto", 0, fast) == ""


@pytest.mark.parametrize("before_and_after", [(0.1, BUSY), (BUSY, 0.1)])
async def test_load_before_or_after_the_measurement_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_and_after: tuple[float, float]
) -> None:
    """A loaded machine is measured again once it is half as busy, and not before."""
    measured = Measured(monkeypatch, asdict(FOUND))
    loads(monkeypatch, *before_and_after)
    record = await kernel_record(tmp_path, lambda: None)
    assert record is not None
    assert (record.load, record.tuning) == (BUSY, FOUND)
    for load, runs in ((BUSY / 2 + 1, 1), (BUSY / 2, 2)):
        loads(monkeypatch, load)
        assert choice_of(await kept_or_measured(tmp_path, lambda: None)) == FOUND.choice
        assert measured.runs == runs


async def test_default_where_nothing_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Measured(monkeypatch, None)
    assert choice_of(await kept_or_measured(tmp_path, lambda: None)) == DEFAULT
    assert not (tmp_path / FOLDER).exists()
