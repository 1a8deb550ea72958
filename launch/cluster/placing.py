"""An engine's expert hosts on other machines: placed by a liaison, which is started again when it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from launch.cluster.share import Share
from launch.processes.trials import Trial, TrialFailed
from launch.terminal.log import notice
from pipeline.config import Machine

STOP_LIMIT = 30.0  # seconds for the hosts to end
REPEAT_SECONDS = 2.0  # between equal lists of the machines: one may be sent before it can be heard
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 10.0  # seconds before the liaison is started again

log = logging.getLogger("tandem")

Tell = Callable[[tuple[Machine, ...]], Awaitable[None]]


@asynccontextmanager
async def placed(share: Share, engine: str, tell: Tell) -> AsyncIterator[None]:
    """The hosts of an engine, during the block; `tell` is given the machines, at each change and now and
    then."""
    placing = _Placing(share, engine, tell)
    task = asyncio.create_task(placing.run())
    task.add_done_callback(_complain)
    try:
        yield
    finally:
        placing.stopping.set()
        await asyncio.wait((task,), timeout=STOP_LIMIT)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("expert hosts are no longer placed", exc_info=error)


class _Placing:
    """Keeps a liaison for an engine's hosts."""

    def __init__(self, share: Share, engine: str, tell: Tell) -> None:
        self.stopping = asyncio.Event()
        self._share, self._tell = share, tell
        self._hosts = share.hosts(engine)
        # By machine and host: two that stand in for a third have hosts of one name.
        self._machines: dict[tuple[str, str], Machine] = {}
        self._why = dict.fromkeys(self._hosts, "not heard of yet")  # a machine has no expert host
        # The same: up to which byte each of its log's files was logged.
        self._lines: dict[tuple[str, str], dict[str, int]] = {}
        self._states: dict[str, str] = {}  # what was last logged, by machine

    async def run(self) -> None:
        """Keep a liaison until the end, and let it end the hosts."""
        pause = FIRST_PAUSE
        if not self._hosts:
            return
        while not self.stopping.is_set():
            began = asyncio.get_running_loop().time()
            known: dict[str, list[str]] = {}
            for machine in self._machines.values():
                known.setdefault(machine.name, []).append(machine.endpoint)
            placed = {"hosts": self._hosts, "spares": self._share.spares(), "endpoints": known}
            try:
                async with self._share.cluster.liaison("place", **placed) as process:
                    await self._follow(process)
            except TrialFailed as e:
                self._log("", f"the cluster is not reached, and hosts that answer are used: {e}")
            if asyncio.get_running_loop().time() - began > LONGEST_PAUSE:
                pause = FIRST_PAUSE
            await self._repeat(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)

    async def _follow(self, process: Trial) -> None:
        """Pass on what the liaison says, and let it end the hosts at the end. Raises TrialFailed where it
        ends by itself."""
        said = asyncio.ensure_future(process.result(None))
        stop = asyncio.ensure_future(self.stopping.wait())
        try:
            while not self.stopping.is_set():
                await asyncio.wait((said, stop), timeout=REPEAT_SECONDS, return_when="FIRST_COMPLETED")
                if said.done():
                    self._on_said(said.result())
                    said = asyncio.ensure_future(process.result(None))
                await self._tell(self._known())
            await process.go()
            with suppress(TimeoutError, TrialFailed):  # TrialFailed: it has ended
                async with asyncio.timeout(STOP_LIMIT):
                    while await said:
                        said = asyncio.ensure_future(process.result(None))
        finally:
            for waiting in (said, stop):
                waiting.cancel()
            await asyncio.gather(said, stop, return_exceptions=True)

    async def _repeat(self, seconds: float) -> None:
        """Wait, and tell the machines meanwhile."""
        await self._tell(self._known())
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()

    def _known(self) -> tuple[Machine, ...]:
        """Returns the machines with their hosts, and those that have none."""
        there = {machine.name for machine in self._machines.values()}
        absent = [name for name in self._hosts if name not in there]
        return (
            *self._machines.values(),
            *(Machine(name, "", "", self._order(name, []), self._why[name]) for name in absent),
        )

    def _on_said(self, said: dict[str, Any]) -> None:
        if "failure" in said:
            raise TrialFailed(said["failure"])
        self._log("", "")
        for machine, hosts in said["hosts"].items():
            for name, host in hosts.items():
                self._pass_on(machine, name, host["lines"])
                if host["state"] in ("loading", "ready"):
                    self._machines[machine, name] = Machine(
                        machine, host["endpoint"], host["key"], self._order(machine, host["lanes"])
                    )
                else:
                    self._machines.pop((machine, name), None)
                words = host["state"] + (f": {host['error']}" if host.get("error") else "")
                self._why[machine] = words
                if host["state"] != "loading" or "failed" not in self._states.get(machine, ""):
                    self._log(machine, f"machine {machine}: its expert host is {words}")
        for machine, why in said["down"].items():
            self._why[machine] = f"out of Ray's reach ({why})"
            self._log(
                f"ray {machine}",
                f"machine {machine} is out of Ray's reach ({why}); its host is used if it answers",
            )
        for key in [k for k in self._states if k.startswith("ray ") and k[4:] not in said["down"]]:
            self._log(key, "")

    def _pass_on(self, machine: str, name: str, latest: list[tuple[str, int, str]]) -> None:
        """Log the new lines of a host's log; those that an actor before a restart has sent are not new."""
        before = self._lines.get((machine, name), {})
        for file, end, text in latest:
            if end > before.get(file, 0):
                notice(f"[{machine}] {text}")
        if latest:
            self._lines[machine, name] = {file: end for file, end, _ in latest}

    def _order(self, machine: str, lanes: list[int]) -> tuple[int, ...]:
        """Returns the lanes of a machine's host in the order of the plan; a host for a lost machine has its
        own."""
        parts = dict(zip(self._share.names, self._share.division.parts, strict=True))
        return parts.get(machine, tuple(lanes))

    def _log(self, key: str, text: str) -> None:
        if text and self._states.get(key) != text:
            notice(text)
        self._states[key] = text
