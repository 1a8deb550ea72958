"""The options of --chaos, the recovery check, and the report of a run with faults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from expected_errors import expect_error

from launch.command_line.options import parse
from launch.errors import WrongUsage
from launch.stress.chaos import Chaos, Fault, Injector, wait_recovered
from launch.stress.load import End, Outcome, Request
from launch.stress.report import chaos_parts
from protocol.messages import Sampling


def test_chaos_options() -> None:
    def asked(*words: str) -> Chaos | None:
        return Chaos.asked(parse(["stress", *words]).written, 5)

    assert asked() is None
    assert asked("--chaos", "kill, stop,kill") == Chaos(("kill", "stop"), 1.0, 5)
    assert asked("--chaos", "corrupt", "--chaos-rate", "0.3") == Chaos(("corrupt",), 0.3, 5)
    known = r"\(kill, stop, corrupt\)$"
    for wrong, line in (("kil", f"^--chaos: unknown kind 'kil'; did you mean kill. {known}"), ("", known)):
        expect_error(WrongUsage, asked, "--chaos", wrong, match=line)
    with pytest.raises(WrongUsage, match=r"^--chaos-rate belongs to --chaos \(stress"):
        asked("--chaos-rate", "2")
    assert parse(["stress", "--chaos", "kill", "--seed", "3", "--connect"]).config().seed == 3
    with pytest.raises(WrongUsage, match=r"^--seed does not change a running engine"):
        parse(["stress", "--seed", "3", "--connect"])


def peer(role: str, index: int, generation: int, up: bool = True) -> dict[str, Any]:
    pid = 100 * len(role) + 10 * index + generation
    return {"role": role, "index": index, "generation": generation, "pid": pid, "up": up}


async def test_pool_is_recovered_when_every_peer_is_up_again() -> None:
    before = [peer("worker", 0, 0), peer("worker", 1, 0), peer("prefetcher", 0, 0)]
    kills = [Fault("kill", 0.0, True, "worker", 610), Fault("stop", 0.0, True, "worker", 600)]
    healed = [peer("worker", 0, 0), peer("worker", 1, 1), peer("prefetcher", 0, 0)]

    async def missing(peers: list[dict[str, Any]], kills: list[Fault]) -> list[str]:
        async def stats() -> dict[str, Any]:
            return {"peers": peers}

        lines = await wait_recovered(stats, before, kills, 0.0)
        return [line.removesuffix(" is not up 0 s after the load") for line in lines]

    assert await missing(before, []) == []
    assert await missing(before, kills) == ["worker 1"]
    half = [peer("worker", 0, 0), peer("worker", 1, 1, up=False)]
    assert await missing(half, kills) == ["worker 1", "prefetcher 0"]
    assert await missing(healed, kills) == []
    assert await missing([*healed, peer("worker", 2, 0, up=False)], kills) == ["worker 2"]

    states = [before, before, healed]

    async def stats() -> dict[str, Any]:
        return {"peers": states.pop(0)}

    assert await wait_recovered(stats, before, kills, 10.0) == []
    assert states == []


def test_report_of_a_run_with_faults(tmp_path: Path) -> None:
    def answered(*arrivals: float) -> Outcome:
        request = Request("r", "a", None, 9, Sampling())
        return Outcome(request, arrivals[0] - 0.5, [], list(arrivals), End.LENGTH, arrivals[-1])

    async def stats() -> dict[str, Any]:
        return {}

    made = Injector(stats, tmp_path, Chaos(("kill", "corrupt"), seed=9), supervisor=os.getpid())
    made.faults = [
        Fault("kill", 1.0, True, "worker", 11),
        Fault("kill", 2.0, True, "prefetcher", 12),
        Fault("kill", 9.0, False, "worker", 13),
        Fault("corrupt", 3.0, True),
    ]
    made.before = {"recovery": {"worker": {"deaths": 1}}, "peers": [peer("worker", n, 0) for n in (0, 1)]}
    found = {"deaths": 3, "whole_s": 0.4}
    made.after = {"recovery": {"worker": found, "prefetcher": found}, "malformed": {"worker": 7}}
    outcomes = [answered(0.5, 1.25, 2.5), answered(0.75, 2.0, 2.125), answered(1.5, 1.75), answered(9.5)]
    report = made.report(outcomes)
    assert report["faults"] == {"kill": {"worker": 2, "prefetcher": 1}, "corrupt": {"client": 1}}
    assert (report["total"], report["during_decode"], report["kills_during_decode"]) == (4, 3, 2)
    # Two answers are in progress at the first kill, two at the second, none at the third.
    assert report["kill_to_every_next_token_s"] == {"median": 0.75, "max": 1.0}
    assert report["kills_measured"] == 2
    assert report["respawns"] == {"worker": 2, "prefetcher": 3}
    shown = "\n".join(str(part) for part in chaos_parts(report))
    assert "injected faults, seed 9: kill 3 (worker 2, prefetcher 1); corrupt 1 (client 1); 3 during" in shown
    assert (
        "from a kill (2 during answers) to the next token of every answer: median 750 ms, maximum 1000 ms"
        in shown
    )
    assert "worker restarted 2 times" in shown
    assert made.unrecovered == []
