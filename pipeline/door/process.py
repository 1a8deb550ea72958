"""Process entry: the door for clients over tcp."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import Any

import uvloop
import zmq.asyncio

from pipeline.door.connection import Engine
from pipeline.door.door import Door, listen
from pipeline.door.key_file import KeyFile
from pipeline.door.limits import DoorLimits
from pipeline.serving.client_sockets import most_descriptors
from protocol.codec import decode, encode
from protocol.connection import HEARTBEAT_SECONDS
from protocol.errors import MalformedMessage, ProtocolError
from protocol.messages import VERSION, Failed, Heartbeat, Ready, Shutdown
from protocol.sockets import connect_dealer, ipc_endpoint

log = logging.getLogger(__name__)

NICENESS = 5  # strangers can keep it busy; a thread that computes gets three times as much of a core
LAST_BYTES = 0.3  # seconds for the last messages of a coordinator that was stopped


async def _run(config: dict[str, Any]) -> int:
    runtime = Path(config["runtime"])
    inherited = len(os.listdir("/proc/self/fd"))  # also those of the program that started the engine
    limits = DoorLimits().within(most_descriptors() - inherited)
    context = zmq.asyncio.Context()
    supervisor = connect_dealer(context, ipc_endpoint(runtime, "control.sock"), identity=config["identity"])
    try:
        engine = Engine(runtime, config["key"], config["incarnation"])
        door = Door(listen(config["listen"]), KeyFile(Path(config["key_file"])), engine, limits)
        ready = Ready(VERSION, "door", 0, config["incarnation"], os.getpid(), config["fingerprint"])
        await supervisor.send_multipart(encode(ready))
        serving = (door.serve(), _send_heartbeats(supervisor), _wait_for_shutdown(supervisor))
        tasks = [asyncio.create_task(coroutine) for coroutine in serving]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()
    except ProtocolError as e:  # for example, the port is in use
        await supervisor.send_multipart(encode(Failed("door", str(e), usage=True)))
        return 2
    finally:
        supervisor.close()
        context.term()
    return 0


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
            await asyncio.sleep(LAST_BYTES)
            return


def main(config: dict[str, Any]) -> int:
    """Serve until Shutdown. Returns the exit code."""
    os.nice(NICENESS)
    code: int = uvloop.run(_run(config))
    return code
