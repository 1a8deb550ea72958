"""The door's process: what its clients get when it is shut down."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import zmq.asyncio
from child_messages import KEY, LIMIT, PRINT
from client_service import CLIENT, ENGINE, free_endpoint, service
from raw_client import raw_client
from waiting import until

import workers
from launch.processes.children import MODULES
from protocol.codec import decode, encode
from protocol.keys import write_engine_keys
from protocol.messages import Error, Ready, Score, Shutdown
from protocol.sockets import Identity, bind_router, ipc_endpoint
from workers.lifetime import pack_config

ROOT = Path(workers.__file__).parent.parent  # where a child process finds the packages
DOOR = Identity("door", 0, 0)
NAME = DOOR.prove(KEY)


@asynccontextmanager
async def door_process(runtime: Path, listen: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Started, not yet ready."""
    key_file = runtime / "engine.key"
    write_engine_keys(key_file, ENGINE)
    config: dict[str, Any] = {"engine": "test", "runtime": str(runtime), "log_level": "INFO", "key": KEY}
    config |= {"fingerprint": PRINT, "listen": listen, "key_file": str(key_file)}
    config |= {"identity": NAME, **asdict(DOOR)}
    for_child, lifeline = os.pipe()
    os.write(lifeline, pack_config(config))
    words = ("-m", "workers.child", MODULES["door"], "--lifeline", str(for_child))
    door = await asyncio.create_subprocess_exec(sys.executable, *words, cwd=ROOT, pass_fds=(for_child,))
    os.close(for_child)
    try:
        yield door
    finally:
        os.close(lifeline)
        with suppress(ProcessLookupError):
            door.kill()
        await door.wait()


async def test_the_last_messages_of_a_stopped_coordinator_are_delivered() -> None:
    """They and Shutdown arrive at the same time."""
    endpoint = free_endpoint()
    async with service(remote=True) as running:
        runtime = Path(running.local.removeprefix("ipc://")).parent
        supervisor = bind_router(zmq.asyncio.Context.instance(), ipc_endpoint(runtime, "control.sock"))
        try:
            async with asyncio.timeout(4 * LIMIT), door_process(runtime, endpoint) as door:
                assert isinstance(decode((await supervisor.recv_multipart())[1:]), Ready)
                async with raw_client(endpoint, keys=CLIENT) as client:
                    await client.send(Score(1, token_ids=(1,)))  # not answered here
                    await until(lambda: running.received)
                    door.send_signal(signal.SIGSTOP)
                    for request in range(50):
                        running.clients.send(running.received[0][0], Error(request, "stopped"))
                    await supervisor.send_multipart([NAME, *encode(Shutdown())])
                    await asyncio.sleep(0.2)  # for the threads of ZeroMQ that write them
                    door.send_signal(signal.SIGCONT)
                    for request in range(50):
                        assert await client.expect(Error) == Error(request, "stopped")
                    assert await door.wait() == 0
        finally:
            supervisor.close(linger=0)
