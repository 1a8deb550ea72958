"""The measurement of the kernels at a start: once for two starts at the same time, and not at each start
where it fails; which choice is kept, and with which load it was measured. The child that measures is replaced
by a script, or by its result."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from launch.doctor import kernels
from launch.processes import kernel_choice
from launch.processes.kernel_choice import choice_of, exchange_of, kept_or_measured, kernel_record
from launch.processes.trials import TrialFailed
from shm.doorbell import library
from workers.kernels.choice import DEFAULT, Choice, Prefetch
from workers.kernels.native import best
from workers.kernels.tuning import Tuning
from workers.kernels.tuning_file import FOLDER, RETRY, Machine, find, keep

pytestmark = pytest.mark.skipif(best() is None, reason="nothing compiled")

Measure = Callable[[str], Path]
BUSY = 10.0 * len(os.sched_getaffinity(0))  # load average
FOUND = Tuning(Choice("avx2", Prefetch("nta", 2048)), {"int4": 2.0}, {"int4": 1.0})


class Measured:
    """Takes the place of a measurement in a child process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, found: object) -> None:
        self.runs = 0
        self._found = found
        monkeypatch.setattr(kernel_choice, "trial", self._trial)

    @asynccontextmanager
    async def _trial(self, module: str, config: dict[str, Any]) -> AsyncIterator[Measured]:
        yield self

    async def result(self, limit: float) -> object:
        self.runs += 1
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


def loads(monkeypatch: pytest.MonkeyPatch, *values: float) -> None:
    """The machine's load average, each time it is read; then the last one."""
    left = list(values)
    monkeypatch.setattr(os, "getloadavg", lambda: (left.pop(0) if len(left) > 1 else left[0], 0.0, 0.0))


def tuning(trips: dict[str, float]) -> Tuning:
    chosen = best()
    assert chosen is not None
    return Tuning(chosen.choice, {"int4": 2e9}, {"int4": 1e9}, trips)


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Replaces the measurement by a module with this body of `main`; the file that is returned has a line for
    each run of it."""

    def measure(body: str) -> Path:
        runs = tmp_path / "runs"
        runs.touch()
        (tmp_path / "scripted_tuning.py").write_text(
            "import json, sys, time\n"
            f"def main(config):\n    print('ran', file=open({str(runs)!r}, 'a'))\n    {body}\n"
        )
        monkeypatch.setattr(kernel_choice, "CHILD", "scripted_tuning")
        return runs

    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.1, 0.1))  # else a busy machine is measured again
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return measure


async def test_two_starts_at_once_measure_once(measure: Measure, tmp_path: Path) -> None:
    plain = json.dumps(asdict(tuning({})))
    runs = measure(f"time.sleep(0.5); print({plain!r}, flush=True)")
    said: list[str] = []
    both = (kernel_record(tmp_path, lambda: said.append("measuring")) for _ in range(2))
    first, second = await asyncio.gather(*both)
    assert first == second is not None
    assert len(runs.read_text().split()) == 1
    assert len(said) == 2
    assert await kernel_record(tmp_path, lambda: said.append("again")) == first
    assert len(said) == 2


async def test_a_measurement_that_hangs_is_not_repeated_at_each_start(
    measure: Measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs = measure("time.sleep(60)")
    monkeypatch.setattr(kernel_choice, "LIMIT", 0.7)
    for _ in range(2):
        assert choice_of(await kept_or_measured(tmp_path, lambda: None)) == DEFAULT
    assert len(runs.read_text().split()) == 1
    reason = "no result within 0.7 s"
    assert caplog.messages == [f"the kernels could not be measured, the usual ones are used: {reason}"] * 2
    record = find(tmp_path, Machine.here())
    assert record is not None
    finding = kernels.inspect(record, tmp_path)[-1]
    assert finding.found == f"the kernels could not be measured: {reason}"
    keep(tmp_path, replace(record, measured=record.measured - RETRY))
    await kernel_record(tmp_path, lambda: None)
    assert len(runs.read_text().split()) == 2


async def test_a_child_of_a_measurement_that_hangs_ends_with_it(
    measure: Measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the other end of an exchange that hangs: it has the measurement's pipes, which are waited for."""
    measure("import os; os.fork(); time.sleep(60)")
    monkeypatch.setattr(kernel_choice, "LIMIT", 0.7)
    async with asyncio.timeout(10):
        record = await kernel_record(tmp_path, lambda: None)
        assert record is not None
        assert record.failure == "no result within 0.7 s"


async def test_another_process_that_never_ends_its_measurement_is_not_waited_for(
    measure: Measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = json.dumps(asdict(tuning({})))
    measure(f"print({plain!r}, flush=True)")
    with kernel_choice.measuring_alone(tmp_path, Machine.here()):
        monkeypatch.setattr(kernel_choice, "PATIENCE", 0.2)
        assert await kernel_record(tmp_path, lambda: None) is not None
    assert find(tmp_path, Machine.here()) is not None


async def test_a_child_that_cannot_be_started_is_not_kept_as_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(module: str, config: object) -> None:
        raise TrialFailed("no process could be started: Resource temporarily unavailable")

    monkeypatch.setattr(kernel_choice, "trial", refused)
    assert await kept_or_measured(tmp_path, lambda: None) is None
    assert "the kernels were not measured" in caplog.text
    assert find(tmp_path, Machine.here()) is None


@pytest.mark.skipif(library() is None, reason="no shared memory")
def test_auto_takes_the_exchange_that_was_faster() -> None:
    slow, fast = tuning({"zmq": 1e-4, "shm": 3e-4}), tuning({"zmq": 3e-4, "shm": 1e-4})
    assert exchange_of("auto", 2, slow) == "zmq"
    assert exchange_of("auto", 2, fast) == "shm"
    assert exchange_of("auto", 2, tuning({})) == exchange_of("auto", 2, None) == "shm"
    assert exchange_of("shm", 2, slow) == "shm"
    assert exchange_of("zmq", 2, fast) == "zmq"
    assert exchange_of("auto", 0, fast) == ""
    (finding,) = kernels.exchanged(slow)
    assert finding.found == "work gets to the workers through sockets"
    assert finding.means == "a Work and its answer take 100 us through sockets, 300 us through shared memory"


@pytest.mark.parametrize("before_and_after", [(0.1, BUSY), (BUSY, 0.1)])
async def test_load_before_or_after_the_measurement_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_and_after: tuple[float, float]
) -> None:
    """Of a loaded machine: it is measured again once the machine is half as busy, and not before."""
    measured = Measured(monkeypatch, asdict(FOUND))
    began: list[int] = []
    loads(monkeypatch, *before_and_after)
    record = await kernel_record(tmp_path, lambda: began.append(measured.runs))
    assert record is not None
    assert (record.load, record.tuning) == (BUSY, FOUND)
    loads(monkeypatch, BUSY / 2 + 1)
    assert choice_of(await kept_or_measured(tmp_path, lambda: began.append(measured.runs))) == FOUND.choice
    assert began == [0]
    loads(monkeypatch, BUSY / 2)
    await kernel_record(tmp_path, lambda: began.append(measured.runs))
    assert began == [0, 1]
    assert measured.runs == 2


@pytest.mark.parametrize("found", [None, TrialFailed("no memory")])
async def test_default_where_nothing_can_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: object
) -> None:
    Measured(monkeypatch, found)
    assert choice_of(await kept_or_measured(tmp_path, lambda: None)) == DEFAULT
    failed = found is not None
    assert ("not be measured, the usual ones are used: no memory" in caplog.text) == failed
    assert os.listdir(tmp_path) == [FOLDER] * failed
