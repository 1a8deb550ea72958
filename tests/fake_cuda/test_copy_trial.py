"""Process or thread: the trial on the stand-in for a GPU, with a real process; and what is chosen."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from fake_gpu import PACKAGES, fake_runtime
from fake_runtime import FakeRuntime
from workers.copy_trial import Pace, better, measure

from workers import copy_trial, cuda

SMALL = {"tile": 8192, "source": 1 << 16, "seconds": 0.03}


def kernels(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES))
    with fake_runtime() as runtime:
        yield runtime


def test_both_kinds_copy_and_give_everything_back(runtime: FakeRuntime) -> None:
    found = measure(0, kernels, **SMALL)
    assert list(found) == ["process", "thread"]
    for pace in found.values():
        assert pace.alone > 0
        assert pace.beside > 0
        assert pace.slowdown == pytest.approx(1, rel=1e-6)
    assert runtime.leftovers() == {}


@pytest.mark.parametrize("failing", ["export", "mapping", "locking", "silence"])
def test_a_trial_that_fails_says_so_in_one_line_and_leaves_nothing(runtime, failing, monkeypatch) -> None:
    reason = {
        "export": "cudaIpcGetMemHandle",
        "mapping": "cudaIpcOpenMemHandle",
        "locking": "cudaHostRegister",
        "silence": "does not answer",
    }[failing]
    if failing == "mapping":
        monkeypatch.setattr(copy_trial, "ipc_handle", lambda address: bytes(64))
    elif failing == "silence":
        monkeypatch.setattr(copy_trial, "LIMIT", 0.0)
    else:
        runtime.failures["cudaIpcGetMemHandle" if failing == "export" else "cudaHostRegister"] = 0
    with pytest.raises(cuda.CudaError, match=reason):
        measure(0, kernels, **SMALL)
    assert runtime.leftovers() == {}


def test_the_process_is_chosen_unless_it_copies_less_or_slows_kernels() -> None:
    thread = Pace(alone=50.0, beside=49.0, slowdown=1.0)
    for process, kind in (
        (Pace(50.0, 50.0, 1.0), "process"),
        (Pace(50.0, 48.0, 1.04), "process"),  # as good
        (Pace(50.0, 46.0, 1.0), "thread"),
        (Pace(40.0, 40.0, 1.0), "thread"),  # both kinds' best is what counts
        (Pace(50.0, 50.0, 1.2), "thread"),
    ):
        assert better(process, thread) == kind
    assert better(Pace(50.0, 25.0, 1.0), Pace(50.0, 30.0, 1.5)) == "process"  # the thread does worse
