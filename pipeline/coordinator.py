"""Process entry: the coordinator. uvloop in the main thread serves the clients' sockets and the supervisor's
messages; the engine runs in a thread of its own, because torch calls block."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, cast

import uvloop
import zmq
import zmq.asyncio

from pipeline.config import CoordinatorConfig
from pipeline.energy import EnergyMeter
from pipeline.errors import PipelineError, UsageError
from pipeline.experts.peers import ExitEvents
from pipeline.serving.clients import Clients
from pipeline.serving.engine_inbox import (
    EngineEvent,
    EngineFailed,
    EngineInbox,
    EngineReady,
    Post,
    ToClients,
    ToOtherClients,
    ToSupervisor,
)
from pipeline.serving.engine_parts import EngineParts
from pipeline.serving.engine_service import EngineService
from pipeline.serving.engine_status import EngineStatus
from pipeline.serving.text_link import ROLE as TEXT
from pipeline.serving.text_link import TextLink
from pipeline.serving.text_queue import Request, TextMessages, TextQueue
from pipeline.text.grammar import MaskDropped, MaskRequest
from protocol.codec import decode, encode
from protocol.connection import HEARTBEAT_SECONDS
from protocol.errors import MalformedMessage, ProtocolError
from protocol.messages import (
    VERSION,
    Calibrate,
    Cancel,
    Done,
    Error,
    ExpertActivity,
    Failed,
    Generate,
    Heartbeat,
    Ready,
    Score,
    Scores,
    SetMachines,
    SetPolicy,
    Shutdown,
    Stats,
    StatsReply,
    Token,
    Tokenize,
    Welcome,
    WorkerDied,
)
from protocol.sockets import connect_dealer, ipc_endpoint
from shm.errors import NotEnoughMemory, ShmError
from workers.cuda import CudaError

log = logging.getLogger(__name__)

STOPPING = "the engine is shutting down"
FLOODED = "this client has sent more than the engine can queue; try again later"
FLUSH_LIMIT = 1.0  # seconds for the last messages to clients
JOIN_LIMIT = 2.0  # seconds for the engine's thread to end its step
GIVE_UP_LIMIT = 1.0  # seconds for it to end after its waits for children were given up


class Coordinator:
    """Connects clients, supervisor and the engine's thread. Runs in the event loop."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = CoordinatorConfig.from_map(config)
        runtime = self._config.runtime
        self._context = zmq.asyncio.Context()
        self._energy = EnergyMeter()
        control = ipc_endpoint(runtime, "control.sock")
        self._control = connect_dealer(self._context, control, identity=config["identity"])
        try:
            self._clients = Clients(
                ipc_endpoint(runtime, "client.sock"),
                self._welcome,
                self._on_client_message,
                self._on_client_gone,
            )
        except ProtocolError as e:
            self._send_to_supervisor(Failed("coordinator", str(e), usage=True))
            self._control.close()
            self._context.term()
            raise SystemExit(2) from None
        self._exits = ExitEvents()
        self._inbox = EngineInbox()
        loop = asyncio.get_running_loop()

        def post(event: EngineEvent) -> None:  # called by the engine's thread
            loop.call_soon_threadsafe(self._on_engine_event, event)

        text_up = threading.Event()
        engine = (self._config, self._inbox, post, self._exits, self._clients.congested, text_up)
        self._engine = threading.Thread(target=run_engine, args=engine, name="engine", daemon=True)
        self._status: EngineStatus | None = None
        to_text = (self._context, runtime, self._config.key)
        self._text_link = TextLink(*to_text, self._send_to_supervisor, on_up=text_up.set)
        self._texts: TextQueue | None = None  # until the engine is ready
        self._ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._exit_code = 0

    async def serve(self) -> int:
        """Serve until Shutdown or a failure. Returns the exit code."""
        self._engine.start()
        serving = (
            *(self._receive_from_supervisor(), self._serve_clients(), self._send_heartbeats()),
            self._text_link.serve(),
        )
        tasks = [asyncio.create_task(coroutine) for coroutine in (*serving, self._stopping.wait())]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if (error := task.exception()) is not None:
                log.error("the coordinator failed", exc_info=error)
                self._exit_code = 1
        if self._texts is not None:
            self._texts.stop()
        self._inbox.stop()
        await asyncio.to_thread(self._engine.join, JOIN_LIMIT)
        if self._engine.is_alive():
            self._exits.give_up("the engine was stopped while a step waited")
            await asyncio.to_thread(self._engine.join, GIVE_UP_LIMIT)
        await self._clients.flush(FLUSH_LIMIT)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._clients.close()
        self._control.close()
        self._text_link.close()
        self._context.term()
        return self._exit_code

    # --- the engine ---------------------------------------------------------------------------------------

    def _on_engine_event(self, event: EngineEvent) -> None:
        match event:
            case ToClients(messages):
                for client, message in messages:
                    self._clients.send(client, message)
            case ToOtherClients(excluded, message):
                self._clients.broadcast(message, excluded)
            case ToSupervisor(message):
                self._send_to_supervisor(message)
            case MaskRequest() | MaskDropped():
                assert self._texts is not None
                self._texts.ask(event)
            case EngineReady(status, texts, notes):
                self._status = status
                self._texts = TextQueue(
                    texts, self._text_link, self._pass_on, self._clients.send, self._inbox.wake
                )
                self._ready.set()
                number, store = self._config.generation, self._config.fingerprint
                ready = Ready(VERSION, "coordinator", 0, number, os.getpid(), store, notes)
                self._send_to_supervisor(ready)
            case EngineFailed(reason, usage):
                self._exit_code = 2 if usage else 1
                self._stopping.set()
                self._send_to_supervisor(Failed("coordinator", reason, usage))

    # --- the supervisor -----------------------------------------------------------------------------------

    def _send_to_supervisor(self, message: object) -> None:
        # With NOBLOCK the message is sent when this returns; the future only carries the outcome. Messages to
        # a supervisor that does not read are dropped: it misses a heartbeat, or detects the rest itself.
        sent = self._control.send_multipart(encode(message), flags=zmq.NOBLOCK)
        with suppress(zmq.Again):
            cast("asyncio.Future[None]", sent).result()

    async def _send_heartbeats(self) -> None:
        while True:
            self._send_to_supervisor(Heartbeat(time.monotonic()))
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _receive_from_supervisor(self) -> None:
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
                case WorkerDied(role=role):
                    if role == TEXT:
                        self._text_link.on_exit(message)
                    self._exits.put(message)
                case SetMachines():
                    self._exits.machines.append(message)

    # --- clients ------------------------------------------------------------------------------------------

    async def _serve_clients(self) -> None:
        # Messages that clients send before the engine is ready wait in the socket.
        await self._ready.wait()
        assert self._status is not None
        assert self._texts is not None
        clients = self._clients.serve()
        async with asyncio.TaskGroup() as group:
            for service in (clients, self._texts.serve()):
                group.create_task(service)

    def _welcome(self) -> Welcome:
        assert self._status is not None
        return self._status.welcome()

    def _on_client_gone(self, client: bytes) -> None:
        assert self._texts is not None
        self._texts.forget(client)
        self._inbox.drop(client)

    def _pass_on(self, client: bytes, message: Request | SetPolicy) -> None:
        """Pass a message whose text has been encoded to the engine's thread."""
        if not self._inbox.put(client, message):
            self._refuse(client, message)

    def _refuse(self, client: bytes, message: Request | Tokenize | SetPolicy) -> None:
        refusal = STOPPING if self._stopping.is_set() else FLOODED
        is_call = isinstance(message, SetPolicy)
        answer = Error(message.request, refusal) if is_call else Done(message.request, "error", refusal)
        self._clients.send(client, answer)

    def _on_client_message(self, client: bytes, message: object) -> None:
        assert self._texts is not None
        assert self._status is not None
        match message:
            case Generate() | Score() | Calibrate() | Tokenize():
                if not self._texts.put(client, message):
                    self._refuse(client, message)
            case SetPolicy():
                self._pass_on(client, message)
            case Cancel():
                self._texts.cancel(client, message.request)
                if not (self._inbox.put(client, message) or self._stopping.is_set()):
                    self._clients.cut_off(client, FLOODED)
            case Stats():
                own = {"clients": self._clients.counts(), "text": self._text_link.stats()}
                stats = self._status.stats() | own | {"energy": self._energy.joules()}
                self._clients.send(client, StatsReply(message.request, stats))
            case ExpertActivity():
                self._clients.send(client, self._status.activity(message.request))
            case _:
                self._clients.refuse(client, f"a client may not send {type(message).__name__}")


def run_engine(
    config: CoordinatorConfig,
    inbox: EngineInbox,
    post: Post,
    exits: ExitEvents,
    congested: Callable[[bytes], bool],
    text_up: threading.Event,
) -> None:
    """Build an engine and serve until `inbox` is stopped: the whole life of the engine's thread. `text_up`:
    set once the text process is ready."""
    try:
        with ExitStack() as closing:
            parts = EngineParts(config, exits, lambda message: post(ToSupervisor(message)), closing, text_up)
            service = EngineService(parts, inbox, _counting(parts, post), congested)
            texts = TextMessages(parts.detokenizer, parts.context)
            post(EngineReady(service.status, texts, tuple(parts.notes)))
            service.warm_up()
            service.serve()
    except (PipelineError, ShmError, CudaError) as e:
        post(EngineFailed(str(e), isinstance(e, UsageError | NotEnoughMemory)))
    except Exception as e:
        log.exception("the engine failed")
        post(EngineFailed(f"the engine failed: {type(e).__name__}: {e}", False))


def _counting(parts: EngineParts, post: Post) -> Post:
    """Counts in the control segment what clients are answered: whether the engine is of use, for the
    supervisor."""
    line = parts.control.line("coordinator", 0)

    def counted(event: EngineEvent) -> None:
        if isinstance(event, ToClients):
            line.answered += sum(isinstance(message, Token | Scores) for _, message in event.messages)
        post(event)

    return counted


async def _run(config: dict[str, Any]) -> int:
    return await Coordinator(config).serve()


def main(config: dict[str, Any]) -> int:
    """Run the coordinator until it is shut down. Returns the exit code."""
    code: int = uvloop.run(_run(config))
    return code
