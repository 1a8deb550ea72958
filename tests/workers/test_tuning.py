"""The measured choice of kernels: what it is made of, its file, and which file is measured again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shm.doorbell import library
from workers.interpreter import ROOT
from workers.kernels import tuning
from workers.kernels.choice import DEFAULT, Choice, Prefetch
from workers.kernels.native import Library, best, chosen, load
from workers.kernels.tuning import Tuning
from workers.kernels.tuning_file import FOLDER, RETRY, Machine, Record, find, keep, path_of

CHOICE = Choice("avx2", Prefetch("nta", 2048), 16)
RECORD = Record(
    Machine("cpu", "a b", 2, 6, ("avx2",)),
    Tuning(CHOICE, {"int4": 2.0}, {"int4": 1.0}, {"zmq": 2e-4, "shm": 1e-4}),
    3.0,
    0.5,
)
FAILED = Record(RECORD.machine, None, 1e6, 0.5, "no result within 10 s")


def test_what_is_measured_can_be_used_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "SECONDS", 0.0)
    found = tuning.tune()
    if best() is None:
        assert found is None
        return
    assert found is not None
    assert isinstance(load(found.choice.variant), Library)
    assert found.rates.keys() == found.default.keys() == set(tuning.FORMATS)
    assert msgspec.convert(json.loads(json.dumps(asdict(found))), Tuning) == found
    monkeypatch.setattr(tuning, "available_memory", lambda: 1 << 20)
    assert tuning.tune() is None


def faked(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Choice, int], float]) -> Callable[[], float]:
    """A clock that a computation moves by `seconds` of its choice and rows, and no other."""
    now = 0.0

    def compute(choice: Choice, name: str, rows: int) -> tuple[Callable[[Any], None], int]:
        def one(data: Any) -> None:
            nonlocal now
            now += seconds(choice, rows)

        return one, 64

    monkeypatch.setattr(tuning, "_compute", compute)
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: now)
    return lambda: now


@pytest.mark.skipif(not isinstance(load("avx2"), Library), reason="another variant is needed")
@pytest.mark.parametrize(("kind", "faster", "replaced"), [
    ("prefetch", 0.99, False), ("prefetch", 0.97, True), ("variant", 0.97, False), ("variant", 0.94, True),
])  # fmt: skip
def test_a_candidate_must_be_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, kind: str, faster: float, replaced: bool
) -> None:
    """A variant, which changes bits, by more than a prefetch, which changes none."""
    wanted = {"prefetch": Prefetch("nta", 2048), "variant": "portable"}[kind]
    faked(monkeypatch, lambda choice, rows: faster if getattr(choice, kind) == wanted else 1.0)
    found = tuning.tune()
    assert found is not None
    assert (getattr(found.choice, kind) == wanted) is replaced
    assert found.choice.prefetch in (wanted, DEFAULT.prefetch)


@pytest.mark.skipif(not isinstance(load("avx2"), Library), reason="another variant is needed")
@pytest.mark.parametrize(("with_32_rows", "replaced"), [(0.9, True), (1.02, True), (1.1, False)])
def test_a_variant_must_be_as_fast_with_more_rows(
    monkeypatch: pytest.MonkeyPatch, with_32_rows: float, replaced: bool
) -> None:
    """One that is faster at one row, because that waits for memory, may be slower elsewhere."""
    faster = {32: with_32_rows}
    faked(monkeypatch, lambda choice, rows: faster.get(rows, 0.9) if choice.variant == "portable" else 1.0)
    found = tuning.tune()
    assert found is not None
    assert (found.choice.variant == "portable") is replaced


@pytest.mark.skipif(best() is None, reason="nothing compiled")
@pytest.mark.parametrize(("with_4_rows", "replaced"), [(0.9, True), (1.5, False)])
def test_a_prefetch_must_be_as_fast_with_more_rows(
    monkeypatch: pytest.MonkeyPatch, with_4_rows: float, replaced: bool
) -> None:
    """The hint is the same for all numbers of rows: without one, eight rows may take half as long again."""
    none, faster = Prefetch("none", 0), {4: with_4_rows}
    faked(monkeypatch, lambda choice, rows: faster.get(rows, 0.9) if choice.prefetch == none else 1.0)
    found = tuning.tune()
    assert found is not None
    assert (found.choice.prefetch == none) is replaced


@pytest.mark.parametrize("first", [2, 9, 16, 17])
def test_matrix_units_take_the_rows_from_which_on_they_are_faster(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Faster for fewer rows is not enough where they are slower in between."""

    def seconds(choice: Choice, rows: int) -> float:
        units = rows >= choice.matrix_rows
        return 1.0 if not units else 0.5 if rows >= first or (rows == 2 and first > 9) else 2.0

    faked(monkeypatch, seconds)
    parts = tuning.walk(np.zeros(1 << 10, np.uint8), 1 << 10)
    assert tuning.matrix_rows(parts, DEFAULT) == first
    faked(monkeypatch, lambda choice, rows: 2.0 if rows >= choice.matrix_rows else 1.0)
    assert tuning.matrix_rows(parts, DEFAULT) > max(tuning.UNIT_ROWS)


def test_a_round_trip_is_measured_both_ways() -> None:
    """In a process of its own, because it forks."""
    code = "import json; from workers.round_trips import round_trips; print(json.dumps(round_trips()))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True, cwd=ROOT
    )
    trips = json.loads(run.stdout)
    assert trips.keys() == (set() if library() is None else {"zmq", "shm"})
    assert all(0 < seconds < 1 for seconds in trips.values())
    assert not run.stderr


def test_a_record_is_found_again_by_its_machine_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(tmp_path, RECORD)
    path = path_of(tmp_path, RECORD.machine)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert find(tmp_path, RECORD.machine) == RECORD
    assert find(tmp_path, Machine("cpu", "a b", 4, 6, ("avx2",))) is None
    other = path_of(tmp_path, Machine.here())
    other.write_bytes(path.read_bytes())  # of another machine, under this one's name
    other.chmod(0o600)
    assert find(tmp_path, Machine.here()) is None
    assert not caplog.messages


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data | {"version": 0},
        lambda data: [],
        lambda data: data | {"tuning": data["tuning"] | {"choice": CHOICE.to_map() | {"variant": "x"}}},
        lambda data: data | {"tuning": data["tuning"] | {"rates": {"int4": float("nan")}}},
        lambda data: data | {"measured": 1e300},
        lambda data: data | {"tuning": None},
        lambda data: data | {"failure": "both"},
        lambda data: data | {"tuning": data["tuning"] | {"round_trips": {"zmq": 1.0}}},
        lambda data: data | {"tuning": data["tuning"] | {"round_trips": {"zmq": 1.0, "shm": float("inf")}}},
        lambda data: data | {"tuning": data["tuning"] | {"choice": CHOICE.to_map() | {"matrix_rows": 0}}},
        lambda data: data | {"load": float("inf")},
        lambda data: data | {"machine": data["machine"] | {"cores": 1e400}},
        lambda data: data | {"tuning": data["tuning"] | {"choice": {}}},
        lambda data: (
            data
            | {
                "tuning": data["tuning"]
                | {"choice": CHOICE.to_map() | {"prefetch": {"hint": "t0", "ahead": -1}}}
            }
        ),
        lambda data: (
            data
            | {
                "tuning": data["tuning"]
                | {"choice": CHOICE.to_map() | {"prefetch": {"hint": "x", "ahead": 1}}}
            }
        ),
    ],
)
def test_a_damaged_file_is_removed(
    tmp_path: Path, damage: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    keep(tmp_path, RECORD)
    path = path_of(tmp_path, RECORD.machine)
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    assert find(tmp_path, RECORD.machine) is None
    assert not path.exists()
    assert "the kernels are measured again" in caplog.text


def test_a_file_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    keep(tmp_path, RECORD)
    path_of(tmp_path, RECORD.machine).chmod(0o666)
    assert find(tmp_path, RECORD.machine) is None


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FOLDER).write_bytes(b"")
    keep(tmp_path, RECORD)
    assert len(caplog.messages) == 1
    assert "could not be kept" in caplog.text


@pytest.mark.parametrize(("before", "now", "again"), [(0.9, 0.1, False), (1.1, 0.6, False), (1.1, 0.5, True)])
def test_what_was_measured_under_load_is_measured_again(before: float, now: float, again: bool) -> None:
    assert Record(RECORD.machine, RECORD.tuning, 1.0, before).outdated(now) is again


def test_a_failure_is_kept_for_a_day(tmp_path: Path) -> None:
    keep(tmp_path, FAILED)
    assert find(tmp_path, FAILED.machine) == FAILED
    assert [FAILED.stale(FAILED.measured + after, 0.5) for after in (-1, 0, RETRY - 1, RETRY)] == [
        *(True, False, False, True)
    ]
    assert not RECORD.stale(RECORD.measured + RETRY, 0.5)


def test_a_choice_of_a_variant_that_cannot_run_takes_another() -> None:
    library = chosen(Choice("none such", Prefetch("nta", 1024)))
    if best() is None:
        assert library is None
        return
    assert library is not None
    assert library.choice.prefetch == Prefetch("nta", 1024)
    assert library.variant == best().variant
