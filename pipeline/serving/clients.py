"""The coordinator's client connections: handshake, message dispatch, outgoing queues, disconnects.

Runs in the event loop. A client is connected from its Hello until it is silent for too long. Each has its own
outgoing queue and task, so a client that does not read delays no other. Every message is answered, or counted
and dropped: no message ends `serve`.

A client can harm others only within limits. A client that sends too many refused messages in a second, or
does not read, is cut off: its requests end, and its messages are dropped for a while. Of a remote client that
holds for all connections of its key, later ones included, unless it only did not read: each is answered with
one Error, at which the door closes it. A local client is cut off by its connection, because all
local clients are the same user's. Connections without a Welcome share a few answers a second, and leave no
state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import zmq

from pipeline.accounts import LOCAL, account_of, client_name, routing_id_of
from pipeline.rate_limit import RateLimiter, SparseLog
from pipeline.serving.account_limits import REFUSED_LIMIT, AccountLimits
from pipeline.serving.client_sockets import ClientSocket
from pipeline.serving.introductions import Introductions
from pipeline.serving.listener import Listener
from pipeline.serving.outbox import Outbox, frames_of
from pipeline.serving.request_limits import RequestRefused
from pipeline.serving.rights import sees_all
from protocol.codec import decode
from protocol.connection import HEARTBEAT_SECONDS
from protocol.errors import MalformedMessage
from protocol.keys import RIGHTS
from protocol.messages import SAY_HELLO, VERSION, Error, Heartbeat, Hello, RemoteGone, Welcome

log = logging.getLogger(__name__)

SILENCE_LIMIT = 10.0  # seconds without a message, or without reading one, that disconnect a client
CONGESTED_BYTES = 64 << 20  # queued for one client, beyond which its requests pause
QUEUE_LIMIT = 32768  # messages queued for one client, which sends requests and does not read
QUEUED_BYTES = 1 << 30  # for all clients together; beyond, the client with the longest queue is cut off
LARGEST_HELLO = 8192  # bytes of a message that is decoded before the Hello
COSTLY = 200_000  # bytes of a refused message that count as another
COSTLY_FRAMES = 500  # frames of it beyond the limit that do


class Client:
    """One client: a local one from its Hello, a remote one from its introduction."""

    def __init__(self, outbox: Outbox, right: str, refusals: RateLimiter) -> None:
        self.outbox = outbox
        self.right = right  # use | tune | admin
        self.refusals = refusals
        self.last_message = time.monotonic()
        self.sender: asyncio.Task[None] | None = None  # from its Welcome on


class Clients:
    """All clients, local and remote. `on_message(client, message)` is called for each message of a connected
    client but heartbeats; `on_gone(client)` when a client has disconnected. A client's name begins with its
    account (see pipeline/accounts.py)."""

    def __init__(
        self,
        endpoint: str,
        welcome: Callable[[], Welcome],
        on_message: Callable[[bytes, object], None],
        on_gone: Callable[[bytes], None],
        *,
        remote: str | None = None,
        key: bytes = b"",
    ) -> None:
        """`remote`: the endpoint for the connections of the door, which proves them with the engine's `key`.
        Raises ProtocolError where an endpoint cannot be bound."""
        self._local = ClientSocket(endpoint)
        self._remote: ClientSocket | None = None
        if remote is not None:
            try:
                self._remote = ClientSocket(remote, silent=True)
            except BaseException:
                self.close()
                raise
        self._introductions = Introductions(key)
        self._introduced: dict[bytes, bytes] = {}  # by the connection's identity: the remote client's name
        self._welcome = welcome
        self._on_message = on_message
        self._on_gone = on_gone
        self._clients: dict[bytes, Client] = {}
        self._limits = AccountLimits()
        self._read: Callable[[list[bytes]], object] = decode
        self._shown: Callable[[object], object] = lambda message: message
        self._group: asyncio.TaskGroup | None = None
        self._log = SparseLog(log)
        self.malformed = 0
        self.cut_offs = 0  # clients that did not read, or sent too much
        self.unheard = 0  # dropped messages of clients that were cut off

    async def serve(
        self,
        read: Callable[[list[bytes]], object] = decode,
        shown: Callable[[object], object] = lambda message: message,
    ) -> None:
        """Serve all clients, until cancelled. `read` decodes a client's message; it raises MalformedMessage,
        and RequestRefused for one that has its answer at once. `shown`: of a message what clients may see
        that do not see all."""
        self._read, self._shown = read, shown
        async with asyncio.TaskGroup() as self._group:
            self._group.create_task(self._send_heartbeats())
            self._group.create_task(Listener(self._local, self._from_local, self.charge).serve())
            if self._remote is not None:
                self._group.create_task(Listener(self._remote, self._from_remote, self.charge).serve())

    def send(self, client: bytes, message: object) -> None:
        """Queue a message; it is dropped where the client has disconnected."""
        known = self._clients.get(client)
        if known is None or known.sender is None:
            return
        known.outbox.put(message if sees_all(known.right) else self._shown(message))
        if len(known.outbox) > QUEUE_LIMIT:
            self._cut_off_alone(client, f"{QUEUE_LIMIT} messages wait for it")

    def broadcast(self, message: object, but: bytes) -> None:
        """Send to every client but one."""
        for client in list(self._clients):  # a copy: `send` may cut off a client that does not read
            if client != but:
                self.send(client, message)

    def congested(self, client: bytes) -> bool:
        """Whether more than CONGESTED_BYTES are queued for this client. Any thread may call it."""
        known = self._clients.get(client)
        return known is not None and known.outbox.queued_bytes > CONGESTED_BYTES

    async def flush(self, limit: float) -> None:
        """Wait until all queues are handed to the sockets, at most `limit` seconds."""
        waits = [asyncio.create_task(c.outbox.empty()) for c in self._clients.values()]
        if waits:
            _, late = await asyncio.wait(waits, timeout=limit)
            for task in late:
                task.cancel()

    def close(self) -> None:
        """Close, after up to the sockets' linger time for messages under way."""
        self._local.close()
        if self._remote is not None:
            self._remote.close()

    def cut_off(self, name: bytes, reason: str) -> None:
        """Disconnect a client that harms the engine, and drop its messages for a while; of a remote one, all
        clients of its account."""
        self._end(self._limits.cut_off(name), reason)

    def _cut_off_alone(self, name: bytes, reason: str) -> None:
        """For not reading: that frees the memory, and is no fault of its account's other clients."""
        if account_of(name) == LOCAL:
            self.cut_off(name, reason)
        else:
            self._end({name}, reason)

    def _end(self, clients: set[bytes], reason: str) -> None:
        self._log.warning(f"a client was cut off: {reason}")
        self.cut_offs += 1
        for client in clients:
            self._answer(client, Error(-1, f"cut off: {reason}"))
            self._forget(client)

    def counts(self) -> dict[str, int]:
        """The counters of clients, for the engine's stats."""
        return {
            "connected": len(self._clients),
            "malformed": self.malformed,
            "cut_off": self.cut_offs,
            "unheard": self.unheard,
        }

    def charge(self, client: bytes, seconds: float) -> None:
        """Count time that handling a client's messages took, beside receiving them: a client whose messages
        take too much of it is cut off. Any thread may call it."""
        self._limits.charge(client, seconds)

    def right_of(self, client: bytes) -> str:
        """What a client may do; of one that has disconnected, the least."""
        known = self._clients.get(client)
        return RIGHTS[0] if known is None else known.right

    def _from_local(self, routing_id: bytes, frames: list[bytes], dropped: int) -> bytes:
        """Handle a message, of which `dropped` frames are missing. Returns the client's name."""
        name = client_name(LOCAL, routing_id)
        self._receive_safely(name, frames, dropped)
        return name

    def _from_remote(self, identity: bytes, frames: list[bytes], dropped: int) -> bytes:
        """Handle a message, as `_from_local`. Returns the client's name; "" without one."""
        name = self._introduced.get(identity, b"")
        if name:
            self._receive_safely(name, frames, dropped)
        elif self._introductions.proven(identity):
            self._introduce(identity, frames)
        else:
            self.malformed += 1
        return name

    def _introduce(self, identity: bytes, frames: list[bytes]) -> None:
        """The door states whose connection this is; or it forwards a message of a client that was dropped."""
        assert self._remote is not None
        try:
            message = self._introductions.read(identity, frames)
        except MalformedMessage as e:
            log.debug("not an introduction: %s", e)
            self.unheard += 1
            if self._remote.refusals.spend():
                self._answer(client_name(b"?", identity), Error(-1, SAY_HELLO))
            return
        account = message.account.encode()
        name = client_name(account, identity)
        if self._limits.is_cut_off(account):
            self._answer(name, Error(-1, "cut off: this key has harmed the engine; try again later"))
        elif refusal := self._limits.no_place(account):
            self._answer(name, Error(-1, refusal))
        else:
            log.debug("a remote client at %s, right %s", message.address, message.right)
            self._introduced[identity] = name
            self._add(name, message.right)

    def _receive_safely(self, sender: bytes, frames: list[bytes], dropped: int) -> None:
        try:
            self._receive(sender, frames, dropped)
        except Exception as e:
            # A bug of the engine, triggered by one client, must not affect the others.
            self._log.warning(f"a client's message could not be handled: {e!r}", failed=True)
            self.cut_off(sender, "the engine failed on its message")

    def _receive(self, sender: bytes, frames: list[bytes], dropped: int) -> None:
        if self._limits.is_cut_off(sender):
            self.unheard += 1
            return
        if self._limits.too_costly(sender):
            self.cut_off(sender, "its messages take too much of the engine's time")
            return
        client = self._clients.get(sender)
        greeted = client is not None and client.sender is not None
        size = sum(map(len, frames))
        if not greeted and size > LARGEST_HELLO:
            self.malformed += 1
            self.refuse(sender, SAY_HELLO)
            return
        try:
            message: Any = self._read(frames)
        except RequestRefused as e:
            self.send(sender, e.answer)
            return
        except MalformedMessage as e:
            self.malformed += 1
            self.refuse(sender, f"malformed message: {e}", cost=1 + size // COSTLY + dropped // COSTLY_FRAMES)
            return
        if isinstance(message, Hello):
            self._greet(sender, message)
        elif isinstance(message, RemoteGone) and account_of(sender) != LOCAL:
            self._answer(sender, Error(-1, "disconnected"))
            self._forget(sender)
        elif client is None or not greeted:
            self.refuse(sender, SAY_HELLO)
        else:
            client.last_message = time.monotonic()
            if not isinstance(message, Heartbeat):
                self._on_message(sender, message)

    def _greet(self, sender: bytes, hello: Hello) -> None:
        client = self._clients.get(sender)
        if hello.version != VERSION:
            self.refuse(sender, f"this engine speaks version {VERSION}, not {hello.version}")
        elif client is not None and client.sender is not None:
            if client.refusals.spend():
                self.send(sender, self._welcome())
            else:
                self.cut_off(sender, "it repeats its Hello")
        elif client is None and (refusal := self._limits.no_place(LOCAL)):
            self.refuse(sender, refusal)
        else:
            client = client or self._add(sender, RIGHTS[-1])
            assert self._group is not None
            client.sender = self._group.create_task(self._pump(sender, client))
            client.last_message = time.monotonic()
            self.send(sender, self._welcome())

    def _add(self, name: bytes, right: str) -> Client:
        socket, routing_id = self._socket_of(name), routing_id_of(name)
        outbox = Outbox(lambda frames: socket.send(routing_id, frames))
        client = Client(outbox, right, self._limits.add(name))
        self._clients[name] = client
        return client

    def _socket_of(self, name: bytes) -> ClientSocket:
        if account_of(name) == LOCAL:
            return self._local
        assert self._remote is not None
        return self._remote

    def refuse(self, sender: bytes, reason: str, cost: int = 1) -> None:
        """Refuse a message with an Error, within the sender's limit of refusals. `cost`: the number of small
        messages that take as long to refuse."""
        client = self._clients.get(sender)
        if client is None:
            if self._socket_of(sender).refusals.spend():
                self._answer(sender, Error(-1, reason))
        elif client.refusals.spend(cost):
            self._answer(sender, Error(-1, reason))
        else:
            self.cut_off(sender, f"more than {REFUSED_LIMIT} messages in a second had to be refused")

    def _answer(self, sender: bytes, message: object) -> None:
        """Send at once, past the queue; where the socket is full the answer is dropped."""
        try:
            self._socket_of(sender).send(routing_id_of(sender), frames_of(message))
        except zmq.ZMQError as e:
            log.debug("an answer could not be sent: %s", e)

    async def _pump(self, name: bytes, client: Client) -> None:
        await client.outbox.pump()
        self._forget(name)

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            now = time.monotonic()
            for name, client in list(self._clients.items()):
                if now - client.last_message > SILENCE_LIMIT:
                    if account_of(name) != LOCAL:  # the door closes its connection
                        self._answer(name, Error(-1, SAY_HELLO))
                    self._forget(name)
                elif client.outbox.full_since is not None and now - client.outbox.full_since > SILENCE_LIMIT:
                    self._cut_off_alone(name, f"it read no message for {SILENCE_LIMIT:.0f} s")
                elif client.sender is not None and not client.outbox:
                    self.send(name, Heartbeat(now))
            self._limit_queues()

    def _limit_queues(self) -> None:
        while sum(client.outbox.queued_bytes for client in self._clients.values()) > QUEUED_BYTES:
            longest = max(self._clients, key=lambda name: self._clients[name].outbox.queued_bytes)
            self._cut_off_alone(longest, "too many unread messages are queued for it")

    def _forget(self, name: bytes) -> None:
        client = self._clients.pop(name, None)
        if client is not None:
            self._limits.remove(name)
            if account_of(name) != LOCAL:
                del self._introduced[routing_id_of(name)]
            self._on_gone(name)
            if client.sender is not None and client.sender is not asyncio.current_task():
                client.sender.cancel()
