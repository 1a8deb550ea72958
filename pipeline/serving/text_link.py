"""The event loop's link to the text process: a text or a compilation and a mask at a time, each with a limit
in seconds.

A process that does not answer within it is reported to the supervisor, which kills and restarts it. Of the
process only the newest generation counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import zmq
import zmq.asyncio

from pipeline.errors import PeerLost
from pipeline.fairness import SparseLog
from pipeline.text.grammar import words
from protocol.codec import decode, encode
from protocol.errors import MalformedMessage
from protocol.messages import (
    VERSION,
    Allowed,
    Encode,
    Encoded,
    Follow,
    Hung,
    Ready,
    Unfollow,
    WorkerDied,
    WorkerUp,
)
from protocol.sockets import CHILD_HWM, Identity, bind_router, ipc_endpoint, parse_identity

log = logging.getLogger(__name__)

ROLE = "text"
SECONDS = 5.0  # for a job
SECONDS_A_CHARACTER = 10e-6  # more: ten times as many as on an idle core
TOKEN_CHARACTERS = 100  # a token that a grammar is advanced by counts as so many
ONCE_MORE = 0.2  # seconds; an event loop that was stopped runs its timers before it reads


def limit_of(asked: Encode | Follow) -> float:
    """Returns the seconds for its answer."""
    if isinstance(asked, Follow):
        characters = len(asked.grammar) + TOKEN_CHARACTERS * (len(asked.tokens) + asked.ahead)
    else:
        texts = [asked.text or "", *(turn.content for turn in asked.messages or ())]
        characters = len(asked.grammar) + sum(map(len, texts))
    return SECONDS + SECONDS_A_CHARACTER * characters


class TextProcessExited(PeerLost):
    """The process has exited before its answer. `crashed`: by a job, not by a signal from outside; `alone`:
    by this one, as it had no other."""

    def __init__(self, crashed: bool, alone: bool = True) -> None:
        super().__init__("the text process exited")
        self.crashed = crashed
        self.alone = alone


@dataclass(frozen=True)
class _Job:
    asked: Encode | Follow
    answer: asyncio.Future[Any]


class TextLink:
    """A bound ROUTER. Used by the event loop. `generation`: the number of the newest process, which knows
    nothing of what an earlier one was told."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        runtime: Path,
        key: bytes,
        to_supervisor: Callable[[object], None],
        on_up: Callable[[], None],
    ) -> None:
        """`key`: proves the process's identity; `on_up`: called when a process is there. Raises ProtocolError
        where the socket cannot be bound."""
        self._socket = bind_router(context, ipc_endpoint(runtime, "text.sock"), receive_hwm=CHILD_HWM)
        self._key = key
        self._to_supervisor = to_supervisor
        self._on_up = on_up
        self._name = b""  # of the running process
        self.generation = -1
        self._pid = 0
        self._up = asyncio.Event()
        self._jobs: dict[bool, _Job] = {}  # that the process has: one, and a mask
        self._log = SparseLog(log)

    def stats(self) -> dict[str, Any]:
        """The newest process, as the stats of workers describe one."""
        up = self._name != b""
        return {"role": ROLE, "index": 0, "generation": self.generation, "pid": self._pid, "up": up}

    async def wait_up(self) -> None:
        """Wait until a process has announced itself."""
        await self._up.wait()

    async def ask(self, asked: Encode | Follow) -> Any:
        """Return the answer of the process, Encoded or Allowed, after `wait_up`; a mask, whose grammar it
        has, may be asked for beside another job. Raises TimeoutError where it is late, TextProcessExited, and
        MalformedMessage for what cannot be sent."""
        frames = encode(asked)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._jobs[is_mask(asked)] = job = _Job(asked, answer)
        try:
            if not self._send(frames):
                self._drop(crashed=False)  # it has exited, before this job
            for seconds in (limit_of(asked), ONCE_MORE):
                await asyncio.wait((answer,), timeout=seconds)
            if not answer.done():
                self._to_supervisor(Hung(ROLE, 0, self.generation))
                answer.set_exception(TimeoutError())
                self._drop(crashed=False)  # the other job is not at fault
            return answer.result()
        finally:
            if self._jobs.get(is_mask(asked)) is job:
                del self._jobs[is_mask(asked)]

    def tell(self, message: Unfollow) -> None:
        """Send what has no answer, where a process is there."""
        if self._name:
            self._send(encode(message))

    async def serve(self) -> None:
        """Receive from the process, until cancelled."""
        while True:
            sender, *frames = await self._socket.recv_multipart()
            try:
                self._receive(sender, parse_identity(sender, self._key), decode(frames))
            except MalformedMessage as e:
                self._log.warning(f"dropped a malformed message on the text process's socket: {e}")
            await asyncio.sleep(0)  # receiving a message that has arrived does not suspend

    def on_exit(self, exit: WorkerDied) -> None:
        """Note an exit that the supervisor reports."""
        if exit.generation == self.generation:
            self._drop(exit.crashed)

    def close(self) -> None:
        self._socket.close(linger=0)

    def _send(self, frames: list[Any]) -> bool:
        """Send to the running process; returns whether it has got the message."""
        try:
            # With NOBLOCK the message is sent when this returns.
            sent = self._socket.send_multipart([self._name, *frames], flags=zmq.NOBLOCK)
            cast("asyncio.Future[None]", sent).result()
        except zmq.ZMQError:
            return False
        return True

    def _receive(self, sender: bytes, identity: Identity, message: Any) -> None:
        if identity.role != ROLE:
            raise MalformedMessage(f"a {identity.role} sends on it")
        if isinstance(message, Ready) and identity.generation > self.generation:
            if message.version != VERSION:
                raise MalformedMessage("another version")
            self._drop(crashed=False)  # the one before, whose exit was not reported yet
            self._name, self.generation, self._pid = sender, identity.generation, message.pid
            self._up.set()
            self._to_supervisor(WorkerUp(ROLE, 0, identity.generation))
            self._on_up()
        elif isinstance(message, Encoded | Allowed) and sender == self._name:
            job = next((job for job in self._jobs.values() if answers(job.asked, message)), None)
            if job is None:
                raise MalformedMessage("no answer to what was asked")
            if not job.answer.done():
                job.answer.set_result(message)

    def _drop(self, crashed: bool) -> None:
        """Give up the process, which has exited or is being killed."""
        self._name = b""
        self._up.clear()
        waiting = [job.answer for job in self._jobs.values() if not job.answer.done()]
        for answer in waiting:
            answer.set_exception(TextProcessExited(crashed, alone=len(waiting) == 1))
            answer.exception()  # retrieved, also where `ask` has given up


def is_mask(asked: Encode | Follow) -> bool:
    """Returns whether this is a mask of a grammar that the process has, which is made beside other jobs."""
    return isinstance(asked, Follow) and not asked.grammar


def answers(asked: Encode | Follow, answer: Encoded | Allowed) -> bool:
    """Returns whether it is an answer to what was asked, and complete."""
    match asked, answer:
        case Follow(), Allowed():
            size, guesses = words(asked.vocabulary), len(answer.guesses)
            whole = len(answer.mask) in (0, 0 if answer.error else size)
            whole &= guesses == len(answer.forced) == len(answer.masks) <= asked.ahead
            whole &= not guesses or answer.masks.shape[1] == size == len(answer.mask)
            return whole and answer.answer == asked.answer
        case Encode(), Encoded():
            return True
    return False
