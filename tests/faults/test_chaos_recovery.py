"""What a run with faults learns of the engine before and after them, from replies that are given."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launch.chaos.injector import Chaos, Fault
from launch.command_line.options import parse
from launch.errors import WrongUsage
from launch.stress import chaos, command
from launch.stress.chaos import ChaosRun
from launch.stress.table import chaos_parts
from protocol.messages import Welcome

UP = {"role": "worker", "index": 0, "incarnation": 0, "pid": 1, "up": True}


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Begins a run of an engine that answers these Stats one after the other, the last for ever."""
    monkeypatch.setattr(chaos, "supervisor_of", lambda runtime: os.getpid())

    async def begin(*replies: dict[str, Any], kinds: tuple[str, ...] = ("kill",)) -> ChaosRun:
        left = list(replies)

        async def stats() -> dict[str, Any]:
            return left.pop(0) if len(left) > 1 else left[0]

        return await ChaosRun.begin(stats, tmp_path, Chaos(kinds, 2.5, 9))

    return begin


async def test_recovered_engine_is_read_after_all_peers_are_up(begin: Any) -> None:
    before = {"peers": [UP], "recovery": {}}
    again = {
        "peers": [UP | {"incarnation": 1}],
        "recovery": {"worker": {"deaths": 1, "ready_s": 0.1, "whole_s": 0.2}},
    }
    down = {"peers": [UP | {"up": False}]}
    run = await begin(before, down, before, again, again | {"clients": {"malformed": 4}})
    assert (run.before, run.supervisor) == (before, os.getpid())
    assert [used.role for used in run.used_before] == ["supervisor"]
    run.injector.faults.append(Fault("kill", 1.0, True, "worker", 0, 0))
    await run.recover()
    assert run.missing == run.unrecovered == []
    assert run.recovered_after is not None
    assert 0.05 < run.recovered_after < 10  # two waits
    assert [used.role for used in run.used_after] == ["supervisor"]
    report = run.report([])
    assert (report["respawns"], report["malformed"]) == ({"worker": 1}, {"client": 4})
    assert (report["kinds"], report["rate"], report["seed"]) == (["kill"], 2.5, 9)
    assert report["whole_after_s"] == run.recovered_after
    assert report["kill_to_next_token_s"] == {"median": None, "max": None}
    shown = "\n".join(str(part) for part in chaos_parts(report))
    assert "from a kill to the next token" not in shown  # of none
    assert "hostile messages" not in shown


async def test_peer_that_stays_away_is_named(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "RECOVERY_LIMIT", 0.0)
    run = await begin({"peers": [UP]}, {"peers": []})
    await run.recover()
    assert run.unrecovered == ["worker 0 is not up 0 s after the load"]
    assert run.recovered_after is None
    assert run.after == {"peers": []}
    run.injector.failure = "the engine is gone"
    assert run.unrecovered[1:] == ["faults ended early: the engine is gone"]


@pytest.mark.parametrize(
    ("kinds", "named"),
    [(("kill", "corrupt", "delay"), "kill,delay"), (("stop",), "stop"), (("corrupt",), "")],
)
async def test_only_faults_of_processes_need_them(begin: Any, kinds: tuple[str, ...], named: str) -> None:
    if not named:
        await begin({"peers": []}, kinds=kinds)
        return
    with pytest.raises(WrongUsage, match=f"^--chaos {named}: this engine has neither workers nor a pref"):
        await begin({"peers": []}, kinds=kinds)
    await begin({"peers": [UP]}, kinds=kinds)


async def test_answers_are_compared_only_when_the_engine_has_recovered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer that is away would disturb the answers with which the others are compared."""
    order: list[str] = []

    def step(name: str) -> Any:
        async def happen(*_: object) -> None:
            order.append(name)

        return happen

    welcome = Welcome(1, "e", "m", "f", "cpu", "all-host", True, 4096, 256, True, True, format="f32")
    stats = {"scheduler": {}, "clients": {"connected": 1}}
    client = SimpleNamespace(welcome=welcome, stats=lambda: _value(stats))

    @asynccontextmanager
    async def connected(*_: object, **__: object) -> AsyncIterator[Any]:
        yield client

    faults = SimpleNamespace(injector=nullcontext(), recover=step("recovered"))
    monkeypatch.setattr(command, "endpoint", connected)
    monkeypatch.setattr(command, "Client", SimpleNamespace(connect=connected))
    monkeypatch.setattr(command, "runtime_of", lambda where: Path("/nowhere"))
    monkeypatch.setattr(command, "ChaosRun", SimpleNamespace(begin=lambda *_: _value(faults)))
    monkeypatch.setattr(command, "report", lambda run: {"passed": run.finished})
    monkeypatch.setattr(command, "report_parts", lambda found: [])
    monkeypatch.setattr(command, "print_parts", lambda *_: order.append("reported"))
    for name in ("run_load", "compare_all", "count_strays"):
        monkeypatch.setattr(command, name, step(name))
    options = parse(["stress", "--connect", "x", "--clients", "2", "--chaos", "kill"])
    assert await command.stress(options, cast(Any, None)) == 0
    assert order == ["run_load", "recovered", "compare_all", "count_strays", "reported"]


async def _value(value: Any) -> Any:
    return value
