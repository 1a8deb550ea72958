"""The supervisor: starts an engine's processes in order, watches them, stops them, removes what they left.

    async with Supervisor(config) as engine:
        ...                                     # engine.endpoint takes clients

Within the block the engine is ready. Should a child end unexpectedly, the block is cancelled and EngineDied
raised from it. Leaving the block stops the children in order; `kill` does so at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from launch.briefing import Briefing
from launch.checks import without_effect
from launch.children import Child, end, spawn, title, wait_ended
from launch.control import Control
from launch.errors import EngineDied, StartFailed
from launch.guard import Guard
from launch.machine import cores, default_workers, usable_device
from launch.progress import LoadingBar
from launch.runtime import EngineInfo, RuntimeDir, cache_root, sweep
from pipeline.assets import model_dir
from pipeline.config import EngineConfig
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from protocol.messages import VERSION, Failed, Needed, Progress, Ready, Shutdown, WorkerDied
from protocol.sockets import Identity, runtime_root
from shm.errors import SegmentMissing
from shm.locks import StoreLease
from shm.locks import sweep as sweep_stores

log = logging.getLogger("tandem")

LOADER_SILENCE = 300.0  # seconds without a word; a cold disk may take long for the first bytes
LOAD_TRIES = 3  # another engine's end may remove the store between our loader's end and our lease
READY_LIMIT = 300.0  # seconds for coordinator, workers and prefetcher: backbone read, costs measured
KILL_LIMIT = 2.0  # seconds for the kernel to end a killed child
LAST_WORDS = 0.5  # seconds that a dead child's last message may still be under way

COORDINATOR = Identity("coordinator", 0, 0)
PREFETCHER = Identity("prefetcher", 0, 0)
STOP_ORDER = (("coordinator",), ("worker", "prefetcher"), ("loader",))


class Supervisor:
    """One engine. Raises from the start of its block: UsageError, WrongUsage, StartFailed, ProtocolError,
    ShmError; each is one line, and nothing of the engine is left."""

    def __init__(self, config: EngineConfig, *, log_level: str = "INFO") -> None:
        self.config = config
        self.name = config.name or f"e{os.getpid()}"
        self.model: Path = config.model or model_dir()
        self.endpoint = ""
        self._fingerprint = ""  # of the store, once there is one
        self._prefetcher: dict[str, Any] = {}  # what one is told when it is started
        self._log_level = log_level
        self._runtime: RuntimeDir | None = None
        self._control: Control | None = None
        self._lease: StoreLease | None = None
        self._children: dict[Identity, Child] = {}
        self._heard = 0.0  # when a child last said something
        self._bar = LoadingBar()
        self._guard = Guard()

    @property
    def pids(self) -> dict[Identity, int]:
        """Process ids of the children that live."""
        return {identity: child.process.pid for identity, child in self._children.items() if child.alive}

    async def __aenter__(self) -> Supervisor:
        self._guard.enter()
        try:
            await self._start()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._stop()
        except asyncio.CancelledError:
            if self._guard.failure is None:
                raise
        self._guard.raise_failure(error)

    def kill(self) -> None:
        """End every child now. What they leave is still removed when the block is left."""
        for child in self._children.values():
            child.stopping = True
            child.signal(signal.SIGKILL)

    # --- start -------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        began = time.monotonic()
        for name in sweep():
            log.info(f"removed what the killed engine {name} had left behind")
        sweep_stores(runtime_root())
        device = await asyncio.to_thread(usable_device, self.config.device)
        policy = self.config.policy or ("all-host" if device == "cpu" else "fiddler")
        workers = self.config.workers or default_workers()
        self.config = replace(self.config, device=device, policy=policy, workers=workers)
        request = PolicyRequest(policy, self.config.policy_options)
        preset = type(make_policy(request, self.config.seed))
        for line in without_effect(self.config, preset, self.model):
            log.warning(f"note: {line}")

        self._runtime = RuntimeDir.claim(self.name)
        self._control = Control(self._runtime.endpoint("control.sock"))
        self._guard.keep(self._listen(self._control))
        briefing = Briefing(
            self.config, self.model, self._runtime, preset.uses_device, self._log_level, cache_root()
        )
        log.info(f"model: {self.model}")
        if emulation := self.config.emulation:
            log.warning(f"emulation: {emulation}")
        await self._begin_work(briefing, await self._load(briefing))
        self.endpoint = self._runtime.endpoint("client.sock")
        self._runtime.publish(
            EngineInfo(self.name, os.getpid(), str(self.model), policy, self.endpoint, VERSION)
        )
        log.info(f"engine {self.name} is ready after {time.monotonic() - began:.1f} s: {policy} on {device}")

    async def _load(self, briefing: Briefing) -> str:
        """Have the store found or built, and take a share in it. Returns its fingerprint."""
        for incarnation in range(LOAD_TRIES):
            identity = Identity("loader", 0, incarnation)
            loader = await self._spawn(identity, briefing.for_loader(), len(cores()))
            self._heard = time.monotonic()
            while not loader.ready.done():
                await asyncio.wait((loader.ready,), timeout=1.0)
                if time.monotonic() - self._heard > LOADER_SILENCE:
                    raise StartFailed(f"the loader was silent for {LOADER_SILENCE:.0f} s and was stopped")
            self._bar.close()
            fingerprint = loader.ready.result().fingerprint
            try:
                self._lease = StoreLease.acquire(fingerprint, runtime_root())
            except SegmentMissing:
                continue
            self._fingerprint = fingerprint
            return fingerprint
        raise StartFailed("other engines removed the store each time it had been loaded; start again")

    async def _begin_work(self, briefing: Briefing, fingerprint: str) -> None:
        available, workers = cores(), self.config.workers or 1
        if workers > len(available):
            log.warning(
                f"warning: {workers} workers share {len(available)} cores; more than one a core is slower"
            )
        started = [await self._spawn(COORDINATOR, briefing.for_coordinator(fingerprint), len(available))]
        for i in range(workers):
            told = briefing.for_worker(fingerprint, available[i % len(available)])
            started.append(await self._spawn(Identity("worker", i, 0), told, 1))
        self._prefetcher = briefing.for_prefetcher(fingerprint)
        if briefing.slab and self.config.prefetcher == "process":
            started.append(await self._spawn(PREFETCHER, self._prefetcher, 1))
        log.info(f"processes: {', '.join(title(child.identity) for child in started)}")
        await asyncio.wait(
            [child.ready for child in started], timeout=READY_LIMIT, return_when=asyncio.FIRST_EXCEPTION
        )
        for child in started:
            if child.ready.done():
                child.ready.result()
        late = ", ".join(title(child.identity) for child in started if not child.ready.done())
        if late:
            raise StartFailed(f"not ready after {READY_LIMIT:g} s: {late}")

    async def _begin_late(self, identity: Identity, told: dict[str, Any]) -> None:
        """Start a child that was not needed at first; the engine waits for it, and ends without it."""
        child = await self._spawn(identity, told, 1)
        async with asyncio.timeout(READY_LIMIT):
            await child.ready

    async def _spawn(self, identity: Identity, config: dict[str, Any], threads: int) -> Child:
        child = await spawn(identity, config, threads)
        self._children[identity] = child
        self._guard.keep(self._watch(child))
        return child

    # --- watch -------------------------------------------------------------------------------------------

    async def _listen(self, control: Control) -> None:
        while True:
            sender, message = await control.receive()
            child = self._children.get(sender)
            if child is None:
                continue  # a former life's late words
            self._heard = time.monotonic()
            match message:
                case Ready():
                    self._on_ready(child, message)
                case Failed():
                    if not child.failed.done():
                        child.failed.set_result(message)
                case Progress():
                    self._bar.update(message)
                case Needed(role=PREFETCHER.role) if PREFETCHER not in self._children:
                    self._guard.keep(self._begin_late(PREFETCHER, self._prefetcher))

    def _on_ready(self, child: Child, ready: Ready) -> None:
        self._bar.close()
        topic = "store" if ready.role == "loader" else title(child.identity)
        for note in ready.notes:
            log.info(f"{topic}: {note}")
        if child.ready.done():
            return
        if ready.version != VERSION or self._fingerprint not in ("", ready.fingerprint):
            which = "version of Tandem" if ready.version != VERSION else "store"
            child.ready.set_exception(StartFailed(f"the {title(child.identity)} has another {which}"))
            child.ready.exception()  # seen, also where nobody waits for it any more
        else:
            child.ready.set_result(ready)

    async def _watch(self, child: Child) -> None:
        """What a child's end means: nothing, a failed start, or the engine's end."""
        code = await child.ended()
        # An end may be seen before what was said just ahead of it: a loader's Ready, a failure's reason.
        if code >= 0 and not child.ready.done():
            words = (child.ready, child.failed)
            await asyncio.wait(words, timeout=LAST_WORDS, return_when=asyncio.FIRST_COMPLETED)
        if code > 0:
            await asyncio.wait((child.failed,), timeout=LAST_WORDS)
        if not child.ready.done():
            usage = child.failed.done() and child.failed.result().usage
            child.ready.set_exception(StartFailed(child.epitaph(code), usage))
            child.ready.exception()  # seen, also where nobody waits for it any more
        elif not child.stopping and child.identity.role != "loader":
            self._guard.fail(EngineDied(f"{child.epitaph(code)}; the engine has been stopped"))
            if self._control and child.identity != COORDINATOR:
                i = child.identity
                await self._control.send(COORDINATOR, WorkerDied(i.role, i.index, i.incarnation))

    # --- stop --------------------------------------------------------------------------------------------

    async def _stop(self) -> None:
        """The coordinator first: it ends what its clients wait for, and needs the others for that."""
        try:
            self._bar.close()
            for roles in STOP_ORDER:
                await self._stop_group([c for c in self._children.values() if c.identity.role in roles])
        finally:
            self.kill()
            await self._clean_up()

    async def _stop_group(self, group: list[Child]) -> None:
        for child in group:
            child.stopping = True
            # Before the engine is up there is nothing to finish, and most children do not listen yet; the
            # loader does, and removes what it has half built.
            listens = self.endpoint or child.identity.role == "loader"
            if not (listens and self._control and await self._control.send(child.identity, Shutdown())):
                child.signal(signal.SIGTERM)
        await end(group)

    async def _clean_up(self) -> None:
        await wait_ended(list(self._children.values()), KILL_LIMIT)
        await self._guard.end_tasks()
        if self._control is not None:
            self._control.close()
        if self._lease is not None:
            self._lease.release(self.config.keep_store)
        elif self._runtime is not None:
            sweep_stores(runtime_root())  # what a stopped loader left half built
        if self._runtime is not None:
            self._runtime.remove()
