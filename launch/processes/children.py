"""One child process: how it is started, how it is told from others, how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launch.errors import StartFailed
from protocol.messages import Failed
from protocol.sockets import Identity
from workers.lifetime import pack_config

ROOT = Path(__file__).resolve().parents[2]  # where `-m` finds the packages, from any working directory
PIPE_ROOM = 65536  # bytes a new pipe takes without a reader: a configuration must fit, or we would block
STOP_LIMIT = 5.0  # seconds for an orderly end
TERM_LIMIT = 1.0  # seconds between SIGTERM and SIGKILL
MODULES = {
    "loader": "pipeline.loader",
    "coordinator": "pipeline.coordinator",
    "worker": "workers.expert_worker",
    "prefetcher": "workers.prefetcher",
}


def title(identity: Identity) -> str:
    """For a person: "worker 1", and just "loader" where there is only one."""
    return f"{identity.role} {identity.index}" if identity.role == "worker" else identity.role


@dataclass
class Child:
    """A running child. `ready` and `failed` are set by its messages on the control socket."""

    identity: Identity
    process: asyncio.subprocess.Process
    lifeline: int  # the pipe's end that we keep; its closing, however it comes about, ends the child
    key: bytes  # the engine's
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    failed: asyncio.Future[Failed] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    heard: float = 0.0  # when it last said something
    last_heard: float = 0.0  # the same, when that was last looked at
    silent_looks: int = 0  # looks in a row that found nothing new
    stopped_looks: int = 0  # looks in a row that found it stopped
    up: bool = False  # it does its work, as the coordinator sees it
    hung: bool = False  # it was ended because it made no progress
    stopping: bool = False  # its end is expected from now on

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    @property
    def is_stopped(self) -> bool:
        """By SIGSTOP or the like; who is being debugged is not."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False  # it has ended
        return stat.rpartition(")")[2].split()[0] == "T"

    def tell(self, config: dict[str, Any]) -> None:
        """Tell it, once, what it is to do, and who it is. Raises StartFailed."""
        packed = pack_config(config | asdict(self.identity) | {"identity": self.identity.prove(self.key)})
        if len(packed) > PIPE_ROOM:
            self.end_now()
            raise StartFailed(
                f"the {title(self.identity)}'s configuration has {len(packed)} bytes: too many options"
            )
        if self.lifeline >= 0:
            with suppress(BrokenPipeError):  # it has ended, which is noticed elsewhere
                os.write(self.lifeline, packed)

    def end_now(self) -> None:
        """Nobody needs it any more."""
        self.stopping = True
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def ended(self) -> int:
        """Wait for the process; its exit code, or minus the signal that ended it."""
        code = await self.process.wait()
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1
        return code

    async def last_words(self, limit: float) -> None:
        """Once it has ended by itself: wait a little for the Ready or the Failed that it may have sent."""
        said = asyncio.ensure_future(self.ready.wait())
        try:
            code = self.process.returncode
            words = (said, self.failed) if code == 0 else (self.failed,)
            await asyncio.wait(words, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            said.cancel()

    def epitaph(self, code: int) -> str:
        """One line: how this child ended."""
        if self.failed.done():
            return self.failed.result().text
        if self.hung:
            return f"the {title(self.identity)} made no progress and was ended"
        if code < 0:
            return f"the {title(self.identity)} was killed by {signal.Signals(-code).name}"
        return f"the {title(self.identity)} ended with exit code {code}"


async def spawn(identity: Identity, threads: int, key: bytes) -> Child:
    """Start a child from the calling thread, which must be the one that lives as long as the engine: the
    kernel's parent-death signal is tied to it. It imports what it runs and waits to be told what to do.
    `key`: the engine's, which proves its identity; `threads` bounds what numerical libraries start. Raises
    StartFailed where the system refuses another process."""
    for_child, lifeline = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "workers.child",
            MODULES[identity.role],
            "--lifeline",
            str(for_child),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=2,  # stdout is for answers only
            start_new_session=True,  # the terminal's Ctrl-C is the supervisor's to handle
            pass_fds=(for_child,),
            env=_environment(threads),
        )
    except BaseException as e:
        os.close(lifeline)  # ends the child, should it have been started already
        if isinstance(e, OSError):
            raise StartFailed(f"the {title(identity)} could not be started: {e.strerror}") from e
        raise
    finally:
        os.close(for_child)
    return Child(identity, process, lifeline, key)


async def end(children: list[Child]) -> None:
    """See to it that children end which have been told to: after a while by SIGTERM, then by SIGKILL."""
    for limit, then in ((STOP_LIMIT, signal.SIGTERM), (TERM_LIMIT, signal.SIGKILL)):
        await wait_ended(children, limit)
        for child in children:
            child.signal(then)


async def wait_ended(children: list[Child], limit: float) -> None:
    """Until all have ended, at most `limit` seconds."""
    ends = [asyncio.ensure_future(child.ended()) for child in children]
    if ends:
        _, late = await asyncio.wait(ends, timeout=limit)
        for waiting in late:
            waiting.cancel()


def _environment(threads: int) -> dict[str, str]:
    # OpenMP's idle threads spin by default, which steals the cores that the other processes compute on.
    environment = dict(os.environ)
    environment.update(
        OMP_WAIT_POLICY="PASSIVE",
        GOMP_SPINCOUNT="0",
        KMP_BLOCKTIME="0",
        OMP_NUM_THREADS=str(threads),
        OPENBLAS_NUM_THREADS="1",  # numpy's start when it is imported, before a worker is bound to its cores
        PYTHONPATH=os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p),
    )
    return environment
