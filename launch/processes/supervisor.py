"""The supervisor of one engine: starts its processes in order, restarts and stops them, removes their files.

    async with Supervisor(config) as engine:
        ...                                     # clients connect to engine.endpoint

Within the block the engine is ready. Children that exit unexpectedly are restarted (`monitor.py`); where that
fails, the block is cancelled and EngineFailed is raised from it. At the end of the block the children are
stopped in order; `kill` does so at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from contextlib import ExitStack
from dataclasses import asdict, astuple, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from launch.errors import EngineFailed, StartFailed, system_reason
from launch.planning import disk_line, make_plan, situation, start_line
from launch.processes.children import Child, ProcessGroup, TaskGuard, title, to_the_end
from launch.processes.cores import Cores, CpuSet
from launch.processes.listeners import address_of, listen
from launch.processes.monitor import Limits, ProcessMonitor, ProcessSlot
from launch.runtime import EngineInfo, RuntimeDir, sweep
from launch.terminal.format import count
from launch.terminal.log import child_level, notice
from launch.terminal.progress import ProgressDisplay
from pipeline.assets import model_dir
from pipeline.config import EngineConfig, Machine, MachineList, ResolvedConfig
from pipeline.errors import ModelError
from pipeline.gateway.access import split_address
from pipeline.policies.presets import canonical, make_policy
from pipeline.policies.view import PolicyRequest
from pipeline.text.tokenizer import has_tokenizer
from protocol.errors import ProtocolError
from protocol.messages import VERSION, MachineRecord, Needed, Progress, Ready, SetMachines, SetPolicy
from protocol.program import user_folder
from protocol.sockets import Identity
from shm.control import ControlSegment
from shm.disk_cache import store_path
from shm.errors import SegmentMissing, ShmError
from shm.locks import StoreLease
from shm.locks import sweep as sweep_stores
from shm.segment import engine_prefix
from shm.store import store_name
from workers.reader import read_rate

log = logging.getLogger("tandem")

LOAD_TRIES = 10  # the last engine that uses a store may remove it between the loader's exit and our lease
FILES_SECONDS = 5.0  # between checks that the engine's files exist


class Supervisor:
    """One engine. Raises from the start of its block: UsageError, WrongUsage, StartFailed, ProtocolError,
    ShmError; each is one line, and nothing of the engine stays behind."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        log_level: str = "INFO",
        limits: Limits | None = None,
        machines: MachineList | None = None,
    ) -> None:
        """`machines`: the others, with `config.lanes`."""
        self.config = config
        self._machines = machines
        self.name = config.name or f"e{os.getpid()}"
        self.model: Path = config.model or model_dir()
        self.endpoint = ""  # where clients connect, once the engine is ready
        self.http = ""  # where clients over HTTP do, where they can
        self._limits = limits or Limits()
        self._cores = Cores.here()
        self._config: ResolvedConfig  # of the children
        self._runtime: RuntimeDir
        self._monitor: ProcessMonitor  # once there is a group
        self._slab = False  # the policy keeps experts on the device, so a prefetcher is needed
        self._reserve = 0  # bytes of memory that the store must leave free
        self._listeners: tuple[socket.socket, ...] = ()  # of HTTP clients
        self._key = b""  # with which children prove their identity
        self._fingerprint = ""  # of the store, once it is loaded
        self._log_level = log_level
        self._files = ExitStack()  # closes and removes what the start opened
        self._group: ProcessGroup | None = None
        self._lease: StoreLease | None = None
        self._progress = ProgressDisplay("bytes")
        self._guard = TaskGuard()

    @property
    def pids(self) -> dict[Identity, int]:
        """Process ids of the running children."""
        return {} if self._group is None else self._group.pids

    async def __aenter__(self) -> Supervisor:
        self._guard.enter()
        try:
            await self._start()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            if isinstance(error, OSError):
                raise StartFailed(f"the engine could not be started: {system_reason(error)}") from error
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
        try:
            self._guard.raise_failure(error)
        except OSError as e:
            raise EngineFailed(f"the engine has been stopped: {system_reason(e)}") from e

    def kill(self) -> None:
        """Kill every child now. The end of the block still removes their files."""
        if self._group is not None:
            self._monitor.stop()
            self._group.kill()

    async def set_machines(self, machines: tuple[Machine, ...]) -> None:
        """Tell the coordinator, and each later one, which machines hold lanes now: one is new, is gone, or
        has another endpoint. What a machine that is gone was asked for is asked of others."""
        assert self._machines is not None
        self._machines = replace(self._machines, machines=machines)
        if self._group is not None:
            message = SetMachines(tuple(MachineRecord(*astuple(machine)) for machine in machines))
            await self._group.send(self._monitor.coordinator, message)

    # --- start -------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        began = time.monotonic()
        if self.config.http is not None:  # before anything is read: a port in use is noticed at once
            self._listeners = listen(self.config.http)
        self._progress.update("reading the model")
        for name in sweep():
            log.info(f"removed what the killed engine {name} had left behind")
        sweep_stores()
        now = await asyncio.to_thread(situation, self.config, self._cores.default_workers())
        if now.config.kind == "cuda":
            self._cores = self._cores.beside_coordinator(self.config.workers)
            if self.config.workers is None:
                fewer = replace(now.config, workers=self._cores.default_workers())
                now = replace(now, config=fewer)
        try:
            plan, lines = await asyncio.to_thread(make_plan, self.model, now)
        except ModelError as e:
            raise StartFailed(str(e), usage=True) from None
        self.config = config = plan.resolved(now.config)
        self._runtime = runtime = RuntimeDir.claim(self.name)
        self._files.callback(runtime.remove)
        self._files.callback(self._release_store)
        self._config, self._slab = config, now.policy.uses_device
        control = ControlSegment.create(self._control_name, len(self._worker_cores))
        self._files.callback(control.close)
        self._group = group = ProcessGroup(runtime.endpoint("control.sock"), self._guard)
        self._files.callback(group.close)
        self._monitor = ProcessMonitor(
            group, self._guard, control, runtime.remove_of_coordinator, self._limits
        )
        group.on_message, group.on_exit = self._on_message, self._on_exit
        self._key = group.key
        self._reserve = plan.beside_store(now.machine)
        notice(start_line(self.model, plan, now.machine, config.backbone_dtype))
        for line in plan.needs.aside:
            notice(line)
        log.info(f"model: {self.model}")
        for line in lines:
            log.info(line)
        if emulation := self.config.emulation:
            log.warning(f"emulation: {emulation}")
        # Spawned before the store is loaded: importing torch takes longer than attaching a store.
        self._add_slot("coordinator", self._cores.computing)
        await group.prepare(Identity("coordinator", 0, 0), self._cores.computing)
        if has_tokenizer(self.model):  # an unusable one is noticed before minutes of loading
            await self._monitor.start_slot(self._add_slot("text"))
        self._progress.update("starting the loader")
        await self._load(group)
        if plan.needs.partial:
            file = store_path(user_folder("CACHE"), plan.needs.fingerprint)
            notice(disk_line(plan.needs, await asyncio.to_thread(read_rate, file)))
        self._progress.update("starting the processes")
        await self._start_processes()
        self._progress.close()
        self.endpoint = runtime.endpoint("client.sock")
        if self._listeners:
            self.http = f"http://{address_of(self._listeners[0])}"
        # How other programs of this user find the engine.
        runtime.publish(EngineInfo(self.name, os.getpid(), str(self.model), self.endpoint, VERSION))
        self._guard.keep(self._watch_files())
        where = "the CPU" if config.kind == "cpu" else "the GPU"
        if len(config.cards) > 1:
            where = " and ".join(map(str, config.cards))
        workers = count(config.workers, "worker") if config.workers else "without workers"
        took = f"{time.monotonic() - began:.1f} s"
        notice(f"engine {self.name} is ready after {took}: {config.policy} on {where}, {workers}")

    async def _load(self, group: ProcessGroup) -> None:
        """Run the loader until the store is in shared memory, and take a lease of it."""
        silence = self._limits.loader_silence
        for generation in range(LOAD_TRIES):
            identity = Identity("loader", 0, generation)
            self._loaded: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
            await group.start(identity, self._child_config("loader"), self._cores.computing)
            group.last_message = time.monotonic()
            while not self._loaded.done():
                await asyncio.wait((self._loaded,), timeout=min(1.0, silence))
                if time.monotonic() - group.last_message > silence:
                    raise StartFailed(f"the loader was silent for {silence:.0f} s and was stopped")
            fingerprint = self._loaded.result().fingerprint
            try:
                self._lease = StoreLease.acquire(fingerprint)
            except SegmentMissing:
                continue
            self._fingerprint = fingerprint
            return
        raise StartFailed("other engines removed the store each time it had been loaded; start again")

    async def _start_processes(self) -> None:
        for index, cpus in enumerate(self._worker_cores):
            self._add_slot("worker", len(cpus.cores), index, cpus)
        if self._slab:
            self._add_prefetchers()
        if self._config.host_memory is not None:
            self._add_slot("reader")
        if self.config.http is not None:
            self._add_slot("gateway")
        await self._monitor.start()

    def _add_slot(
        self, role: str, threads: int = 1, index: int = 0, cpus: CpuSet | None = None
    ) -> ProcessSlot:
        fds = tuple(listener.fileno() for listener in self._listeners) if role == "gateway" else ()
        return self._monitor.add_slot(
            role, index, lambda: self._child_config(role, cpus, index), threads, fds
        )

    def _add_prefetchers(self) -> list[ProcessSlot]:
        """One for each device."""
        return [self._add_slot("prefetcher", index=i) for i in range(max(1, len(self._config.cards)))]

    @property
    def _control_name(self) -> str:
        """The name of the control segment, in which workers and prefetcher count their progress."""
        return f"{engine_prefix(self._runtime.path)}control-0"

    @property
    def _worker_cores(self) -> tuple[CpuSet, ...]:
        return self._cores.for_workers(self._config.workers) if self._config.workers else ()

    def _child_config(self, role: str, cores: CpuSet | None = None, index: int = 0) -> dict[str, Any]:
        """Returns what all children are told when they start, and what this one is. `cores`: to which it is
        bound; `index`: among those of its role."""
        return {
            "engine": self.name,
            "runtime": str(self._runtime.path),
            "log_level": child_level(self._log_level),
            "model": str(self.model),
            "cache_dir": str(user_folder("CACHE")),
            "fingerprint": self._fingerprint,
            "store": store_name(self._fingerprint),
            "control": self._control_name,
            "cores": [] if cores is None else list(cores.cores),
        } | self._own_config(role, index)

    def _own_config(self, role: str, index: int) -> dict[str, Any]:
        config = self._config
        match role:
            case "loader":
                return {
                    "format": config.format,
                    "tile": config.tile,
                    "reserve_bytes": self._reserve,
                    "nodes": list(self._cores.nodes),
                    "host_memory": config.host_memory,
                    "part": None if config.lanes is None else config.lanes.part.plain(),
                }
            case "coordinator":
                cores = self._worker_cores
                return {
                    "config": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(config).items()},
                    "workers": [len(cpus.cores) for cpus in cores],
                    "nodes": len(self._cores.nodes) if all(cpus.node is not None for cpus in cores) else 1,
                    "slab": self._slab,
                    "key": self._key,
                    "suspects": list(self._monitor.suspects.items()),
                    "machines": None if self._machines is None else asdict(self._machines),
                }
            case "worker":
                return {"host_slowdown": config.host_slowdown}
            case "prefetcher":
                return {"link_gbps": config.link_of(index)}
            case "gateway":
                keys = config.http_keys
                return {
                    "host": split_address(config.http or "")[0],
                    "listeners": [listener.fileno() for listener in self._listeners],
                    "http_keys": None if keys is None else str(keys.absolute()),
                    "allowed_origins": list(config.allowed_origins),
                    "served_model_name": config.served_model_name,
                }
        return {}

    async def _watch_files(self) -> None:
        """Raises EngineFailed where the engine's directory is gone, as after a logout: no client can reach
        the engine any more."""
        while True:
            await asyncio.sleep(FILES_SECONDS)
            if not self._runtime.intact:
                raise EngineFailed(
                    f"another program has removed {self._runtime.path}, so no client can connect: the engine"
                    " has been stopped (systemd-logind does that at a logout; loginctl enable-linger prevents"
                    " it)"
                )

    # --- children's messages and exits -------------------------------------------------------------------

    def _on_message(self, child: Child, message: object) -> None:
        match message:
            case Ready():
                self._on_ready(child, message)
            case Progress():
                if not self.endpoint:
                    self._progress.update(message.stage, message.done, message.total)
            case Needed(role="prefetcher"):
                if not self._monitor.has("prefetcher"):
                    self._guard.keep(self._monitor.start_late(*self._add_prefetchers()))
            case SetPolicy():
                self._on_policy(message)
            case _:
                self._monitor.on_message(child, message)

    def _on_exit(self, child: Child, code: int) -> None:
        if child.identity.role != "loader":
            self._monitor.on_exit(child, code)
        elif not child.ready.is_set():  # the exit of an earlier loader may come during the next one's work
            usage = child.failed.done() and child.failed.result().usage
            self._loaded.set_exception(StartFailed(child.exit_reason(code), usage))
            self._loaded.exception()  # retrieved, also where no task waits for it any more

    def _on_ready(self, child: Child, ready: Ready) -> None:
        first = child.identity.generation == 0 or child.identity.role == "loader"
        topic = "store" if ready.role == "loader" else title(child.identity)
        for number, note in enumerate(ready.notes if first else ()):
            # A loader's notes but the first are warnings.
            level = logging.WARNING if ready.role == "loader" and number else logging.INFO
            log.log(level, f"{topic}: {note}")
        if ready.role == "loader":
            if not self._loaded.done():
                self._loaded.set_result(ready)
        else:
            self._monitor.on_message(child, ready)

    def _on_policy(self, message: SetPolicy) -> None:
        """A restarted coordinator begins with the policy that was set last."""
        request = canonical(PolicyRequest(message.policy, message.options), self._config.seed)
        self._config = replace(self._config, policy=request.name, policy_options=request.options)
        self._slab = make_policy(request, self._config.seed).uses_device
        self.config = self._config

    # --- stop --------------------------------------------------------------------------------------------

    async def _stop(self) -> None:
        try:
            self._progress.close()
            if self._group is not None:
                self._monitor.stop()
            for listener in self._listeners:  # the gateway's own copies serve until it has ended
                listener.close()
            if self._group is not None:
                await self._group.stop(orderly=bool(self.endpoint))
        finally:
            await to_the_end(self._end())

    async def _end(self) -> None:
        self.kill()
        await self._guard.end_tasks()
        if self._group is not None:
            await self._group.wait_killed()
        try:
            self._files.close()
        except (OSError, ShmError, ProtocolError) as e:
            reason = system_reason(e) if isinstance(e, OSError) else e
            log.warning(f"not all files of the engine could be removed: {reason}")

    def _release_store(self) -> None:
        if self._lease is not None:
            # Of a partial store the file is what is kept.
            self._lease.release(self.config.keep_store and self._config.host_memory is None)
        else:
            sweep_stores()  # a store that a stopped loader has half built
