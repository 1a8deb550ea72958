"""One child process: spawned, configured through its lifeline, ended."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launch.errors import StartFailed
from pipeline.text.tokenizer import LOAD_FAILURES
from protocol.messages import Failed
from protocol.sockets import Identity
from workers.lifetime import CHILD_PROCESS, environment, pack_config

PIPE_CAPACITY = 65536  # bytes that a new pipe takes without a reader; a larger configuration would block
STOP_LIMIT = 5.0  # seconds for an orderly exit
TERM_LIMIT = 1.0  # seconds between SIGTERM and SIGKILL
MODULES = {
    "loader": "pipeline.loader",
    "coordinator": "pipeline.coordinator",
    "worker": "workers.expert_worker",
    "prefetcher": "workers.prefetcher",
    "text": "pipeline.text.process",
    "gateway": "pipeline.gateway.process",
}


def title(identity: Identity) -> str:
    """Returns a child's name in messages: "worker 1"; just "loader", of which an engine has only one."""
    if identity.role == "text":
        return "text process"
    return f"{identity.role} {identity.index}" if identity.role == "worker" else identity.role


@dataclass
class Child:
    """A running child. `ready` and `failed` are set by its messages on the control socket."""

    identity: Identity
    process: asyncio.subprocess.Process
    lifeline: int  # our end of a pipe; when it is closed, for whatever reason, the child exits
    key: bytes  # the engine's
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    failed: asyncio.Future[Failed] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    last_message: float = 0.0  # monotonic seconds; 0 before the first
    checked_message: float = 0.0  # `last_message` at the last check
    silent_checks: int = 0  # checks in a row that found no new message
    stopped_checks: int = 0  # checks in a row that found the process stopped
    up: bool = False  # the coordinator gives it work
    ticks: int = 0  # of its progress, at the last check
    idle_checks: int = 0  # checks in a row that found no progress
    hung: bool = False  # it was killed because it made no progress
    hung_in: str = ""  # which part of it
    exit_expected: bool = False
    configured: bool = False

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    @property
    def is_stopped(self) -> bool:
        """Returns whether SIGSTOP or the like has stopped it; a process under a debugger does not count."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False  # it has exited
        return stat.rpartition(")")[2].split()[0] == "T"

    def count_check(self) -> None:
        """Count whether the process is stopped, and whether it has sent anything since the last check."""
        self.stopped_checks = self.stopped_checks + 1 if self.is_stopped else 0
        self.silent_checks = self.silent_checks + 1 if self.last_message == self.checked_message else 0
        self.checked_message = self.last_message

    def count_progress(self, ticks: int) -> int:
        """The number of checks in a row that found no progress; `ticks`: its counter now."""
        self.idle_checks = self.idle_checks + 1 if ticks == self.ticks else 0
        self.ticks = ticks
        return self.idle_checks

    def configure(self, config: dict[str, Any]) -> None:
        """Send the configuration, with the child's identity, unless it has one. Raises StartFailed."""
        if self.configured:
            return
        self.configured = True
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

    def kill_hung(self, part: str = "") -> None:
        """Kill it, as unexpectedly as a crash: it is restarted. `part`: what of it hangs."""
        self.hung, self.hung_in = True, part
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def wait_exit(self) -> int:
        """The exit code, or minus the number of the signal that killed it."""
        code = await self.process.wait()
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1
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
        killed = code in (-signal.SIGKILL, -signal.SIGTERM) if self.identity.role == "text" else code < 0
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
        if self.hung:
            where = f" in its {self.hung_in}" if self.hung_in else ""
            return f"the {title(self.identity)} made no progress{where} and was killed"
        if reason := self._load_failure(code):
            return f"the model's tokenizer {reason}"
        if code < 0:
            return f"the {title(self.identity)} was killed by {signal.Signals(-code).name}"
        return f"the {title(self.identity)} exited with code {code}"


async def spawn(identity: Identity, threads: int, key: bytes) -> Child:
    """Start a child from the calling thread, which must run as long as the engine does: the kernel ties
    PDEATHSIG to it. The child imports its modules and waits for its configuration. `key`: the engine's;
    `threads`: of numerical libraries. Raises StartFailed where the system refuses another process."""
    for_child, lifeline = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(*CHILD_PROCESS, MODULES[identity.role], "--lifeline", str(for_child)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=2,  # stdout is for answers alone
            start_new_session=True,  # the terminal's Ctrl-C is the supervisor's to handle
            pass_fds=(for_child,),
            env=environment(threads),
        )
    except BaseException as e:
        os.close(lifeline)  # the child exits, if it was started already
        if isinstance(e, OSError):
            raise StartFailed(f"the {title(identity)} could not be started: {e.strerror}") from e
        raise
    finally:
        os.close(for_child)
    return Child(identity, process, lifeline, key)


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
