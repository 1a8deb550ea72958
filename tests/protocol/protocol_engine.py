"""The engine's end of client.sock: a real ROUTER with the real codec and invented answers. Also a process:
`python protocol_engine.py ENDPOINT` serves until killed."""

import asyncio
import os
import subprocess
import sys
import time
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import zmq
import zmq.asyncio

from protocol.client import Client
from protocol.codec import decode, encode
from protocol.messages import (
    VERSION,
    Calibrate,
    Calibrated,
    Calibrating,
    Cancel,
    Done,
    Error,
    Generate,
    Heartbeat,
    Hello,
    PolicyChanged,
    Queued,
    Score,
    Scores,
    SetPolicy,
    Stats,
    StatsReply,
    Token,
    Welcome,
)
from protocol.sockets import bind_router

QUIET = 0.5  # seconds of silence after which most clients of these tests give an engine up
BLOCK = (64, 4096)  # rows and vocabulary of a block of Scores: 1 MiB
WELCOME = Welcome(VERSION, "e1", "tiny", "f" * 64, "cpu", "all-host", True, 4096, 512, True, True)


class Engine:
    def __init__(self, socket, welcome):
        self.socket = socket
        self.welcome = welcome
        self.mute = False  # sends nothing more, like a process that hangs
        self.clients = {}  # identity -> name
        self.received = []  # every message but heartbeats
        self.heartbeats = []  # (name, time)
        self.blocks_sent = 0
        self.rows = BLOCK[0]  # in a block of Scores
        self.shares = {}  # request -> tokens or blocks after which this engine sends no more of it
        self.jobs = {}

    def ever(self, kind):
        return [message for message in self.received if isinstance(message, kind)]

    async def send(self, peer, message):
        """Send as soon as this peer's own queue takes it, without blocking other senders."""
        while not await self.try_send(peer, message):  # noqa: ASYNC110 - ZeroMQ tells of no single peer
            await asyncio.sleep(0.005)

    async def try_send(self, peer, message):
        if self.mute:
            return True
        try:
            await self.socket.send_multipart([peer, *encode(message)], flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise
            self.clients.pop(peer, None)
        return True

    async def beat(self):
        while True:
            for peer in list(self.clients):
                await self.try_send(peer, Heartbeat())
            await asyncio.sleep(QUIET / 10)

    async def serve(self, group):
        while True:
            peer, *frames = await self.socket.recv_multipart()
            message = decode(frames)
            if isinstance(message, Heartbeat):
                self.heartbeats.append((self.clients.get(peer), time.monotonic()))
            else:
                self.received.append(message)
            match message:
                case Hello(client=name):
                    self.clients[peer] = name
                    await self.send(peer, self.welcome)
                case _ if peer not in self.clients:
                    await self.send(peer, Error(-1, "say Hello first"))
                case Generate() | Score() | Calibrate():
                    job = {Generate: self.generate, Score: self.score, Calibrate: self.calibrate}[
                        type(message)
                    ]
                    self.jobs[peer, message.request] = group.create_task(job(peer, message))
                case Cancel(request=request):
                    job = self.jobs.pop((peer, request))
                    if not job.done():
                        job.cancel()
                        await self.send(peer, Done(request, "cancelled"))
                case Stats(request=request):
                    await self.send(peer, StatsReply(request, {"received": len(self.received)}))
                case SetPolicy(request=request, policy="nonsense"):
                    await self.send(peer, Error(request, "no policy 'nonsense'; did you mean 'on-demand'?"))
                case SetPolicy(policy="deadly"):
                    pass  # there would be no engine left to answer
                case SetPolicy(request=request, policy=policy):
                    for other in self.clients:
                        await self.send(other, PolicyChanged(request if other == peer else -1, policy, True))

    async def generate(self, peer, ask):
        match ask.prompt:
            case "refuse":
                return await self.send(peer, Error(ask.request, "not now"))
            case "fail" | "fault":
                await self.send(peer, Token(ask.request, 0, 1, "a"))
                usage = ask.prompt == "fault"
                return await self.send(
                    peer, Done(ask.request, "error", "over the context limit", usage=usage)
                )
            case "queue":
                await self.send(peer, Queued(ask.request, 3))
                await self.send(peer, Queued(ask.request, 1))
            case "stray":
                await self.send(peer, Done(ask.request, "length"))
        for index in range(len(ask.resume), ask.max_tokens):
            if index - len(ask.resume) == self.shares.get(ask.request):
                return None
            await self.send(peer, Token(ask.request, index, 100 + index, f"t{index} "))
            if ask.prompt == "slow":
                await asyncio.sleep(0.02)
        if ask.request in self.shares and self.shares[ask.request] <= ask.max_tokens - len(ask.resume):
            return None
        return await self.send(peer, Done(ask.request, "length", text="end"))

    async def calibrate(self, peer, ask):
        if ask.text == "refuse":
            return await self.send(peer, Done(ask.request, "error", "too short a text", usage=True))
        for done in range(3):
            await self.send(peer, Calibrating(ask.request, "reading", done, 3))
        if ask.text == "slow":
            await asyncio.sleep(60)
        return await self.send(peer, Calibrated(ask.request, "/a/file", {"tokens": ask.tokens}))

    async def score(self, peer, ask):
        if ask.text == "refuse":
            return await self.send(peer, Error(ask.request, "not now"))
        for block in range(len(ask.token_ids or ())):
            if block == self.shares.get(ask.request):
                return None
            start = block * self.rows
            rows = np.arange(start, start + self.rows, dtype=np.int32)
            logprobs = np.full((self.rows, BLOCK[1]) if ask.full else (0, 0), -block, np.float32)
            none = np.empty((0, 0), np.int32), np.empty((0, 0), np.float32)
            await self.send(peer, Scores(ask.request, start, rows, rows.astype(np.float32), logprobs, *none))
            self.blocks_sent += 1
        reason = ask.text or "stop"
        error = "no such token" if reason == "error" else ""
        return await self.send(peer, Done(ask.request, reason, error, usage=reason == "error"))


@asynccontextmanager
async def engine(endpoint, welcome=WELCOME):
    with zmq.asyncio.Context() as context, bind_router(context, endpoint, send_hwm=8) as socket:
        it = Engine(socket, welcome)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(it.serve(group)), group.create_task(it.beat())]
            try:
                yield it
            finally:
                for task in [*tasks, *it.jobs.values()]:
                    task.cancel()


@asynccontextmanager
async def both(endpoint, **how):
    async with engine(endpoint) as server, Client.connect(endpoint, name="test", **how) as client:
        yield server, client


async def drain(answers):
    return [answer async for answer in answers]


@contextmanager
def engine_process(endpoint):
    """The same engine in a process of its own, which can be killed."""
    here = Path(__file__).parent
    process = subprocess.Popen(
        [sys.executable, str(here / "protocol_engine.py"), endpoint],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(here.parents[1])},
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


async def until(condition, seconds=30.0):  # a limit for a busy machine: no test measures it
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - conditions of many kinds
            await asyncio.sleep(0.01)


async def leaves_nothing(use):
    """Wait until a `use()` has left no descriptor and no task."""

    def files():
        return len(os.listdir("/proc/self/fd"))

    await use()  # what is opened once for a process
    await asyncio.sleep(0.1)
    tasks, before = asyncio.all_tasks(), files()
    await use()
    await until(lambda: asyncio.all_tasks() == tasks and files() == before)


async def main(endpoint):
    async with engine(endpoint):
        print("ready", flush=True)
        await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
