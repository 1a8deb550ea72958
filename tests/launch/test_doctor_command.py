"""What `doctor` makes of its parts' findings. An engine and a measurement take seconds: here their outcomes
are given."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from launch.command_line.options import parse
from launch.doctor import bandwidth, command, gpu, proof
from launch.doctor.bandwidth import BUSY, Bandwidth
from launch.doctor.finding import Finding
from launch.doctor.proof import Proof
from launch.processes.cores import Cores
from launch.processes.trials import TrialFailed
from launch.terminal.interrupts import Interrupts

SPEED = Bandwidth(2, 1 << 26, 4e9, 8e9, 3e9, None)
GOOD = Proof("auto", "", 1.0, 32, 0.1, 100.0, "all-host")
Run = Callable[..., Any]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command. `speed`: measured, None where it cannot be; `proofs`: by device; `driver`: of a
    GPU; `others`: further findings. Returns the exit code, the report and the devices that were tried."""

    async def doctor(
        *words: str,
        speed: Bandwidth | None = SPEED,
        load: float = 0.0,
        link: float | None = None,
        driver: bool = False,
        cache: int | None = None,
        others: tuple[Finding, ...] = (),
        **proofs: Proof,
    ) -> tuple[int, Any, list[str]]:
        devices = []

        async def inspected(*_: object) -> Any:
            return [*others], link

        async def measured(cores: list[int], *_: object) -> Bandwidth:
            assert cores == Cores.here().numbers
            if speed is None:
                raise TrialFailed("no memory")
            return speed

        async def proved(options: object, interrupts: object, device: str) -> Proof:
            devices.append(device)
            return proofs.get(device, GOOD)

        monkeypatch.setattr(gpu, "inspect", inspected)
        monkeypatch.setattr(gpu, "driver_nodes", lambda *_: ["/dev/nvidia0"] * driver)
        monkeypatch.setattr(bandwidth, "measure", measured)
        monkeypatch.setattr(proof, "prove", proved)
        monkeypatch.setattr(bandwidth, "last_cache", lambda: cache)
        monkeypatch.setattr(os, "getloadavg", lambda: (load, 1e6, 1e6))
        code = await command.doctor(parse(["doctor", *words]), Interrupts())
        out = capsys.readouterr().out
        return code, json.loads(out) if "--json" in words else out, devices

    return doctor


@pytest.mark.parametrize(("share", "busy"), [(0.99, False), (1.01, True)])
async def test_load_is_compared_with_the_cores_of_this_process(
    doctor: Run, monkeypatch: pytest.MonkeyPatch, share: float, busy: bool
) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "cpu_count", lambda: 8 * cores)  # the machine's, of which some are others'
    _, report, _ = await doctor("--json", load=share * BUSY * cores)
    notes = [f["found"] for f in report["findings"] if f["topic"] == "speed" and f["level"] == "note"]
    assert [note.startswith("load average ") for note in notes] == [True] * busy


async def test_report_has_what_was_measured(doctor: Run) -> None:
    token = bandwidth.embedded().token
    code, report, devices = await doctor("--json", link=2e9)
    assert (code, report["ok"], devices) == (0, True, ["auto"])
    measured = report["measured"]
    costs = measured.pop("costs")
    assert isinstance(costs, list)
    ceiling = measured.pop("ceiling_tok_s")
    assert ceiling == pytest.approx(8e9 / token, rel=1e-3)  # as it is shown
    assert measured == SPEED.to_map() | {
        "host_to_device_gbps": 2.0,
        "expert_bytes_per_token": token,
        "engine": GOOD.to_map(),
    }
    (engine,) = [f for f in report["findings"] if f["topic"] == "engine"]
    assert engine["means"] == f"{100 * 100 / ceiling:.0f}% of the bound given by memory bandwidth"
    topics = list(dict.fromkeys(f["topic"] for f in report["findings"]))
    assert topics[-3:] == ["speed", "engine", "costs"]


@pytest.mark.parametrize("fits", [True, False])
async def test_bound_of_memory_is_no_bound_for_experts_in_the_cache(doctor: Run, fits: bool) -> None:
    _, report, _ = await doctor("--json", cache=bandwidth.embedded().store - (not fits))
    (engine,) = [f for f in report["findings"] if f["topic"] == "engine"]
    assert ("of the bound" in engine["means"]) is not fits


@pytest.mark.parametrize(
    ("driver", "failed", "tried"),
    [
        (True, ["auto"], ["auto", "cpu"]),
        (True, ["auto", "cpu"], ["auto", "cpu"]),
        (False, ["auto"], ["auto"]),
        (True, [], ["auto"]),
    ],
)
async def test_engine_that_fails_on_a_gpu_is_tried_on_the_cpu(
    doctor: Run, driver: bool, failed: list[str], tried: list[str]
) -> None:
    proofs = {device: Proof(device, f"broken {device}") for device in failed}
    proofs |= {"cpu": Proof("cpu", "", 2.0, 32, 0.1, 50.0, "lru")} if "cpu" not in failed else {}
    code, report, devices = await doctor("--json", driver=driver, **proofs)
    assert devices == tried
    assert code == bool(failed)
    levels = [f["level"] for f in report["findings"] if f["topic"] == "engine"]
    assert levels == ["problem" if device in failed else "ok" for device in tried]
    expected = {"failure": "broken auto"} if failed else GOOD.to_map()
    assert report["measured"]["engine"] == expected


@pytest.mark.parametrize(
    ("others", "prevents", "verdict"),
    [
        ([], False, "Engines run on this machine"),
        (["ok", "note"], False, "Engines run on this machine"),
        (["problem", "problem"], False, "Engines run on this machine"),
        (["problem"], True, "Engines do not run on this machine as they should"),
    ],
)
async def test_verdict_counts_problems_and_notes(
    doctor: Run, others: list[str], prevents: bool, verdict: str
) -> None:
    """Only a finding that prevents engines from running makes the exit code 1."""
    found = tuple(Finding("gpu", level, "x", "", prevents=prevents) for level in others)  # type: ignore[arg-type]
    code, report, _ = await doctor("--json", others=found)
    assert code == prevents
    assert report["ok"] is not prevents
    levels = [f["level"] for f in report["findings"]]
    counts = [(levels.count(level), level) for level in ("problem", "note")]
    words = " and ".join(f"{n} {level}{'s' * (n > 1)}" for n, level in counts if n)
    _, text, _ = await doctor(others=found)
    assert " ".join(text.split()).endswith(f"{verdict}: {words}." if words else f"{verdict}.")
