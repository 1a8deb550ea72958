"""Process entry: the gateway, and uvicorn with limits of its own: on connections, on the time and size of a
request's head."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
import zmq.asyncio
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pipeline.gateway.access import Access
from pipeline.gateway.app import App
from pipeline.gateway.call import Service, dumps
from pipeline.gateway.engine_links import EngineLinks
from pipeline.gateway.errors import ApiError
from pipeline.text.detokenizer import DECODER
from pipeline.text.tokenizer import read_template
from protocol.codec import decode, encode
from protocol.connection import HEARTBEAT_SECONDS
from protocol.errors import MalformedMessage, ProtocolError
from protocol.messages import VERSION, Failed, Heartbeat, Ready, Shutdown
from protocol.sockets import connect_dealer, ipc_endpoint

log = logging.getLogger(__name__)

NICENESS = 5  # a thread that computes gets three times as much of a core
DRAIN_SECONDS = 3.0  # for answers that run when the engine is stopped
LAST_SECONDS = 1.0  # for the error that ends the others
HEAD_SECONDS = 15.0  # from a connection, or the end of an answer, to the next request's complete head
MOST_HEAD = 64 << 10  # bytes
MOST_CONNECTIONS = 2048
KEEP_SECONDS = 75  # that an idle connection is kept


class LimitedProtocol(HttpToolsProtocol):
    """A connection, with limits on the time and size of a request's head."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._head = 0  # bytes of the head that is being received
        self._in_body = False
        self._timer: asyncio.TimerHandle | None = None
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._watch()

    def _watch(self) -> None:
        self._unwatch()
        self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def data_received(self, data: bytes) -> None:
        between = self.cycle is None or self.cycle.response_complete
        if between and self._in_body:
            # Of a request that is refused already. It is read and dropped, since most clients read no answer
            # before they have sent all; what takes longer than a head may is cut off.
            if self._timer is None:
                self._watch()
        elif between:
            if self._head == 0:
                self._watch()
            self._head += len(data)
        super().data_received(data)
        if between and self._head > MOST_HEAD and (self.cycle is None or self.cycle.response_complete):
            self.transport.abort()

    def on_headers_complete(self) -> None:
        self._head = 0
        self._in_body = True
        self._unwatch()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        self._unwatch()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP; uvicorn's answer is plain text."""
        body = dumps(ApiError(400, msg).body())
        head = (
            f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        )
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)


def make_server(app: App) -> uvicorn.Server:
    """Returns uvicorn's server of the application."""
    config: Any = uvicorn.Config(
        app,
        http=LimitedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_SECONDS,
    )
    return uvicorn.Server(config)


async def _run(config: dict[str, Any]) -> int:
    runtime = Path(config["runtime"])
    context = zmq.asyncio.Context()
    supervisor = connect_dealer(context, ipc_endpoint(runtime, "control.sock"), identity=config["identity"])
    try:
        keys = config["http_keys"]
        access = Access(None if keys is None else Path(keys), config["host"], config["allowed_origins"])
        listeners = [socket.socket(fileno=fd) for fd in config["listeners"]]
        links = EngineLinks(ipc_endpoint(runtime, "client.sock"))
        template = read_template(Path(config["model"]))
        service = Service(links, runtime / DECODER, template, tuple(config["served_model_name"]))
        app = App(service, access)
        server = make_server(app)
        links.start()
        serving = asyncio.create_task(server.serve(sockets=listeners))
        ready = Ready(VERSION, "gateway", 0, config["generation"], os.getpid(), config["fingerprint"])
        await supervisor.send_multipart(encode(ready))
        heart = asyncio.create_task(_send_heartbeats(supervisor))
        stop = asyncio.create_task(_wait_for_shutdown(supervisor))
        await asyncio.wait((serving, heart, stop), return_when=asyncio.FIRST_COMPLETED)
        service.draining = True
        app.feed.close()
        await _until_idle(app, DRAIN_SECONDS)
        await links.close()  # the answers that still run end with an error
        await _until_idle(app, LAST_SECONDS)
        server.should_exit = server.force_exit = True
        for task in (heart, stop):
            task.cancel()
        await asyncio.gather(serving, heart, stop, return_exceptions=True)
    except ProtocolError as e:  # of the file of API keys
        await supervisor.send_multipart(encode(Failed("gateway", str(e), usage=True)))
        return 2
    finally:
        supervisor.close()
        context.term()
    return 0


async def _until_idle(app: App, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await app.idle.wait()


async def _send_heartbeats(supervisor: zmq.asyncio.Socket) -> None:
    while True:
        await supervisor.send_multipart(encode(Heartbeat(time.monotonic())))
        await asyncio.sleep(HEARTBEAT_SECONDS)


async def _wait_for_shutdown(supervisor: zmq.asyncio.Socket) -> None:
    while True:
        try:
            message = decode(await supervisor.recv_multipart())
        except MalformedMessage as e:
            log.warning("dropped a malformed message of the supervisor: %s", e)
            continue
        if isinstance(message, Shutdown):
            return


def main(config: dict[str, Any]) -> int:
    """Serve until Shutdown. Returns the exit code."""
    os.nice(NICENESS)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    code: int = uvloop.run(_run(config))
    return code
