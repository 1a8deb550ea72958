"""The supervisor: starts an engine's processes in order, keeps them at work, stops them, removes what they
left.

    async with Supervisor(config) as engine:
        ...                                     # engine.endpoint takes clients

Within the block the engine is ready. Children that end unexpectedly are replaced (`keeper.py`); should that
not be possible, the block is cancelled and EngineDied raised from it. Leaving the block stops the children
in order; `kill` does so at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from launch.cache.full_disk import cache_use, full_disk_line
from launch.command_line.checks import without_effect
from launch.errors import StartFailed
from launch.plan import make_plan, situation
from launch.processes.child_configs import ChildConfigs
from launch.processes.children import Child, title
from launch.processes.control import Control
from launch.processes.cores import Cores
from launch.processes.group import ProcessGroup
from launch.processes.monitor import ProcessMonitor, ProcessSlot
from launch.processes.runtime import EngineInfo, RuntimeDir, cache_root, segments, sweep
from launch.processes.task_guard import TaskGuard
from launch.terminal.progress import ProgressDisplay
from pipeline.assets import model_dir
from pipeline.config import EngineConfig
from pipeline.errors import ModelError
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from protocol.messages import VERSION, Needed, Progress, Ready, SetPolicy
from protocol.sockets import Identity, runtime_root
from shm.control import ControlSegment
from shm.errors import SegmentMissing
from shm.locks import StoreLease
from shm.locks import sweep as sweep_stores

log = logging.getLogger("tandem")

LOADER_SILENCE = 300.0  # seconds without a word; a cold disk may take long for the first bytes
LOAD_TRIES = 10  # another engine's end may remove the store between our loader's end and our lease


class Supervisor:
    """One engine. Raises from the start of its block: UsageError, WrongUsage, StartFailed, ProtocolError,
    ShmError; each is one line, and nothing of the engine is left."""

    def __init__(self, config: EngineConfig, *, log_level: str = "INFO") -> None:
        self.config = config
        self.name = config.name or f"e{os.getpid()}"
        self.model: Path = config.model or model_dir()
        self.endpoint = ""
        self._fingerprint = ""  # of the store, once there is one
        self._cores = Cores.here()
        self._briefing: ChildConfigs
        self._log_level = log_level
        self._runtime: RuntimeDir | None = None
        self._channel: Control | None = None
        self._crew: ProcessGroup | None = None
        self._progress: ControlSegment | None = None
        self._keeper: ProcessMonitor | None = None
        self._lease: StoreLease | None = None
        self._progress_display = ProgressDisplay("bytes", "store: ")
        self._guard = TaskGuard()

    @property
    def pids(self) -> dict[Identity, int]:
        """Process ids of the children that live."""
        return {} if self._crew is None else self._crew.pids

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
        if self._keeper is not None:
            self._keeper.stop()
        if self._crew is not None:
            self._crew.kill()

    # --- start -------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        began = time.monotonic()
        for name in sweep():
            log.info(f"removed what the killed engine {name} had left behind")
        sweep_stores(runtime_root())
        now = await asyncio.to_thread(situation, self.config, self._cores.default_workers())
        try:
            plan, lines = await asyncio.to_thread(make_plan, self.model, now)
        except ModelError as e:
            raise StartFailed(str(e), usage=True) from None
        self.config = config = plan.settled(now.config)
        for line in without_effect(replace(now.config, format=config.format), now.policy, self.model):
            log.warning(f"note: {line}")

        self._runtime = RuntimeDir.claim(self.name)
        use = await asyncio.to_thread(cache_use, self.model, config, plan.needs, cache_root())
        self._runtime.reserve_cache(use.fingerprints)
        if line := full_disk_line(cache_root(), use.missing):
            log.warning(f"warning: {line}")
        self._channel = Control(self._runtime.endpoint("control.sock"))
        self._crew = crew = ProcessGroup(self._channel, self._guard)
        crew.on_message, crew.on_end = self._heard, self._ended
        self._briefing = ChildConfigs(
            config,
            self.model,
            self._cores,
            self._runtime,
            now.policy.uses_device,
            plan.beside_store(now.machine),
            self._log_level,
            cache_root(),
            self._channel.key,
        )
        log.info(f"model: {self.model}")
        for line in lines:
            log.info(line)
        if emulation := self.config.emulation:
            log.warning(f"emulation: {emulation}")
        # Importing torch takes longer than finding a store that is there.
        await crew.prepare(Identity("coordinator", 0, 0), self._cores.computing)
        await self._load(crew)
        await self._begin_work(crew)
        self.endpoint = self._runtime.endpoint("client.sock")
        self._publish()
        took = time.monotonic() - began
        log.info(f"engine {self.name} is ready after {took:.1f} s: {config.policy} on {config.device}")

    async def _load(self, crew: ProcessGroup) -> None:
        """Have the store found or built, and take a share in it."""
        for incarnation in range(LOAD_TRIES):
            identity = Identity("loader", 0, incarnation)
            self._loaded: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
            await crew.spawn(identity, self._briefing.for_loader(), self._cores.computing)
            crew.heard = time.monotonic()
            while not self._loaded.done():
                await asyncio.wait((self._loaded,), timeout=1.0)
                if time.monotonic() - crew.heard > LOADER_SILENCE:
                    raise StartFailed(f"the loader was silent for {LOADER_SILENCE:.0f} s and was stopped")
            self._progress_display.close()
            fingerprint = self._loaded.result().fingerprint
            try:
                self._lease = StoreLease.acquire(fingerprint, runtime_root())
            except SegmentMissing:
                continue
            self._fingerprint = fingerprint
            return
        raise StartFailed("other engines removed the store each time it had been loaded; start again")

    async def _begin_work(self, crew: ProcessGroup) -> None:
        seats = self._briefing.seats
        own = len({core for seat in seats for core in seat.cores})
        if len(seats) > own:
            log.warning(f"warning: {len(seats)} workers share {own} cores; more than one a core is slower")
        self._progress = ControlSegment.create(self._briefing.control_name, len(seats))
        self._keeper = keeper = ProcessMonitor(crew, self._guard, self._progress, self._clear_slabs)
        threads = self._cores.computing
        keeper.post("coordinator", 0, lambda: self._briefing.for_coordinator(self._fingerprint), threads)
        # torch's sums depend on its number of threads, and any worker may redo another's work.
        threads = min((len(seat.cores) for seat in seats), default=1)
        for i, seat in enumerate(seats):
            told = partial(self._briefing.for_worker, self._fingerprint, seat)
            keeper.post("worker", i, told, threads)
        if self._briefing.slab and self.config.prefetcher == "process":
            self._post_prefetcher(keeper)
        workers = f"{len(seats)} workers" if seats else "which computes experts itself"
        log.info(f"processes: coordinator, {workers}" + ", prefetcher" * keeper.has("prefetcher"))
        await keeper.begin()

    def _post_prefetcher(self, keeper: ProcessMonitor) -> ProcessSlot:
        return keeper.post("prefetcher", 0, lambda: self._briefing.for_prefetcher(self._fingerprint), 1)

    def _publish(self) -> None:
        """Tell other programs of this user how the engine is to be reached."""
        assert self._runtime is not None
        policy = self.config.policy or ""
        self._runtime.publish(
            EngineInfo(self.name, os.getpid(), str(self.model), policy, self.endpoint, VERSION)
        )

    # --- while it runs -----------------------------------------------------------------------------------

    def _heard(self, child: Child, message: object) -> None:
        match message:
            case Ready():
                self._greet(child, message)
            case Progress():
                self._progress_display.update(message.stage, message.done, message.total)
            case Needed(role="prefetcher") if self._keeper is not None and not self._keeper.has("prefetcher"):
                self._guard.keep(self._keeper.begin_late(self._post_prefetcher(self._keeper)))
            case SetPolicy():
                self._remember_policy(message)
            case _:
                if self._keeper is not None:
                    self._keeper.heard(child, message)

    def _ended(self, child: Child, code: int) -> None:
        if child.identity.role != "loader":
            if self._keeper is not None:
                self._keeper.ended(child, code)
        elif not self._loaded.done():
            usage = child.failed.done() and child.failed.result().usage
            self._loaded.set_exception(StartFailed(child.epitaph(code), usage))
            self._loaded.exception()  # seen, also where nobody waits for it any more

    def _greet(self, child: Child, ready: Ready) -> None:
        self._progress_display.close()
        first = child.identity.incarnation == 0 or child.identity.role == "loader"
        topic = "store" if ready.role == "loader" else title(child.identity)
        for note in ready.notes if first else ():
            log.info(f"{topic}: {note}")
        if ready.version != VERSION or self._fingerprint not in ("", ready.fingerprint):
            which = "version of Tandem" if ready.version != VERSION else "store"
            self._guard.fail(StartFailed(f"the {title(child.identity)} has another {which}"))
        elif ready.role == "loader":
            if not self._loaded.done():
                self._loaded.set_result(ready)
        elif self._keeper is not None:
            self._keeper.heard(child, ready)

    def _remember_policy(self, message: SetPolicy) -> None:
        """A coordinator that has to begin anew begins with this one."""
        options = {name: str(value) for name, value in message.options.items()}
        config = replace(self._briefing.config, policy=message.policy, policy_options=options)
        policy = make_policy(PolicyRequest(message.policy, options), config.seed)
        self._briefing = replace(self._briefing, config=config, slab=policy.uses_device)
        self.config = config
        self._publish()

    def _clear_slabs(self) -> None:
        """Remove what a dead coordinator's device memory was, where that is a segment."""
        assert self._runtime is not None
        for path in segments(self._runtime.path):
            if "-slab-" in path.name:
                path.unlink(missing_ok=True)

    # --- stop --------------------------------------------------------------------------------------------

    async def _stop(self) -> None:
        try:
            self._progress_display.close()
            if self._keeper is not None:
                self._keeper.stop()
            if self._crew is not None:
                await self._crew.stop(orderly=bool(self.endpoint))
        finally:
            self.kill()
            await self._clean_up()

    async def _clean_up(self) -> None:
        await self._guard.end_tasks()
        if self._crew is not None:
            await self._crew.gone()
        if self._channel is not None:
            self._channel.close()
        if self._progress is not None:
            self._progress.close()
        if self._lease is not None:
            self._lease.release(self.config.keep_store)
        elif self._runtime is not None:
            sweep_stores(runtime_root())  # what a stopped loader left half built
        if self._runtime is not None:
            self._runtime.remove()
