"""An engine's child processes: spawned, configured through their lifelines, heard on the control socket,
ended in order. And the tasks beside a block of code that serve them."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import resource
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import zmq
import zmq.asyncio

from launch.errors import StartFailed, system_reason
from launch.terminal.log import pass_on
from pipeline.fairness import SparseLog
from pipeline.text.tokenizer import LOAD_FAILURES
from protocol.codec import decode, encode
from protocol.errors import MalformedMessage
from protocol.messages import HEADER_LIMIT, Failed, Ready, Shutdown
from protocol.program import visible
from protocol.sockets import CHILD_HWM, Identity, bind_router, parse_identity
from shm.segment import byte_size
from workers.lifetime import CHILD_PROCESS, environment, pack_config

# ----------------------------------------------------------------------------------------------------------
# What an engine's child processes print, as the supervisor reads it.


CHUNK = 65536  # bytes that are read at once, and of the longest line
LAST_LINES = 20  # that are kept
MOST_QUOTED = 100  # characters
# What Python, torch, NumPy, the C++ library, ZeroMQ and the loader of shared libraries say.
NO_MEMORY = re.compile(
    r"bad_alloc|MemoryError|(can(no|')t|unable to|failed to|could not) allocate"
    r"|allocation of \d+ bytes failed|out of memory|failed to map segment|Resource temporarily unavailable"
    r"|can't start new thread",
    re.IGNORECASE,
)
RECENT = 5.0  # seconds before an exit, of lines that may tell its reason


class ChildOutput:
    """The reading end of a child's stdout and stderr. Lines are passed on to the supervisor's stderr. A pipe,
    and not that stderr itself, lets a child that prints never wait for whoever reads it; the child's end of
    this pipe is non-blocking."""

    def __init__(self, reader: int) -> None:
        self._last: deque[tuple[float, str]] = deque(maxlen=LAST_LINES)  # with their times
        self._reader = reader
        self._begun = b""  # of a line
        os.set_blocking(reader, False)
        asyncio.get_running_loop().add_reader(reader, self._read)

    def _read(self) -> bool:
        """Returns whether there may be more."""
        data = b""
        with suppress(BlockingIOError):
            data = os.read(self._reader, CHUNK)
            if not data:
                asyncio.get_running_loop().remove_reader(self._reader)
        *lines, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) >= CHUNK:
            lines, self._begun = [*lines, self._begun], b""
        for line in lines:
            self._take(line)
        return data != b""

    def _take(self, line: bytes) -> None:
        text = visible(line.decode("utf-8", "replace"))
        self._last.append((time.monotonic(), text))
        pass_on(text)

    def close(self) -> None:
        """Read what an exited child has left, and close."""
        if self._reader < 0:
            return
        while self._read():
            pass
        if self._begun:
            self._take(self._begun)
        asyncio.get_running_loop().remove_reader(self._reader)
        os.close(self._reader)
        self._reader = -1

    def memory_reason(self) -> str:
        """Returns what tells that an exit was for want of memory, to follow its description; "" without a
        sign of it."""
        since = time.monotonic() - RECENT
        said = next((line for at, line in reversed(self._last) if at > since and NO_MEMORY.search(line)), "")
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        limited = ""
        if limit != resource.RLIM_INFINITY:
            limited = f"ulimit -v allows each process {byte_size(limit)}; raise it"
        if said:
            words = f": the system refused it memory or a thread (it said {said.strip()[:MOST_QUOTED]!r})"
            return words + (limited and f"; {limited}")
        return limited and f"; perhaps for want of memory: {limited}"


# --- processes ----------------------------------------------------------------------------------------------

PIPE_CAPACITY = 65536  # bytes that a new pipe takes without a reader; a larger configuration would block
STOP_LIMIT = 5.0  # seconds for an orderly exit
TERM_LIMIT = 1.0  # seconds between SIGTERM and SIGKILL
KILLS = (-signal.SIGKILL, -signal.SIGTERM)  # exit codes after a signal from outside
KILL_LIMIT = 2.0  # seconds for the kernel to end a killed child
LAST_MESSAGE_LIMIT = 0.5  # seconds that the last message of an exited child may still be under way
STOP_ORDER = (("gateway",), ("coordinator",), ("worker", "prefetcher", "reader", "text"), ("loader",))
MODULES = {
    "loader": "pipeline.loader",
    "coordinator": "pipeline.coordinator",
    "worker": "workers.expert_worker",
    "prefetcher": "workers.prefetcher",
    "reader": "workers.reader",
    "text": "pipeline.text.process",
    "gateway": "pipeline.gateway.process",
}


log = logging.getLogger(__name__)


def title(identity: Identity) -> str:
    """Returns a child's name in messages: "worker 1"; just "loader", of which most engines have only one."""
    if identity.role == "text":
        return "text process"
    return (
        f"{identity.role} {identity.index}" if identity.role == "worker" or identity.index else identity.role
    )


class Stillness:
    """Counts checks in a row that found the same figure: only time counts in which the supervisor itself was
    running."""

    def __init__(self) -> None:
        self.checks = 0
        self._figure = 0.0

    def check(self, figure: float) -> int:
        self.checks = self.checks + 1 if figure == self._figure else 0
        self._figure = figure
        return self.checks


@dataclass
class Child:
    """A running child. `ready` and `failed` are set by its messages on the control socket."""

    identity: Identity
    process: asyncio.subprocess.Process
    lifeline: int  # our end of a pipe; when it is closed, for whatever reason, the child exits
    key: bytes  # the engine's
    output: ChildOutput | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    failed: asyncio.Future[Failed] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    last_message: float = 0.0  # monotonic seconds; 0 before the first
    silence: Stillness = field(default_factory=Stillness)  # of its messages
    idleness: Stillness = field(default_factory=Stillness)  # of its progress in the control segment
    stopped_checks: int = 0  # in a row, that found the process stopped
    up: bool = False  # the coordinator gives it work
    hung: str | None = None  # where: it was killed because it made no progress there
    stopped: bool = False  # that was by a signal from outside
    exit_expected: bool = False

    def killed_from_outside(self, code: int) -> bool:
        """Returns whether its exit was no doing of its own."""
        return self.stopped or (self.hung is None and code in KILLS)

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    def configure(self, config: dict[str, Any]) -> None:
        """Send the configuration, with the child's identity. Raises StartFailed."""
        packed = pack_config(config | asdict(self.identity) | {"identity": self.identity.prove(self.key)})
        if len(packed) > PIPE_CAPACITY:
            self.kill()
            raise StartFailed(
                f"the {title(self.identity)}'s configuration has {len(packed)} bytes: too many options"
            )
        if self.lifeline >= 0:
            with suppress(BrokenPipeError):  # it has exited, which `wait_exit` reports
                os.write(self.lifeline, packed)

    def kill(self) -> None:
        self.exit_expected = True
        self.send_signal(signal.SIGKILL)

    def kill_hung(self, where: str = "", *, stopped: bool = False) -> None:
        """Kill it, as unexpectedly as a crash: it is restarted. `where`: the part of it that hangs;
        `stopped`: it does so because somebody has stopped it."""
        self.hung, self.stopped = where, stopped
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def wait_exit(self) -> int:
        """Returns the exit code, or minus the number of the signal that killed it."""
        code = await self.process.wait()
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1
        if self.output is not None:
            self.output.close()
        return code

    async def wait_last_message(self, limit: float) -> None:
        """Wait for a Ready or a Failed that may be under way after an exit that was not by a signal."""
        ready = asyncio.ensure_future(self.ready.wait())
        try:
            messages = (ready, self.failed) if self.process.returncode == 0 else (self.failed,)
            await asyncio.wait(messages, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()

    def start_failure(self, code: int) -> StartFailed | None:
        """Return why the engine cannot start, as this child has exited before it was ready; None where
        another may be started, because this one was killed."""
        killed = code in KILLS if self.identity.role == "text" else code < 0
        if killed and self.identity.role != "coordinator":
            return None
        usage = (self.failed.done() and self.failed.result().usage) or self._load_failure(code) != ""
        return StartFailed(self.exit_reason(code), usage)

    def _load_failure(self, code: int) -> str:
        loading = self.identity.role == "text" and not self.ready.is_set()
        return LOAD_FAILURES.get(code, "") if loading else ""

    def exit_reason(self, code: int) -> str:
        """Return why the child has exited, as one line."""
        if self.failed.done():
            return self.failed.result().text
        if self.stopped:
            return f"the {title(self.identity)} had been stopped from outside and was killed"
        if self.hung is not None:
            return f"the {title(self.identity)} made no progress{self.hung} and was killed"
        if reason := self._load_failure(code):
            return f"the model's tokenizer {reason}"
        if code in KILLS:
            return f"the {title(self.identity)} was killed by {signal.Signals(-code).name}"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        memory = "" if self.output is None or code == 0 else self.output.memory_reason()
        return f"the {title(self.identity)} {how}{memory}"


async def spawn(identity: Identity, threads: int, key: bytes, fds: tuple[int, ...] = ()) -> Child:
    """Start a child from the calling thread, which must run as long as the engine does: the kernel ties
    PDEATHSIG to it. The child imports its modules and waits for its configuration. `key`: the engine's;
    `threads`: of numerical libraries; `fds`: descriptors that it gets, by the same numbers. Raises OSError
    where the system refuses another process."""
    for_child, lifeline = os.pipe()
    printed, prints = os.pipe()
    os.set_blocking(prints, False)  # what the supervisor does not read in time is lost, and blocks no child
    try:
        process = await asyncio.create_subprocess_exec(
            *(*CHILD_PROCESS, MODULES[identity.role], "--lifeline", str(for_child)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=prints,  # the supervisor's stdout is for answers alone
            stderr=prints,
            start_new_session=True,  # the terminal's Ctrl-C is the supervisor's to handle
            pass_fds=(for_child, *fds),
            env=environment(threads),
        )
    except BaseException:
        os.close(lifeline)  # the child exits, if it was started already
        os.close(printed)
        raise
    finally:
        os.close(for_child)
        os.close(prints)
    return Child(identity, process, lifeline, key, ChildOutput(printed))


async def terminate(children: list[Child]) -> None:
    """Wait for children that were asked to exit; send SIGTERM to those that are late, then SIGKILL."""
    for limit, number in ((STOP_LIMIT, signal.SIGTERM), (TERM_LIMIT, signal.SIGKILL)):
        await wait_exits(children, limit)
        for child in children:
            child.send_signal(number)


async def wait_exits(children: list[Child], limit: float) -> None:
    """Wait until all have exited, at most `limit` seconds."""
    exits = [asyncio.ensure_future(child.wait_exit()) for child in children]
    if exits:
        _, pending = await asyncio.wait(exits, timeout=limit)
        for waiting in pending:
            waiting.cancel()


class TaskGuard:
    """A helper of an asynchronous context manager: `enter` at its start, `raise_failure` at its end."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._body: asyncio.Task[Any] | None = None
        self._cancels = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def enter(self) -> None:
        """The calling task runs the block from here on."""
        self._body = asyncio.current_task()
        self._cancels = self._body.cancelling() if self._body else 0

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task beside the block; its exception is the block's failure."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def fail(self, failure: BaseException) -> None:
        """Cancel the block; of several failures the first is raised."""
        if self.failure is None:
            self.failure = failure
            if self._body is not None:
                self._body.cancel()

    def raise_failure(self, error: BaseException | None) -> None:
        """Raise the failure, if there is one, unless the block was cancelled from outside as well: then that
        cancellation continues. `error`: the exception that ends the block."""
        if self.failure is None:
            return
        if self._body is not None and self._body.uncancel() > self._cancels:
            return
        raise self.failure from error

    async def end_tasks(self) -> None:
        """Cancel the tasks that still run beside the block."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await work that a cancellation must not interrupt: it is raised when the work is done."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled


class ProcessGroup:
    """The running children, and a bound ROUTER on which they report and receive Shutdown. `on_message` is
    called for each message but Failed, `on_exit` after the last one of an exited child."""

    def __init__(self, endpoint: str, guard: TaskGuard) -> None:
        """Raises ProtocolError where the endpoint cannot be bound."""
        self.key = secrets.token_bytes(32)  # with which children prove their identity
        self.last_message = 0.0  # monotonic seconds: when a child last sent one
        self.on_message: Callable[[Child, object], None] = lambda child, message: None
        self.on_exit: Callable[[Child, int], None] = lambda child, code: None
        self._guard = guard
        self._children: dict[Identity, Child] = {}
        self._stopped = False  # a child that is being started is killed at once
        self._log = SparseLog(log)
        self._context = zmq.asyncio.Context()
        self._socket = bind_router(self._context, endpoint, receive_hwm=CHILD_HWM, largest=HEADER_LIMIT)
        guard.keep(self._receive())

    @property
    def pids(self) -> dict[Identity, int]:
        """Process ids of the running children."""
        return {identity: child.process.pid for identity, child in self._children.items() if child.running}

    async def prepare(self, identity: Identity, threads: int, fds: tuple[int, ...] = ()) -> Child:
        """Spawn a child, which imports its modules and waits for `start`. Raises StartFailed."""
        try:
            child = await spawn(identity, threads, self.key, fds)
        except OSError as e:  # no free descriptor, for example
            raise StartFailed(f"the {title(identity)} could not be started: {system_reason(e)}") from e
        self._children[identity] = child
        self._guard.keep(self._watch(child))
        if self._stopped:
            child.kill()
        return child

    async def start(
        self, identity: Identity, config: dict[str, Any], threads: int, fds: tuple[int, ...] = ()
    ) -> Child:
        """Spawn a child, unless it was prepared, and send it its configuration. Raises StartFailed."""
        child = self._children.get(identity)
        if child is None or not child.running:
            child = await self.prepare(identity, threads, fds)
        child.configure(config)
        return child

    async def send(self, child: Identity, message: object) -> bool:
        """Send a message; False where this child never connected, has exited, or does not read."""
        try:
            await self._socket.send_multipart([child.prove(self.key), *encode(message)], flags=zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        return True

    def kill(self, *roles: str) -> None:
        """Kill the children of these roles, or without roles all; their exits are expected."""
        self._stopped = self._stopped or not roles
        for child in self._of(*roles):
            child.kill()

    async def wait_killed(self, *roles: str, limit: float | None = None) -> bool:
        """Wait until the killed children of these roles, or all, have exited, at most `limit` seconds, or
        KILL_LIMIT. False where one still runs."""
        children = self._of(*roles)
        await wait_exits(children, KILL_LIMIT if limit is None else limit)
        return not any(child.running for child in children)

    async def stop(self, orderly: bool) -> None:
        """End all in order: the gateway lets answers end, the coordinator needs the others for its requests.
        `orderly`: the engine was ready."""
        self._stopped = True
        for roles in STOP_ORDER:
            children = self._of(*roles)
            for child in children:
                child.exit_expected = True
                # Before the engine is up there is nothing to finish, and most children do not receive yet;
                # the loader does, and removes the store that it has half built.
                # The text process has nothing to finish, and may be busy.
                role = child.identity.role
                receives = (orderly and role != "text") or role == "loader"
                if not (receives and await self.send(child.identity, Shutdown())):
                    child.send_signal(signal.SIGTERM)
            await terminate(children)

    def close(self) -> None:
        """Close the socket without waiting for unsent messages: a child that has no Shutdown by now was sent
        a signal."""
        self._socket.close(linger=0)
        self._context.term()

    def _of(self, *roles: str) -> list[Child]:
        return [c for c in self._children.values() if not roles or c.identity.role in roles]

    async def _receive(self) -> None:
        while True:
            name, *frames = await self._socket.recv_multipart()
            await asyncio.sleep(0)  # a flood must not keep every other task from running
            try:
                child = self._children.get(parse_identity(name, self.key))
                message = decode(frames)
            except MalformedMessage as e:
                self._log.warning(f"dropped a malformed message on the control socket: {e}")
                continue
            if child is None:
                continue  # a late message of an earlier generation
            self.last_message = child.last_message = time.monotonic()
            if not isinstance(message, Failed):
                self.on_message(child, message)
                if isinstance(message, Ready):
                    child.ready.set()
            elif not child.failed.done():
                child.failed.set_result(message)

    async def _watch(self, child: Child) -> None:
        code = await child.wait_exit()
        # The exit may be seen before a message sent just ahead of it: a loader's Ready, a Failed.
        if code >= 0:
            await child.wait_last_message(LAST_MESSAGE_LIMIT)
        if self._children.get(child.identity) is child:
            del self._children[child.identity]
        self.on_exit(child, code)
