"""The event loop's link to the tokenizer process: one text at a time, each with a limit in seconds.

A process that does not answer within it is reported to the supervisor, which kills and restarts it. Of the
process only the newest incarnation counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import zmq
import zmq.asyncio

from pipeline.errors import PeerLost
from pipeline.rate_limit import SparseLog
from pipeline.serving.text_messages import answers
from protocol.codec import decode, encode
from protocol.errors import MalformedMessage
from protocol.messages import VERSION, Encode, Encoded, Hung, Ready, WorkerDied, WorkerUp
from protocol.sockets import CHILD_HWM, Identity, bind_router, ipc_endpoint, parse_identity

log = logging.getLogger(__name__)

ROLE = "tokenizer"
ENCODE_SECONDS = 5.0  # for a text
SECONDS_A_CHARACTER = 10e-6  # more: ten times as many as on an idle core
ONCE_MORE = 0.2  # seconds; an event loop that was stopped runs its timers before it reads


def limit_of(asked: Encode) -> float:
    """Seconds for its answer."""
    texts = asked.texts if asked.messages is None else [turn.content for turn in asked.messages]
    return ENCODE_SECONDS + SECONDS_A_CHARACTER * sum(map(len, texts))


class EncoderExited(PeerLost):
    """The process has exited before its answer. `crashed`: not by a signal from outside."""

    def __init__(self, crashed: bool) -> None:
        super().__init__("the tokenizer exited")
        self.crashed = crashed


class EncoderLink:
    """A bound ROUTER. Used by the event loop."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        runtime: Path,
        fingerprint: str,
        key: bytes,
        to_supervisor: Callable[[object], None],
    ) -> None:
        """`key`: proves the process's identity. Raises ProtocolError where the socket cannot be bound."""
        self._socket = bind_router(context, ipc_endpoint(runtime, "text.sock"), receive_hwm=CHILD_HWM)
        self._fingerprint = fingerprint
        self._key = key
        self._to_supervisor = to_supervisor
        self._name = b""  # of the running process
        self._incarnation = -1  # the newest that has announced itself
        self._up = asyncio.Event()
        self._asked: Encode | None = None
        self._answer: asyncio.Future[Encoded] | None = None  # to `_asked`
        self._log = SparseLog(log)

    async def wait_up(self) -> None:
        """Wait until a process has announced itself."""
        await self._up.wait()

    async def encode(self, asked: Encode) -> Encoded:
        """The answer of the process, after `wait_up`. Raises TimeoutError where it is late, EncoderExited,
        and MalformedMessage for what cannot be sent."""
        frames = encode(asked)
        self._asked = asked
        answer: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
        self._answer = answer
        try:
            # With NOBLOCK the message is sent when this returns.
            sent = self._socket.send_multipart([self._name, *frames], flags=zmq.NOBLOCK)
            cast("asyncio.Future[None]", sent).result()
        except zmq.ZMQError:
            self._drop(crashed=False)  # it has exited, before this text
        for seconds in (limit_of(asked), ONCE_MORE):
            await asyncio.wait((answer,), timeout=seconds)
        if not answer.done():
            self._to_supervisor(Hung(ROLE, 0, self._incarnation))
            self._drop(crashed=True)
            raise TimeoutError
        return answer.result()

    async def serve(self) -> None:
        """Receive from the process, until cancelled."""
        while True:
            sender, *frames = await self._socket.recv_multipart()
            try:
                self._receive(sender, parse_identity(sender, self._key), decode(frames))
            except MalformedMessage as e:
                self._log.warning(f"dropped a malformed message on the tokenizer's socket: {e}")
            await asyncio.sleep(0)  # receiving a message that has arrived does not suspend

    def on_exit(self, exit: WorkerDied) -> None:
        """The supervisor reports an exit."""
        if exit.incarnation == self._incarnation:
            self._drop(exit.crashed)

    def close(self) -> None:
        self._socket.close(linger=0)

    def _receive(self, sender: bytes, identity: Identity, message: Any) -> None:
        if identity.role != ROLE:
            raise MalformedMessage(f"a {identity.role} sends on it")
        if isinstance(message, Ready) and identity.incarnation > self._incarnation:
            if message.version != VERSION or message.fingerprint != self._fingerprint:
                raise MalformedMessage("another version or store")
            self._drop(crashed=True)  # of the one before, whose exit was not reported yet
            self._name, self._incarnation = sender, identity.incarnation
            self._up.set()
            self._to_supervisor(WorkerUp(ROLE, 0, identity.incarnation))
        elif isinstance(message, Encoded) and sender == self._name:
            if self._asked is None or self._answer is None or not answers(self._asked, message):
                raise MalformedMessage("no answer to what was asked")
            if not self._answer.done():
                self._answer.set_result(message)

    def _drop(self, crashed: bool) -> None:
        """The process has exited, or is being killed."""
        self._name = b""
        self._up.clear()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(EncoderExited(crashed))
            self._answer.exception()  # retrieved, also where `encode` has given up
