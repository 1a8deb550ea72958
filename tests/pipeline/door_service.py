"""The door, and behind it the coordinator's `Clients` without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from child_messages import KEY
from client_service import CLIENT, ENGINE, Service, free_endpoint, service

from pipeline.door.connection import Engine
from pipeline.door.door import Door, listen
from pipeline.door.key_file import KeyFile
from pipeline.door.limits import DoorLimits
from protocol.keys import Address, ClientKeys, write_engine_keys


@dataclass
class DoorService:
    door: Door
    tcp: str
    key_file: Path
    keys: KeyFile
    clients: Service

    def address(self, keys: ClientKeys = CLIENT) -> Address:
        return Address(self.tcp, keys)


@asynccontextmanager
async def door_service(
    limits: DoorLimits | None = None, *, endpoint: str = "", incarnation: int = 0
) -> AsyncIterator[DoorService]:
    """Serves for the length of the block, and must still serve at its end; leaves no descriptor."""
    before = psutil.Process().num_fds()
    async with service(remote=True) as clients:
        runtime = Path(clients.local.removeprefix("ipc://")).parent
        key_file = runtime / "engine.key"
        write_engine_keys(key_file, ENGINE)
        endpoint = endpoint or free_endpoint()
        engine = Engine(runtime, KEY, incarnation)
        keys = KeyFile(key_file)
        door = Door(listen(endpoint), keys, engine, limits)
        serving = asyncio.create_task(door.serve())
        await asyncio.sleep(0)  # it serves: only so it closes its sockets when it is cancelled
        try:
            yield DoorService(door, endpoint, key_file, keys, clients)
            assert not serving.done()
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        assert list(runtime.glob("tcp*")) == []
    await asyncio.sleep(0.1)
    assert psutil.Process().num_fds() <= before + 8
