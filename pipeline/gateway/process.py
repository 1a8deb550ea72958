"""Process entry: the gateway."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import resource
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvloop
import zmq.asyncio

from pipeline.fairness import SparseLog
from pipeline.gateway.access import Access
from pipeline.gateway.app import App
from pipeline.gateway.call import Service
from pipeline.gateway.connections import MOST_CONNECTIONS, Connections, make_server
from pipeline.gateway.engine_links import EngineLinks
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
M_MMAP_THRESHOLD = -3  # of glibc's mallopt
# Bytes: glibc would raise it as large blocks are freed, and keep the memory of bodies.
LEAST_MAPPED = 128 << 10
OTHER_FILES = 256  # beside those of connections; where fewer may be open, half of all
LAST_SECONDS = 1.0  # for the error that ends the others


class SparseHandler(logging.Handler):
    """Passes another library's lines on, up to as many a second as ours that clients cause."""

    def __init__(self) -> None:
        super().__init__()
        self._log = SparseLog(log)

    def emit(self, record: logging.LogRecord) -> None:
        self._log.warning(record.getMessage(), failed=record.exc_info is not None)


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
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        server = make_server(app, Connections(min(MOST_CONNECTIONS, max(files - OTHER_FILES, files // 2))))
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
    if (set_option := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # glibc's
        set_option(M_MMAP_THRESHOLD, LEAST_MAPPED)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # a connection is one
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    library = logging.getLogger("uvicorn")
    library.setLevel(logging.WARNING)
    library.addHandler(SparseHandler())
    library.propagate = False
    code: int = uvloop.run(_run(config))
    return code
