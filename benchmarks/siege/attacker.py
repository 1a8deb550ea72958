"""The attacker of a siege: a process that opens connections, sends what `requests` has made, and counts what
becomes of it."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import uvloop

from benchmarks.siege.requests import ATTACKS, prepared

AT_ONCE, HELD, COMPUTED = 64, 2500, 2  # connections in use, and held open; requests of the engine
HOLD_SECONDS = 50.0  # at most
PATIENCE = 60.0  # seconds for an answer
SOURCES = 8  # addresses that the attacker comes from, 127.0.0.2 and on
IP_BIND_ADDRESS_NO_PORT = 24  # of Linux: the port is chosen as the connection is made
LEFT, CUT, REFUSED, SILENT = "left", "cut", "refused", "silent"  # what becomes of requests without an answer
Counts = Counter[tuple[str, str]]  # requests by kind, and by status or what else became of them


async def connect(
    port: int, source: str, *, small: bool = False
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Returns a connection. `small`: of one that reads nothing, for which few bytes are taken."""
    bound = socket.socket()
    try:
        bound.setblocking(False)
        if small:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        bound.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
        bound.bind((source, 0))
        await asyncio.get_running_loop().sock_connect(bound, ("127.0.0.1", port))
        return await asyncio.open_connection(sock=bound, limit=1 if small else 1 << 20)
    except BaseException:
        bound.close()
        raise


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Returns status and body of the next answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    if (status := int(head[9:12])) < 200:
        return await read_answer(reader)
    if length := re.search(rb"content-length: (\d+)", head):
        return status, await reader.readexactly(int(length[1]))
    return status, await reader.readuntil(b"0\r\n\r\n")


@dataclass
class Attacker:
    """Sends `most` requests within `seconds`, or fewer where the gateway does not keep up."""

    port: int
    most: int
    seconds: float
    random: Random
    variants: dict[str, list[list[bytes]]]
    counts: Counts = field(default_factory=Counter)
    sent: int = 0
    held: int = 0
    computed: int = 0

    async def run(self) -> None:
        """Attack, and end all connections."""
        self._began = time.monotonic()
        self._holding: set[asyncio.Task[None]] = set()
        await asyncio.gather(*(self._go_on() for _ in range(AT_ONCE)))
        for task in self._holding:
            task.cancel()
        await asyncio.gather(*self._holding, return_exceptions=True)

    async def _go_on(self) -> None:
        kinds = list(ATTACKS)
        weights = [attack.share / attack.requests for attack in ATTACKS.values()]
        while self.sent < self.most and (gone := time.monotonic() - self._began) < self.seconds:
            if self.sent > self.most * gone / self.seconds:
                await asyncio.sleep(0.005)
                continue
            kind = self.random.choices(kinds, weights)[0]
            attack = ATTACKS[kind]
            if (attack.computed and self.computed >= COMPUTED) or (
                attack.end == "hold" and self.held >= HELD
            ):
                continue
            self.sent += attack.requests
            self.computed += attack.computed
            self.held += attack.end == "hold"
            task = asyncio.create_task(self._strike(kind))
            if attack.end == "hold":
                self._holding.add(task)
                task.add_done_callback(self._holding.discard)
            else:
                await task

    async def _strike(self, kind: str) -> None:
        """Send what one connection sends, and count what becomes of its requests."""
        attack, rest = ATTACKS[kind], CUT
        left = 0 if attack.turns else attack.requests  # sent, and without an answer
        try:
            reader, writer = await connect(
                self.port, f"127.0.0.{2 + self.random.randrange(SOURCES)}", small=attack.end == "hold"
            )
        except OSError:
            rest = REFUSED
        else:
            try:
                async with asyncio.timeout(PATIENCE):
                    for data in self.random.choice(self.variants[kind]):
                        writer.write(data)
                        if attack.turns:
                            left += 1
                            status, _ = await read_answer(reader)
                            self.counts[kind, str(status)] += 1
                            left -= 1
                    if attack.end == "hold":
                        await asyncio.sleep(HOLD_SECONDS * self.random.random())
                    rest = CUT if attack.end == "read" else LEFT
                    while left and attack.end == "read":
                        status, _ = await read_answer(reader)
                        self.counts[kind, str(status)] += 1
                        left -= 1
            except TimeoutError:
                rest = SILENT
            except asyncio.CancelledError:  # the siege is over
                rest = LEFT
            except (OSError, EOFError, asyncio.LimitOverrunError):
                rest = CUT
            finally:
                writer.transport.abort()
        self.counts[kind, rest] += left
        self.computed -= attack.computed
        self.held -= attack.end == "hold"


_prepared: dict[str, list[list[bytes]]] = {}


def prepare(seed: int, keys: list[str]) -> None:
    """Make this process the attacker's."""
    os.setsid()  # where Linux divides cores by sessions first, it has a share of its own
    os.setpriority(os.PRIO_PROCESS, 0, 10)
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    _prepared.update(prepared(seed, keys))


def attack(port: int, most: int, seconds: float, seed: int) -> tuple[Counts, float]:
    """Run one turn of the siege in this process. Returns what became of its requests, and the seconds of a
    core that it took."""
    began = time.process_time()
    attacker = Attacker(port, most, seconds, Random(seed), _prepared)
    uvloop.run(attacker.run())
    return attacker.counts, time.process_time() - began
