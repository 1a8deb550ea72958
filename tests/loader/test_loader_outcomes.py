"""The loader in this process: its exit codes, its reports in time, and what a failure leaves behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from loader_harness import Supervisor, exists

from pipeline import loader
from pipeline.checkpoint.index import CheckpointIndex
from pipeline.checkpoint.index import fingerprint as fingerprint_of
from pipeline.errors import UsageError
from pipeline.loader import PROGRESS_SECONDS, Control, Stopped
from protocol.codec import decode, encode
from protocol.messages import Failed, Heartbeat, Progress, Ready, Shutdown
from shm.disk_cache import CachedStore, CacheRecord, CacheWriter, read_record
from shm.errors import NotEnoughMemory, ShmError, UnknownFormat
from shm.store import StoreBuilder


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


def test_cached_file_has_a_record_of_its_model(supervisor: Supervisor, model: Path) -> None:
    assert loader.main(supervisor.config(model)) == 0
    ready = received(supervisor)[-1]
    assert isinstance(ready, Ready)
    supervisor.fingerprints.add(ready.fingerprint)
    record = read_record(supervisor.cache / ready.fingerprint)
    assert record == CacheRecord("store", str(model), "f32")


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
