"""The coordinator's clients: who is connected, what waits to be sent to them, who has gone.

Lives in the event loop. A client is known from its Hello until it is silent for too long; each has its
own queue and its own task, so one that does not read delays nobody else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import zmq
import zmq.asyncio

from protocol.codec import decode, encode
from protocol.errors import MalformedMessage
from protocol.messages import VERSION, Error, Heartbeat, Hello, PolicyChanged, Scores, Welcome
from protocol.sockets import bind_router

log = logging.getLogger(__name__)

HEARTBEAT = 0.5  # seconds
SILENCE_LIMIT = 10.0  # seconds after which a client that says nothing, or takes nothing, is taken for gone
RETRY = 0.005  # seconds until a full socket is tried again
SEND_HWM = 64  # messages in a client's socket; what does not fit waits in its queue, where it is counted
CONGESTED_BYTES = 64 << 20  # queued for one client, from where on its requests pause
SMALL = 4096  # bytes that a small message counts as: 16384 of them are a congestion
QUEUE_LIMIT = 32768  # messages queued for one client that goes on asking and does not read


@dataclass
class Client:
    """One connected client."""

    queue: asyncio.Queue[object] = field(default_factory=asyncio.Queue)
    queued_bytes: int = 0
    heard: float = field(default_factory=time.monotonic)
    stuck: float | None = None  # since when its socket has been full
    sender: asyncio.Task[None] | None = None


class Clients:
    """A ROUTER and what hangs on it. `on_message(client, message)` is called for each message of a known
    client but heartbeats; `on_gone(client)` when one has left."""

    def __init__(
        self,
        endpoint: str,
        welcome: Callable[[], Welcome],
        on_message: Callable[[bytes, object], None],
        on_gone: Callable[[bytes], None],
    ) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = bind_router(self._context, endpoint, send_hwm=SEND_HWM)
        self._welcome = welcome
        self._on_message = on_message
        self._on_gone = on_gone
        self._clients: dict[bytes, Client] = {}
        self._group: asyncio.TaskGroup | None = None
        self.malformed = 0
        self.cut_offs = 0  # clients that did not read, or sent too much

    async def serve(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            self._group.create_task(self._beat())
            while True:
                sender, *frames = await self._socket.recv_multipart()
                self._receive(sender, frames)
                # Receiving what is already there does not suspend: without this, one client's flood would
                # keep every other task from running, the heartbeats too.
                await asyncio.sleep(0)

    def send(self, client: bytes, message: object) -> None:
        """Queue a message; one for a client that has gone is dropped."""
        known = self._clients.get(client)
        if known is None:
            return
        known.queued_bytes += _size(message)
        known.queue.put_nowait(message)
        if known.queue.qsize() > QUEUE_LIMIT:
            self.cut_off(client, f"{QUEUE_LIMIT} messages wait for it")

    def broadcast(self, message: object, but: bytes) -> None:
        """Send to every client but one."""
        for client in list(self._clients):  # one that does not read may be cut off by this very message
            if client != but:
                self.send(client, message)

    def congested(self, client: bytes) -> bool:
        """Whether too much waits for this client. May be called from any thread."""
        known = self._clients.get(client)
        return known is not None and known.queued_bytes > CONGESTED_BYTES

    async def flush(self, limit: float) -> None:
        """Wait until everything queued was handed to the socket, at most `limit` seconds."""
        waits = [asyncio.create_task(c.queue.join()) for c in self._clients.values()]
        if waits:
            _, late = await asyncio.wait(waits, timeout=limit)
            for task in late:
                task.cancel()

    def close(self) -> None:
        """Deliver what is under way (for the socket's linger time) and close."""
        self._socket.close()
        self._context.term()

    def __len__(self) -> int:
        return len(self._clients)

    def _receive(self, sender: bytes, frames: list[bytes]) -> None:
        client = self._clients.get(sender)
        try:
            message: Any = decode(frames)
        except MalformedMessage as e:
            self.malformed += 1
            self._answer(sender, Error(-1, f"malformed message: {e}"))
            return
        if isinstance(message, Hello):
            self._greet(sender, message)
        elif client is None:
            self._answer(sender, Error(-1, "say Hello first"))
        else:
            client.heard = time.monotonic()
            if not isinstance(message, Heartbeat):
                self._on_message(sender, message)

    def _greet(self, sender: bytes, hello: Hello) -> None:
        if hello.version != VERSION:
            self._answer(sender, Error(-1, f"this engine speaks version {VERSION}, not {hello.version}"))
            return
        assert self._group is not None
        if sender not in self._clients:
            client = self._clients[sender] = Client()
            client.sender = self._group.create_task(self._pump(sender, client))
        self.send(sender, self._welcome())

    def _answer(self, sender: bytes, message: object) -> None:
        """Answer somebody who is no client; where that cannot be sent at once, they do without."""
        try:
            self._try_send(sender, message)
        except zmq.ZMQError as e:
            log.debug("an answer could not be sent: %s", e)

    def _try_send(self, client: bytes, message: object) -> None:
        # Not waiting, this has happened when it returns, and the future only carries how it went.
        sent = self._socket.send_multipart([client, *encode(message)], flags=zmq.NOBLOCK)
        cast("asyncio.Future[None]", sent).result()

    async def _pump(self, name: bytes, client: Client) -> None:
        """Send one client's queue, trying again while its socket is full."""
        while True:
            message = await client.queue.get()
            while True:
                try:
                    self._try_send(name, message)
                except zmq.Again:
                    client.stuck = client.stuck or time.monotonic()
                    await asyncio.sleep(RETRY)
                    continue
                except zmq.ZMQError:
                    self._forget(name)  # unroutable: it has disconnected
                    return
                client.stuck = None
                break
            client.queued_bytes -= _size(message)
            client.queue.task_done()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT)
            now = time.monotonic()
            for name, client in list(self._clients.items()):
                if now - client.heard > SILENCE_LIMIT:
                    self._forget(name)
                elif client.stuck is not None and now - client.stuck > SILENCE_LIMIT:
                    self.cut_off(name, f"it took nothing for {SILENCE_LIMIT:.0f} s")
                elif client.queue.empty():
                    self.send(name, Heartbeat(now))

    def cut_off(self, name: bytes, why: str) -> None:
        """End the connection of a client that harms the engine."""
        log.warning("a client was cut off: %s", why)
        self.cut_offs += 1
        self._forget(name)

    def _forget(self, name: bytes) -> None:
        client = self._clients.pop(name, None)
        if client is not None:
            self._on_gone(name)
            if client.sender is not None and client.sender is not asyncio.current_task():
                client.sender.cancel()


def _size(message: object) -> int:
    """Bytes that count against congestion."""
    return SMALL + (message.logprobs.nbytes if isinstance(message, Scores) else 0)


def for_others(changed: PolicyChanged) -> PolicyChanged:
    """The announcement as it goes to clients that did not ask for the change."""
    return PolicyChanged(-1, changed.policy, changed.exact, changed.notes)
