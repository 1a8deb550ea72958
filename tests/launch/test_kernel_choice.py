"""Which choice of kernels an engine's start keeps, and with which load it was measured."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from launch.processes import kernel_choice
from launch.processes.trials import TrialFailed
from workers.kernels.choice import DEFAULT, Choice, Prefetch
from workers.kernels.tuning import Tuning

BUSY = 10.0 * len(os.sched_getaffinity(0))  # load average
FOUND = Tuning(Choice("avx2", Prefetch("nta", 2048), 2), {"int4": 2.0}, {"int4": 1.0})


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


@pytest.mark.parametrize("before_and_after", [(0.1, BUSY), (BUSY, 0.1)])
async def test_load_before_or_after_the_measurement_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_and_after: tuple[float, float]
) -> None:
    """Of a loaded machine: it is measured again once the machine is half as busy, and not before."""
    measured = Measured(monkeypatch, FOUND.to_json())
    began: list[int] = []
    loads(monkeypatch, *before_and_after)
    record = await kernel_choice.kernel_record(tmp_path, lambda: began.append(measured.runs))
    assert record is not None
    assert (record.load, record.tuning) == (BUSY, FOUND)
    loads(monkeypatch, BUSY / 2 + 1)
    assert await kernel_choice.kernel_choice(tmp_path, lambda: began.append(measured.runs)) == FOUND.choice
    assert began == [0]
    loads(monkeypatch, BUSY / 2)
    await kernel_choice.kernel_record(tmp_path, lambda: began.append(measured.runs))
    assert began == [0, 1]
    assert measured.runs == 2


async def test_kept_choice_is_measured_again_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Measured(monkeypatch, FOUND.to_json())
    loads(monkeypatch, 0.0)
    for again, runs in ((False, 1), (False, 1), (True, 2)):
        assert await kernel_choice.kernel_record(tmp_path, lambda: None, again) is not None
        assert measured.runs == runs


@pytest.mark.parametrize("found", [None, TrialFailed("no memory")])
async def test_default_where_nothing_can_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: object
) -> None:
    Measured(monkeypatch, found)
    assert await kernel_choice.kernel_choice(tmp_path, lambda: None) == DEFAULT
    assert ("not measured, the usual ones are used: no memory" in caplog.text) == (found is not None)
    assert os.listdir(tmp_path) == []
