"""The doctor's findings on GPUs, on folders and on libraries, from prepared machines and answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from machines import GB, words, write

from launch.doctor import gpu, places
from launch.doctor.bandwidth import Reads
from launch.errors import WrongUsage
from launch.planning import device_choice
from launch.planning.device_choice import usable_device
from launch.processes.trials import TrialFailed
from launch.runtime import EngineInfo, RuntimeDir
from protocol.messages import VERSION
from shm.segment import engine_prefix

READS = Reads("a-model", 9 * GB, 2 * GB, 4)
DEVICE = {"name": "A GPU", "bytes": 24 * GB, "free": 20 * GB}
TORCH: dict[str, Any] = {"version": "2.12", "cuda": "12.8", "devices": [DEVICE]}
VERSION_FILE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"


def machine(root: Path) -> None:
    """One GPU with a driver, and a controller of another kind of the same maker."""
    write(root, dev__nvidiactl="", proc__driver__nvidia__version=VERSION_FILE)
    cards = (("0", "0x10de", "0x030200"), ("1", "0x10de", "0x040300"), ("2", "0x8086", "0x030000"))
    for number, vendor, kind in cards:
        folder = f"sys/bus/pci/devices/0000:0{number}:00.0"
        write(root, **{f"{folder}/vendor": vendor, f"{folder}/class": kind})


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the child process answers, by what it is asked; `asked`: the order. An exception is raised."""
    found: dict[str, Any] = {
        "torch": TORCH,
        "graph": True,
        "export": [1, 2],
        "open": True,
        "link": [9e9, 25e9, 5e9],
    }
    asked = found["asked"] = []

    @asynccontextmanager
    async def made(module: str, config: dict[str, Any]) -> AsyncIterator[Any]:
        class Child:
            async def result(self, limit: float) -> Any:
                asked.append(config["what"])
                answer = found[config["what"]]
                if isinstance(answer, Exception):
                    raise answer
                assert config.get("handle", [1, 2]) == [1, 2]
                return answer

            async def go(self) -> None:
                asked.append("go")

        assert module == gpu.CHILD
        yield Child()

    monkeypatch.setattr(gpu, "trial", made)
    monkeypatch.setattr(gpu, "installed", lambda name: found.get("bindings", "12.8"))
    return found


async def test_gpu_that_works_is_measured(tmp_path: Path, answers: dict[str, Any]) -> None:
    machine(tmp_path)
    found, pace = await gpu.inspect(READS, tmp_path)
    assert pace == 9e9  # the median
    assert answers["asked"] == ["torch", "graph", "export", "open", "go", "link"]
    assert [f.level for f in found] == ["ok"] * 5
    text = words(found)
    for part in (
        "570.86.15",
        "/dev/nvidiactl",
        "A GPU, 24.00 GB, 20.00 GB free",
        "9 GB/s",
        "4.5 tok/s",
        "a-model",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("changed", "problem", "asked"),
    [
        ({"torch": TrialFailed("no result within 1 s")}, "no result within 1 s", 1),
        ({"torch": TORCH | {"devices": [], "cuda": None}}, "without CUDA", 1),
        ({"torch": TORCH | {"devices": []}}, "older than CUDA 12.8", 1),
        ({"bindings": None}, "", 1),
        ({"graph": False}, "other numbers", 6),
        ({"graph": TrialFailed("not supported")}, "not supported", 6),
        ({"link": TrialFailed("out of memory")}, "out of memory", 6),
    ],
)
async def test_gpu_that_does_not_work_is_a_problem(
    tmp_path: Path, answers: dict[str, Any], changed: dict[str, Any], problem: str, asked: int
) -> None:
    machine(tmp_path)
    answers |= changed
    found, pace = await gpu.inspect(READS, tmp_path)
    problems = [f for f in found if f.level == "problem"]
    assert len(problems) == bool(problem)
    assert problem in words(problems)
    assert not any(f.prevents for f in found)  # engines run on the CPU
    assert len(answers["asked"]) == asked
    assert (pace is None) is (asked < 3 or "link" in changed)
    assert found[0].level == "ok"


@pytest.mark.parametrize(
    ("changed", "reason", "asked"),
    [
        ({"open": False}, "something else", 6),
        ({"export": TrialFailed("not permitted")}, "not permitted", 4),
    ],
)
async def test_without_cuda_ipc_nothing_is_prefetched(
    tmp_path: Path, answers: dict[str, Any], changed: dict[str, Any], reason: str, asked: int
) -> None:
    machine(tmp_path)
    answers |= changed
    findings, _ = await gpu.inspect(READS, tmp_path)
    (note,) = [f for f in findings if reason in f.found]
    assert note.level == "note"
    assert "no tile is prefetched" in note.means
    assert not any(f.level == "problem" for f in findings)
    assert len(answers["asked"]) == asked


async def test_machine_without_a_driver_is_not_probed(tmp_path: Path, answers: dict[str, Any]) -> None:
    (found,), pace = await gpu.inspect(READS, tmp_path)
    assert (found.level, pace, answers["asked"]) == ("note", None, [])
    assert "no NVIDIA GPU" in found.found
    machine(tmp_path)
    (tmp_path / "dev/nvidiactl").unlink()
    (found,), _ = await gpu.inspect(READS, tmp_path)
    assert "1 NVIDIA GPU, and no driver" in found.found
    assert answers["asked"] == []
    (tmp_path / "dev/dxg").touch()  # WSL
    (tmp_path / "proc/driver/nvidia/version").unlink()
    answers["open"] = False
    several, _ = await gpu.inspect(READS, tmp_path)
    assert "of unknown version" in words(several)
    assert "WSL has no CUDA IPC" in words(several)


def test_device_is_the_gpu_where_one_is_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = tmp_path / "nvidiactl"
    monkeypatch.setattr(device_choice, "DRIVER_NODES", (tmp_path / "dxg", node))
    for probe, driver, asked, expected in (
        ("print('warning'); print(7)", True, "auto", ("cuda", 7)),
        ("print(7)", True, "cuda", ("cuda", 7)),
        ("print(7)", True, "cpu", ("cpu", None)),
        ("print(7)", False, "auto", ("cpu", None)),
        ("print(7)", False, "cuda", None),
        ("print('')", True, "auto", ("cpu", None)),
        ("print(7); raise SystemExit(1)", True, "auto", ("cpu", None)),
        ("print('')", True, "cuda", None),
        ("import time; time.sleep(60)", True, "auto", ("cpu", None)),
    ):
        monkeypatch.setattr(device_choice, "PROBE", probe)
        monkeypatch.setattr(device_choice, "PROBE_LIMIT", 0.2 if "sleep" in probe else 60)
        node.touch() if driver else node.unlink(missing_ok=True)
        caplog.clear()
        if expected is None:
            with pytest.raises(WrongUsage, match="--device cuda"):
                usable_device(asked)  # type: ignore[arg-type]
        else:
            assert usable_device(asked) == expected  # type: ignore[arg-type]
        warned = driver and asked == "auto" and expected == ("cpu", None)
        assert bool(caplog.messages) is warned


def test_running_engines_and_leftovers_of_killed_ones_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [f.level for f in places.inspect()[:2]] == ["ok", "ok"]
    runtime = RuntimeDir.claim("doctor-places")
    left = Path("/dev/shm" + engine_prefix(runtime.path.with_name("doctor-left")) + "slab-0")
    try:
        left.touch()
        runtime.publish(EngineInfo(runtime.name, 123, "/m", "lru", runtime.endpoint("client.sock"), VERSION))
        leftovers, engines = (f for f in places.inspect() if f.level == "note")
        assert "doctor-left" in leftovers.found
        assert not left.exists()
        assert all(part in engines.found for part in ("doctor-places", "lru", "process 123"))
        assert "--connect doctor-places" in engines.do
        assert "kill 123" in engines.do
    finally:
        runtime.remove()
        left.unlink(missing_ok=True)
    long = tmp_path / ("x" * 60)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    found = places.inspect()[0]
    assert (found.level, found.prevents) == ("problem", True)
