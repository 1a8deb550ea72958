"""Fault injection during a stress run: the injector, the engine's recovery afterwards, and their report."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from launch.chaos.injector import KINDS, SIGNALS, Chaos, Fault, Injector, StatsOf
from launch.chaos.processes import Usage, supervisor_of, usage
from launch.errors import WrongUsage
from launch.stress.load import Outcome


def missing_peers(
    peers: list[dict[str, Any]], before: list[dict[str, Any]], faults: list[Fault]
) -> list[str]:
    """A line for each worker and prefetcher of `before` that is not up, or only as the killed incarnation."""
    killed = {(f.role, f.index, f.incarnation) for f in faults if f.kind == "kill"}
    up = {
        (p["role"], p["index"])
        for p in peers
        if p["up"] and (p["role"], p["index"], p["incarnation"]) not in killed
    }
    known = dict.fromkeys((p["role"], p["index"]) for p in [*before, *peers])
    return [f"{role} {index} is not up" for role, index in known if (role, index) not in up]


async def wait_recovered(
    stats: StatsOf, before: list[dict[str, Any]], faults: list[Fault], limit: float
) -> list[str]:
    """Wait until no peer is missing, `limit` seconds at most. Returns the missing ones."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit
    while missing := missing_peers((await stats())["peers"], before, faults):
        if loop.time() > deadline:
            break
        await asyncio.sleep(0.05)
    return missing


DOWN_SECONDS = 3.0  # a stopped worker is killed after so long; a killed one works again after about two
RECOVERY_LIMIT = 60.0  # seconds from the load's end until all peers are up


@dataclass
class ChaosRun:
    """The injector of one stress run, and the engine's state before and after it."""

    injector: Injector
    stats: StatsOf
    supervisor: int
    before: dict[str, Any] = field(default_factory=dict)  # the engine's counters
    after: dict[str, Any] = field(default_factory=dict)
    used_before: list[Usage] = field(default_factory=list)
    used_after: list[Usage] = field(default_factory=list)
    recovered_after: float | None = None  # seconds from the load's end
    missing: list[str] = field(default_factory=list)

    @classmethod
    async def begin(cls, stats: StatsOf, runtime: Path, chaos: Chaos) -> ChaosRun:
        """Reads the engine's state. Raises WrongUsage without an engine or targets, ProtocolError."""
        supervisor = supervisor_of(runtime)
        injector = Injector(stats, runtime, chaos, supervisor=supervisor)
        run = cls(injector, stats, supervisor)
        run.before = await stats()
        if not run.before["peers"] and (needing := [kind for kind in chaos.kinds if kind in SIGNALS]):
            raise WrongUsage(
                f"--chaos {','.join(needing)}: this engine has neither workers nor a prefetcher; start one"
                " with --workers"
            )
        run.used_before = await asyncio.to_thread(usage, supervisor)
        return run

    async def recover(self) -> None:
        """Wait until all peers are up, and read the engine's state again. Raises ProtocolError."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.missing = await wait_recovered(
            self.stats, self.before["peers"], self.injector.faults, RECOVERY_LIMIT
        )
        if self.missing:
            self.missing = [f"{line} {RECOVERY_LIMIT:g} s after the load" for line in self.missing]
        else:
            self.recovered_after = loop.time() - began
        self.after = await self.stats()
        self.used_after = await asyncio.to_thread(usage, self.supervisor)

    @property
    def unrecovered(self) -> list[str]:
        """A line for each peer that did not recover, and for an injector that ended early."""
        early = self.injector.failure
        return [*self.missing, *([f"faults ended early: {early}"] if early else [])]

    def report(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """Times are seconds, sizes bytes."""
        injector = self.injector
        faults = injector.faults
        hostile = injector.hostile
        kills = [fault for fault in faults if fault.kind == "kill"]
        workers = {peer["index"] for peer in self.before.get("peers", ()) if peer["role"] == "worker"}
        first, last, together = _next_tokens(kills, outcomes, _all_down(workers, faults))
        return {
            "kinds": list(injector.chaos.kinds),
            "rate": injector.chaos.rate,
            "seed": injector.chaos.seed,
            "faults": _by_role(faults),
            "total": len(faults),
            "during_decode": sum(fault.decoding for fault in faults),
            "kills_during_decode": sum(fault.decoding for fault in kills),
            "missed": injector.missed,
            "hostile_messages": {"sent": dict(hostile.sent), "answered": hostile.answered},
            "malformed": _malformed(self.after),
            "kill_to_next_token_s": _median(first),
            "kill_to_every_next_token_s": _median(last),
            "kills_measured": len(first),  # during an answer that went on
            "kills_with_all_workers_down": together,  # of these
            "respawns": {
                role: times["deaths"] - self.before["recovery"].get(role, {"deaths": 0})["deaths"]
                for role, times in self.after.get("recovery", {}).items()
            },
            "recovery": self.after.get("recovery"),
            "whole_after_s": self.recovered_after,
            "engine_before": _summed(self.used_before),
            "engine_after": _summed(self.used_after),
        }


def _malformed(stats: dict[str, Any]) -> dict[str, int]:
    """Messages that the coordinator's sockets refused, by the peers' role."""
    clients = {"client": stats["clients"]["malformed"]} if "clients" in stats else {}
    return {**stats.get("malformed", {}), **clients}


def _by_role(faults: Iterable[Fault]) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for fault in faults:
        counts[fault.kind][fault.role] += 1
    return {kind: dict(counts[kind]) for kind in KINDS if kind in counts}


def _all_down(workers: set[int], faults: Sequence[Fault]) -> Callable[[float, float], bool]:
    """Whether from DOWN_SECONDS before the first time to the second one each worker was killed or stopped."""

    def all_down(kill: float, token: float) -> bool:
        down = {
            fault.index
            for fault in faults
            if fault.role == "worker" and fault.kind in SIGNALS and kill - DOWN_SECONDS <= fault.at <= token
        }
        return bool(workers) and workers <= down

    return all_down


def _next_tokens(
    kills: Iterable[Fault], outcomes: Sequence[Outcome], all_down: Callable[[float, float], bool]
) -> tuple[list[float], list[float], int]:
    """Seconds from each kill to the next token of the first and of the last of the answers in progress: those
    with a token before the kill and one after it, which may have been computed before it. And the number of
    kills until whose first token all workers were down."""
    first, last, together = [], [], 0
    for kill in kills:
        waits = [
            next(at - kill.at for at in outcome.arrivals if at > kill.at)
            for outcome in outcomes
            if outcome.arrivals and outcome.arrivals[0] <= kill.at < outcome.arrivals[-1]
        ]
        if waits:
            first.append(min(waits))
            last.append(max(waits))
            together += all_down(kill.at, kill.at + min(waits))
    return first, last, together


def _median(seconds: list[float]) -> dict[str, float | None]:
    return {"median": median(seconds) if seconds else None, "max": max(seconds, default=None)}


def _summed(used: Iterable[Usage]) -> dict[str, dict[str, int]]:
    """By role: processes, their private memory, their descriptors."""
    roles: dict[str, dict[str, int]] = {}
    for one in used:
        role = roles.setdefault(one.role, {"processes": 0, "private_bytes": 0, "descriptors": 0})
        role["processes"] += 1
        role["private_bytes"] += one.private
        role["descriptors"] += one.descriptors
    return roles
