"""The doctor: whole runs, and what it makes of given facts and answers."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines import engines_left, launch

from launch.command_line.options import parse
from launch.doctor import command, gpu, machine, measure
from launch.doctor.machine import Finding
from launch.processes.cores import Cores, Thread
from launch.processes.trials import TrialFailed
from launch.runtime import EngineInfo, RuntimeDir
from launch.terminal.interrupts import Interrupts
from pipeline.assets import model_dir
from protocol.messages import VERSION
from shm.errors import NotCompiled
from shm.segment import engine_prefix
from workers.kernels.native import VARIANTS

GB = 1_000_000_000
TOPICS = {"cpu", "kernels", "memory", "shared memory"}
TOPICS |= {"places", "gpu", "speed", "engine"}


def words(findings: list[Finding], level: str | None = None) -> str:
    return "\n".join(f"{f.found}; {f.means}; {f.do}" for f in findings if level in (None, f.level))


# --- the command --------------------------------------------------------------------------------------------


def test_doctor_examines_every_topic_and_starts_an_engine() -> None:
    done = launch("doctor", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report.keys() == {"ok", "findings", "measured"}
    assert report["ok"] is True
    assert {f["topic"] for f in report["findings"]} == TOPICS
    for finding in report["findings"]:
        assert finding.keys() == {"topic", "level", "found", "means", "do"}
        assert finding["level"] in ("ok", "note", "problem")
        assert finding["found"]
    measured = report["measured"]
    for name in ("read_all_cores_gbps", "ceiling_tok_s"):
        assert measured[name] > 0
    assert measured["cores"] == len(os.sched_getaffinity(0))
    assert measured["engine"]["tokens"] == 32
    assert "Traceback" not in done.stderr
    assert engines_left() == []


def test_runtime_directory_open_to_others_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "tandem").mkdir()
    (tmp_path / "tandem").chmod(0o755)
    done = launch("doctor", "--log-level", "error", env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr == ""
    assert "is open to other users" in " ".join(done.stdout.split())
    assert "chmod 700" in done.stdout
    assert "Engines do not run on this machine" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(("failed", "others"), [(False, []), (False, ["problem"]), (True, ["note"])])
async def test_verdict_follows_from_findings_and_from_the_engine(
    failed: bool, others: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def inspect(*_: object) -> Any:
        return [Finding("gpu", level, "x", "") for level in others], 2e9

    async def rates(cores: list[int]) -> list[float]:
        assert cores == Cores.here().numbers
        return [8e9]

    async def prove(options: object, interrupts: object, device: str) -> dict[str, Any]:
        if failed:
            raise TrialFailed("broken")
        return {"start_s": 1.0, "tokens": 32, "decode_tok_s": 50.0, "policy": "lru"}

    monkeypatch.setattr(gpu, "inspect", inspect)
    monkeypatch.setattr(measure, "rates", rates)
    monkeypatch.setattr(measure, "prove", prove)
    assert await command.doctor(parse(["doctor", "--json"]), Interrupts()) == failed
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is not failed
    measured = report["measured"]
    assert measured["ceiling_tok_s"] == pytest.approx(8e9 / READS.token, rel=1e-3)
    assert measured["host_to_device_gbps"] == 2.0
    assert ("failure" in measured["engine"]) is failed
    levels = [f["level"] for f in report["findings"]]
    assert levels.count("problem") == failed + others.count("problem")


def test_report_fits_80_columns_and_is_plain() -> None:
    finding = Finding(
        "cpu", "problem", "found [bold]x[/bold] " * 8, "means " * 30, "one command\nanother " * 9
    )
    text = command.render([finding, Finding("memory", "ok", "much", "")], "Engines run here.")
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "\x1b" not in text
    assert "[bold]x[/bold]" in text
    assert text.count("> ") == len(finding.do.splitlines())
    assert text.endswith("\n\nEngines run here.\n")


# --- the machine --------------------------------------------------------------------------------------------


def test_limits_on_cores_are_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 16 if logical else 8)
    eight = tuple(Thread(n // 4, n, n) for n in range(8))
    notes = words(list(machine.processor(Cores(eight, quota=2.5))), "note")
    assert "8 of 16 threads" in notes
    assert "workers compute on 2 cores" in notes


@pytest.mark.parametrize(
    ("size", "free", "level", "prevents"),
    [
        (64 << 20, 64 << 20, "note", False),
        (64 << 20, 20_000_000, "problem", True),
        (4 * GB, 4 * GB, "note", False),
        (10 * GB, 10 * GB, "ok", False),
        (16 * GB, 24_999_999, "problem", True),
        (16 * GB, 25_000_000, "ok", False),
    ],
)
def test_small_shared_memory_is_a_problem(size: int, free: int, level: str, prevents: bool) -> None:
    finding = machine.capacity(size, free, 25_000_000, 30 * GB)
    assert (finding.level, finding.prevents) == (level, prevents)
    assert ("--shm-size" in finding.do) is (level != "ok")


def test_too_little_memory_and_a_limit_on_locked_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 3 * GB)
    assert "up to 1.00 GB fit" in words(list(machine.memory(1000)))
    assert any(f.prevents for f in machine.memory(1 * GB + 1))
    monkeypatch.setattr(machine, "contents", lambda path: "CapEff:\t00000000a80425fb\n")
    for lockable, level in ((8 << 20, "note"), (-1, "ok"), (4 * GB, "ok")):
        assert machine._locking(lockable, 3 * GB).level == level
    monkeypatch.setattr(machine, "contents", lambda path: "CapEff:\t000001ffffffffff\n")
    assert machine._locking(8 << 20, 3 * GB).level == "ok"


def test_missing_kernels_are_reported_with_the_command_that_compiles_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> None:
        raise NotCompiled("_quantize")

    reason = "not compiled at installation"
    monkeypatch.setattr(machine, "load", lambda name: reason)
    monkeypatch.setattr(machine, "quantizer", missing)
    first, second = machine.kernels()
    assert first.level == second.level == "problem"
    assert all(f"{name} ({reason})" in first.found for name in VARIANTS.values())
    assert "_quantize" in second.found
    for finding in (first, second):
        assert "-m pip install -e " in finding.do


def test_running_engines_and_leftovers_of_killed_ones_are_named() -> None:
    runtime = RuntimeDir.claim("doctor-places")
    left = Path("/dev/shm" + engine_prefix(runtime.path.with_name("doctor-left")) + "slab-0")
    try:
        left.touch()
        runtime.publish(EngineInfo(runtime.name, 123, "/m", runtime.endpoint("client.sock"), VERSION))
        leftovers, engine = (f for f in machine.places() if f.level == "note")
        assert "doctor-left" in leftovers.found
        assert not left.exists()
        assert "doctor-places" in engine.found
        assert "--connect doctor-places" in engine.do
        assert "kill 123" in engine.do
    finally:
        runtime.remove()
        left.unlink(missing_ok=True)


# --- GPUs ---------------------------------------------------------------------------------------------------

READS = measure.reads_of(model_dir())
TORCH: dict[str, Any] = {
    **{"version": "2.12", "cuda": "12.8"},
    "devices": [{"name": "A GPU", "bytes": 24 * GB, "free": 20 * GB}],
}
LINK = [9e9, 25e9, 5e9]


@pytest.mark.parametrize(
    ("torch", "link", "levels", "said", "pace"),
    [
        (TORCH, LINK, ["ok", "ok"], "A GPU, 24.00 GB, 20.00 GB free", 9e9),
        (TrialFailed("no result within 1 s"), LINK, ["problem"], "no result within 1 s", None),
        (TORCH | {"devices": [], "cuda": None}, LINK, ["problem"], "without CUDA", None),
        (TORCH | {"devices": []}, LINK, ["problem"], "older than CUDA 12.8", None),
        (TORCH, {"failure": "out of memory"}, ["ok", "problem"], "out of memory", None),
    ],
)
async def test_gpu_is_examined_by_a_child(
    monkeypatch: pytest.MonkeyPatch, torch: Any, link: Any, levels: list[str], said: str, pace: float | None
) -> None:
    answers = iter((torch, link))

    class Child:
        async def result(self, limit: float) -> Any:
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

    @asynccontextmanager
    async def trial(module: str, config: dict[str, Any]) -> AsyncIterator[Any]:
        yield Child()

    monkeypatch.setattr(gpu, "trial", trial)
    monkeypatch.setattr(gpu, "DRIVER_NODES", (Path("/"),))
    monkeypatch.setattr(gpu, "find_spec", lambda name: name)
    findings, found = await gpu.inspect(READS)
    assert [f.level for f in findings] == levels
    assert said in words(findings)
    assert found == pace
    assert not any(f.prevents for f in findings)  # engines run on the CPU


async def test_torch_of_this_machine_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DRIVER_NODES", (Path("/"),))
    findings, pace = await gpu.inspect(READS)
    assert (pace is None) is (findings[-1].level == "problem")
