"""The prefetcher's kind: measured once for a machine with a GPU, kept, and measured again where the record
cannot be used."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import fake_device
from pipeline.serving.prefetcher_kind import kernels, prefetcher_kind
from workers.copy_trial import Pace

from launch.cache.entries import scan
from launch.errors import WrongUsage
from launch.planning.device_choice import check_prefetcher
from pipeline.calibration.cost_cache import PREFETCHER_FILE
from pipeline.device import open_device
from pipeline.errors import UsageError
from pipeline.serving import prefetcher_kind as module
from workers import mps
from workers.cuda import CudaError

PACES = {"process": Pace(50.0, 30.0, 1.0), "thread": Pace(50.0, 49.0, 1.0)}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The devices on which a trial has run."""
    seen: list[int] = []

    def measure(device: int, kernels: Any, tick: Any) -> dict[str, Pace]:
        seen.append(device)
        return PACES

    monkeypatch.setattr(module.copy_trial, "measure", measure)
    monkeypatch.setattr(module.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    return seen


def test_it_is_measured_once_and_kept(measured: list[int], tmp_path: Path, monkeypatch) -> None:
    with fake_device() as (device, _):
        for _ in range(2):
            assert prefetcher_kind("auto", device, tmp_path) == "thread"
        assert len(measured) == 1
        (file,) = (tmp_path / "costs").iterdir()
        (entry,) = [entry for entry in scan(tmp_path) if entry.on_disk]
        assert (entry.kind, entry.setting) == ("costs", "process or thread")
        assert PREFETCHER_FILE.fullmatch(file.name)
        assert file.stat().st_mode & 0o777 == 0o600
        for change in (
            {"version": 0},
            {"thread": {"alone": 1.0}},
            {"process": {**vars(PACES["process"]), "beside": 0}},
        ):
            file.write_text(json.dumps(json.loads(file.read_text()) | change))
            assert prefetcher_kind("auto", device, tmp_path) == "thread"
        assert len(measured) == 4
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))  # without a daemon
        assert prefetcher_kind("auto", device, tmp_path) == "thread"
        (tmp_path / "control").touch()
        assert prefetcher_kind("auto", device, tmp_path) == "thread"
        assert len(measured) == 5


def test_where_mps_is_offered_the_process_shares_the_gpu(measured, tmp_path, monkeypatch, caplog) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(
        module.copy_trial, "measure", lambda *_: dict(zip(PACES, reversed(PACES.values()), strict=True))
    )
    pipes = tmp_path / "pipes"
    pipes.mkdir()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(pipes))
    with fake_device() as (device, _):
        assert prefetcher_kind("auto", device, tmp_path) == "process"
        with pytest.raises(UsageError, match="nvidia-cuda-mps-control"):
            prefetcher_kind("mps", device, tmp_path)
        with socket.socket(socket.AF_UNIX) as daemon:
            daemon.bind(str(pipes / "control"))
            daemon.listen()
            for asked in ("auto", "mps"):
                assert prefetcher_kind(asked, device, tmp_path) == "mps"
            assert "the prefetcher is a process under MPS: mps 0.0 GB/s" in caplog.text
            with pytest.raises(UsageError):
                prefetcher_kind("mps", open_device("cpu"), tmp_path)
            check_prefetcher("mps", "cuda")
            with pytest.raises(WrongUsage, match="needs a GPU"):
                check_prefetcher("mps", "cpu")
            mps.decline(tmp_path)
            assert not mps.offered()
            monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(pipes))
        assert not mps.offered()  # the daemon was killed, and its socket is still there
        with pytest.raises(WrongUsage, match="nvidia-cuda-mps-control"):
            check_prefetcher("mps", "cuda")
        assert prefetcher_kind("auto", device, tmp_path) == "process"  # what was measured without it


def test_what_is_asked_is_used_and_the_host_needs_no_trial(measured: list[int], tmp_path: Path) -> None:
    with fake_device() as (device, _):
        assert prefetcher_kind("process", device, tmp_path) == "process"
        assert prefetcher_kind("thread", device, tmp_path) == "thread"
    assert prefetcher_kind("auto", open_device("cpu"), tmp_path) == "process"
    assert measured == []
    assert list(tmp_path.iterdir()) == []


def test_a_trial_that_fails_is_not_kept(measured: list[int], tmp_path: Path, monkeypatch, caplog) -> None:
    def fails(device: int, kernels: Any, tick: Any) -> None:
        raise CudaError("cudaMalloc: out of memory")

    monkeypatch.setattr(module.copy_trial, "measure", fails)
    with fake_device() as (device, _):
        assert prefetcher_kind("auto", device, tmp_path) == "process"
    assert "could not be measured: cudaMalloc: out of memory" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_kernels_run_for_the_time_that_is_asked(monkeypatch) -> None:
    monkeypatch.setattr(module, "WIDTH", 8)
    monkeypatch.setattr(module, "READ", 64)
    with fake_device() as (device, _):
        monkeypatch.setattr(device, "seconds_between", lambda earlier, later: 0.5)
        assert kernels(device, 0.01) == 0.5
