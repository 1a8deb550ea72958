"""The loader in this process: its exit codes, its reports in time, and what a failure leaves behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint
import zmq
from loader_harness import Supervisor, assert_right, exists

from pipeline import loader
from pipeline.checkpoint.index import CheckpointIndex
from pipeline.checkpoint.index import fingerprint as fingerprint_of
from pipeline.errors import UsageError
from pipeline.loader import PROGRESS_SECONDS, Control, Stopped
from protocol.codec import decode, encode
from protocol.messages import Failed, Heartbeat, Progress, Shutdown
from shm.disk_cache import CachedStore, CacheWriter
from shm.errors import NotEnoughMemory, ShmError, UnknownFormat
from shm.store import StoreBuilder, store_segments


class Clock:
    """Takes the place of `time` in the loader."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


def received(supervisor: Supervisor, wait_ms: int = 200) -> list[object]:
    """The messages that arrive within a while."""
    messages = []
    while supervisor.control.poll(wait_ms):
        sender, *frames = supervisor.control.recv_multipart()
        assert sender == supervisor.identity
        messages.append(decode(frames))
        wait_ms = 20
    return messages


def raising(error: BaseException):
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code", "failed"),
    [
        (UsageError("a wrong option"), 2, Failed("loader", "a wrong option", True)),
        (NotEnoughMemory("too little"), 2, Failed("loader", "too little", True)),
        (UnknownFormat("int3"), 2, Failed("loader", "int3", True)),
        (ShmError("a lock"), 1, Failed("loader", "a lock", False)),
        (ValueError("a bug"), 1, Failed("loader", "loading failed: ValueError: a bug", False)),
        (Stopped(), 0, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_failure_has_its_exit_code_and_message(
    supervisor: Supervisor, model: Path, monkeypatch, error: Exception, code: int, failed: Failed | None
) -> None:
    monkeypatch.setattr(loader.Loading, "load", raising(error))
    assert loader.main(supervisor.config(model)) == code
    assert received(supervisor) == ([] if failed is None else [failed])


def fingerprint(model: Path) -> str:
    return fingerprint_of(CheckpointIndex.open(model), "f32", 32)


@pytest.mark.parametrize(
    ("place", "name"),
    [(CacheWriter, "finish"), (StoreBuilder, "finish")],
    ids=["writing the cached file", "finishing the store"],
)
def test_interrupted_load_leaves_no_store_and_no_file(
    supervisor: Supervisor, model: Path, monkeypatch, place: type, name: str
) -> None:
    monkeypatch.setattr(place, name, raising(Stopped()))
    assert loader.main(supervisor.config(model)) == 0
    assert not [m for m in received(supervisor) if not isinstance(m, Progress)]
    assert not exists(fingerprint(model))
    assert not list(supervisor.cache.glob("*/*"))


@pytest.mark.parametrize("name", ["__init__", "finish"])
def test_a_file_that_cannot_be_written_is_a_warning(
    supervisor: Supervisor, model: Path, monkeypatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setattr(CacheWriter, name, raising(OSError(28, "No space left on device")))
    assert loader.main(supervisor.config(model)) == 0
    supervisor.fingerprints.add(received(supervisor)[-1].fingerprint)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "could not be kept on disk" in record.message
    assert "No space left" in record.message
    assert not list(supervisor.cache.glob("*/*"))
    assert_right(fingerprint(model), tiny_checkpoint.expert_tensors())


@pytest.mark.parametrize("place", [CacheWriter, os])
def test_a_full_disk_ends_a_start_that_needs_it_and_leaves_nothing(
    supervisor: Supervisor, model: Path, monkeypatch, place: Any
) -> None:
    """Before the first byte, and while experts are written."""
    full = raising(OSError(28, "No space left on device"))
    monkeypatch.setattr(place, "__init__" if place is CacheWriter else "pwrite", full)
    assert loader.main(supervisor.config(model, host_memory=1 << 20)) == 2
    failed = received(supervisor)[-1]
    assert isinstance(failed, Failed)
    assert failed.text.startswith("the experts that memory does not hold must be on disk, and ")
    assert failed.text.endswith("store.bin cannot be written: No space left on device")
    assert not list(supervisor.cache.glob("*/*"))
    assert not store_segments()


def test_interrupted_read_of_the_cached_file_leaves_no_store(
    supervisor: Supervisor, model: Path, monkeypatch
) -> None:
    assert loader.main(supervisor.config(model)) == 0
    supervisor.fingerprints.add(received(supervisor)[-1].fingerprint)
    loader.unlink(loader.store_name(fingerprint(model)))
    monkeypatch.setattr(CachedStore, "fill", raising(Stopped()))
    assert loader.main(supervisor.config(model)) == 0
    assert not exists(fingerprint(model))
    assert (supervisor.cache / fingerprint(model) / "store.bin").exists()


@pytest.fixture
def control(supervisor: Supervisor) -> Iterator[Control]:
    with zmq.Context() as context:
        supervisor.config(supervisor.runtime)  # counts a generation
        control = Control(context, supervisor.runtime, supervisor.identity)
        yield control
        control.close()


def test_progress_is_reported_ten_times_a_second_and_at_the_end(
    supervisor: Supervisor, control: Control, monkeypatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(loader, "time", clock)
    first, second, waiting = control.stage("a", 10), control.stage("b", 10), control.stage("c", 0)
    for report, done, after in (
        (first, 0, 0.0),  # sent
        (first, 1, PROGRESS_SECONDS / 2),
        (first, 2, PROGRESS_SECONDS / 2 + 0.001),  # sent
        (first, 3, PROGRESS_SECONDS - 0.001),
        (first, 10, 0.0),  # sent: the end
        (second, 1, PROGRESS_SECONDS - 0.001),
        (second, 2, 0.002),  # sent
        (waiting, 0, 0.0),
        (waiting, 0, PROGRESS_SECONDS + 0.001),  # sent
    ):
        clock.now += after
        report(done)
    sent = [("a", 0, 10), ("a", 2, 10), ("a", 10, 10), ("b", 2, 10), ("c", 0, 0)]
    assert received(supervisor) == [Progress(*fields) for fields in sent]


def report_often(report: Callable[[int], None]) -> None:
    """The end of a stage, until the messages behind the first one have arrived."""
    for _ in range(1000):
        report(10)
        time.sleep(0.001)


def test_shutdown_ends_the_stage_that_runs(supervisor: Supervisor, control: Control, monkeypatch) -> None:
    """Behind another message, which is dropped."""
    clock = Clock()
    monkeypatch.setattr(loader, "time", clock)
    report = control.stage("a", 10)
    report(1)
    assert received(supervisor) == [Progress("a", 1, 10)]
    for message in (Heartbeat(0.0), Shutdown()):
        supervisor.control.send_multipart([supervisor.identity, *encode(message)])
    assert control._socket.poll(10_000)
    report(2)  # not yet time for a report
    clock.now += PROGRESS_SECONDS
    with pytest.raises(Stopped):
        report_often(report)
