"""Process entry: the coordinator. uvloop in the main thread owns the clients and the supervisor's messages;
the engine and everything it uses live in one thread of their own, because torch calls block.

The two talk through a queue of calls (to the engine's thread) and `call_soon_threadsafe` (back).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvloop
import zmq
import zmq.asyncio

from pipeline.coordinator_config import CoordinatorConfig
from pipeline.errors import NumberInUse, UsageError
from pipeline.experts.peers import ExitEvents
from pipeline.policies.view import PolicyRequest
from pipeline.serving.assembly import Assembly
from pipeline.serving.client_sockets import Listening
from pipeline.serving.clients import Clients, for_others
from pipeline.serving.engine_thread import EngineThread
from protocol.codec import decode, encode
from protocol.connection import HEARTBEAT_SECONDS
from protocol.errors import MalformedMessage, ProtocolError
from protocol.messages import (
    VERSION,
    Calibrate,
    Cancel,
    Done,
    Error,
    Failed,
    Generate,
    Heartbeat,
    PolicyChanged,
    Ready,
    Score,
    SetPolicy,
    Shutdown,
    Stats,
    StatsReply,
    Welcome,
    WorkerDied,
)
from protocol.sockets import connect_dealer, ipc_endpoint
from shm.errors import NotEnoughMemory

log = logging.getLogger(__name__)

ENDING = "the engine is shutting down"
CALIBRATING = "the engine is being calibrated; set the policy when that is over"
FLOODED = "this client has sent more than the engine can take in; ask again later"
ID_BYTES = 36  # of a number in a tuple
FLUSH_LIMIT = 1.0  # seconds for the last messages to clients


class Coordinator:
    """The event loop's side."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._told = CoordinatorConfig.from_map(config)
        self._loop = asyncio.get_running_loop()
        runtime = Path(config["runtime"])
        self._context = zmq.asyncio.Context()
        control = ipc_endpoint(runtime, "control.sock")
        self._control = connect_dealer(self._context, control, identity=config["identity"])
        try:
            self.clients = Clients(
                ipc_endpoint(runtime, "client.sock"),
                self._welcome,
                self._on_message,
                self._on_gone,
                tcp=Listening.asked(self._told.config),
            )
        except ProtocolError as e:  # the port was taken just now, say
            self._tell_supervisor(Failed("coordinator", str(e), usage=True))
            self._control.close()
            self._context.term()
            raise SystemExit(2) from None
        self._deaths = ExitEvents()
        self._engine = EngineThread(
            self._told,
            self._loop,
            self.clients,
            deaths=self._deaths,
            on_ready=self._on_ready,
            on_failure=self._on_failure,
            tell=self._tell_supervisor,
        )
        self._assembly: Assembly | None = None
        self._built = asyncio.Event()
        self._stopping = asyncio.Event()
        self._exit = 0

    async def run(self) -> int:
        """Until Shutdown or a failure. Returns the exit code."""
        self._engine.start()
        listening = asyncio.create_task(self._listen())
        serving = asyncio.create_task(self._serve())
        beating = asyncio.create_task(self._beat())
        stopping = asyncio.create_task(self._stopping.wait())
        tasks = (listening, serving, beating, stopping)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if (error := task.exception()) is not None:
                log.error("the coordinator failed", exc_info=error)
                self._exit = 1
        self._engine.stop()
        await asyncio.to_thread(self._engine.join)
        await self.clients.flush(FLUSH_LIMIT)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.clients.close()
        self._control.close()
        self._context.term()
        return self._exit

    # --- in the event loop -------------------------------------------------------------------------------

    def _on_ready(self, assembly: Assembly) -> None:
        """The engine is built: tell the supervisor."""
        self._assembly = assembly
        self._built.set()
        told = self._told
        ready = Ready(
            VERSION, "coordinator", 0, told.incarnation, os.getpid(), told.fingerprint, tuple(assembly.notes)
        )
        self._tell_supervisor(ready)

    def _on_failure(self, text: str, usage: bool) -> None:
        """The engine cannot start or cannot go on: say why and end."""
        self._exit = 2 if usage else 1
        self._stopping.set()
        self._tell_supervisor(Failed("coordinator", text, usage))

    def _tell_supervisor(self, message: object) -> None:
        # Not waiting, this has happened when it returns, and the future only carries how it went. A
        # supervisor that stands still is told nothing: what it misses is a sign of life, or is seen by it
        # otherwise.
        sent = self._control.send_multipart(encode(message), flags=zmq.NOBLOCK)
        with suppress(zmq.Again):
            cast("asyncio.Future[None]", sent).result()

    async def _serve(self) -> None:
        # What clients say before there is an engine waits in the socket.
        await self._built.wait()
        await self.clients.serve()

    async def _beat(self) -> None:
        """Signs of life for the supervisor."""
        while True:
            self._tell_supervisor(Heartbeat(time.monotonic()))
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _listen(self) -> None:
        while True:
            frames = await self._control.recv_multipart()
            try:
                message: Any = decode(frames)
            except MalformedMessage as e:
                log.warning("dropped a malformed message of the supervisor: %s", e)
                continue
            match message:
                case Shutdown():
                    self._stopping.set()
                    return
                case WorkerDied():
                    self._deaths.put(message)

    def _welcome(self) -> Welcome:
        told, assembly = self._told, self._assembly
        assert assembly is not None
        tokenizer = assembly.tokenizer
        policy = assembly.engine.policy
        return Welcome(
            version=VERSION,
            engine=told.engine,
            model=str(told.model),
            fingerprint=told.fingerprint,
            device=assembly.device.name,
            policy=policy.name,
            exact=policy.exact,
            vocabulary=assembly.engine.backbone.spec.vocabulary,
            context=assembly.context,
            has_tokenizer=tokenizer is not None,
            has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
            emulation=told.config.emulation,
            sampling=assembly.sampling,
            format=told.config.format,
            backbone_dtype=told.config.backbone_dtype,
        )

    def _on_gone(self, client: bytes) -> None:
        self._engine.call(client, lambda a: self._forget(a, client), always=True)

    def _on_message(self, client: bytes, message: object) -> None:
        match message:
            case Generate() | Score():
                submit = partial(self._submit, client=client, message=message)
                if not self._engine.call(client, submit, size=_size(message)):
                    self.clients.send(client, Done(message.request, "error", self._refusal))
            case Calibrate():
                calibrate = partial(self._engine.calibrations.serve, client=client, message=message)
                if not self._engine.call(client, calibrate, size=_size(message)):
                    self.clients.send(client, Done(message.request, "error", self._refusal))
            case SetPolicy():
                if not self._engine.call(client, lambda a: self._set_policy(a, client, message)):
                    self.clients.send(client, Error(message.request, self._refusal))
            case Cancel():
                taken = self._engine.call(client, lambda a: self._cancel(a, client, message.request))
                if not (taken or self._stopping.is_set()):
                    self.clients.cut_off(client, FLOODED)
            case Stats():
                self.clients.send(client, self._stats(message.request))
            case _:
                self.clients.refuse(client, f"a client may not send {type(message).__name__}")

    @property
    def _refusal(self) -> str:
        """Why something was not taken in."""
        return ENDING if self._stopping.is_set() else FLOODED

    def _stats(self, request: int) -> StatsReply:
        # Read while the engine's thread counts on: each is whole, together they may be a step apart.
        assert self._assembly is not None
        return StatsReply(request, self._assembly.stats() | {"clients": self.clients.counts()})

    # --- calls that run in the engine's thread -----------------------------------------------------------

    def _submit(self, assembly: Assembly, client: bytes, message: Generate | Score) -> None:
        try:
            assembly.scheduler.submit(client, message)
        except NumberInUse as e:  # its Done is the other request's
            self._engine.send(client, Error(message.request, str(e)))
        except UsageError as e:
            self._engine.send(client, Done(message.request, "error", str(e), usage=True))

    def _cancel(self, assembly: Assembly, client: bytes, request: int) -> None:
        self._engine.calibrations.cancel(client, request)
        assembly.scheduler.cancel(client, request)

    def _forget(self, assembly: Assembly, client: bytes) -> None:
        self._engine.calibrations.forget(client)
        assembly.scheduler.forget(client)

    def _set_policy(self, assembly: Assembly, client: bytes, message: SetPolicy) -> None:
        if self._engine.calibrations.running:
            self._engine.send(client, Error(message.request, CALIBRATING))
            return
        options = {name: str(value) for name, value in message.options.items()}
        try:
            notes = assembly.set_policy(PolicyRequest(message.policy, options))
        except (UsageError, NotEnoughMemory) as e:
            self._engine.send(client, Error(message.request, str(e)))
            return
        self._engine.in_loop(self._tell_supervisor, message)
        policy = assembly.engine.policy
        changed = PolicyChanged(message.request, policy.name, policy.exact, notes)
        self._engine.send(client, changed)
        self._engine.in_loop(self.clients.broadcast, for_others(changed), client)


def _size(message: Generate | Score | Calibrate) -> int:
    """Bytes that a request holds while it waits, about."""
    if not isinstance(message, Generate):
        return ID_BYTES * len(message.token_ids or ()) + len(message.text or "")
    turns = [turn.content for turn in message.messages or ()]
    texts = [message.prompt or "", message.conversation or "", *turns, *message.stop]
    return ID_BYTES * (len(message.resume) + len(message.token_ids or ())) + sum(map(len, texts))


async def _run(config: dict[str, Any]) -> int:
    return await Coordinator(config).run()


def main(config: dict[str, Any]) -> int:
    """The coordinator's life; the exit code."""
    code: int = uvloop.run(_run(config))
    return code
