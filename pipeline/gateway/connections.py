"""The gateway's connections: uvicorn's protocol with limits on what a client costs before it is known who it
is, and room for new connections. Knows nothing about what requests ask for.

A connection is idle (no request), slow (it waits for its client: for a body's rest, or until the client has
read more) or busy (it is being answered). Where there is no room, the longest idle one gives way to a new
one, else the longest slow one; busy ones never do.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from functools import partial
from ipaddress import IPv6Address, ip_address
from typing import Any, Literal

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pipeline.gateway.call import dumps
from pipeline.gateway.errors import ApiError

HEAD_SECONDS = 15.0  # from a connection, or the end of an answer, to the next request's complete head
STALL_SECONDS = 30.0  # in which a client takes something of an answer that waits for it
KEEP_SECONDS = 75  # that an idle connection is kept
MOST_HEAD = 64 << 10  # bytes of a head, and of all that a client sends ahead of its turn
LARGE_HEAD = f"the request's head has more than {MOST_HEAD >> 10} kB"
MOST_FIELDS = 256  # of a head and of what follows a body: each becomes objects of a hundred bytes
MOST_WAITING = 1  # requests behind the one that is answered: no client that we know sends any
MOST_CONNECTIONS = 2048
MOST_OF_ADDRESS = 1536  # most clients are on this machine, or behind one proxy

# Places in Linux's struct tcp_info, of which as many bytes are asked for
TCP_BYTES = 160
TCP_UNACKNOWLEDGED = 24  # tcpi_unacked, segments
TCP_ACKNOWLEDGED = 120  # tcpi_bytes_acked, in all
TCP_NOT_SENT = 144  # tcpi_notsent_bytes

State = Literal["idle", "slow", "busy"]


class _Neighbours:
    """The connections of one address, and those that can give way, the longest waiting first."""

    def __init__(self) -> None:
        self.all: set[LimitedProtocol] = set()
        self.waiting: dict[State, dict[LimitedProtocol, None]] = {"idle": {}, "slow": {}}

    def set(self, connection: LimitedProtocol, state: State) -> None:
        for name, waiting in self.waiting.items():
            if name == state:
                waiting.setdefault(connection)
            else:
                waiting.pop(connection, None)

    def oldest(self, state: State) -> LimitedProtocol | None:
        return next(iter(self.waiting[state]), None)


class Connections:
    """All connections of a server. Used by the event loop."""

    def __init__(self, most: int = MOST_CONNECTIONS, most_of_address: int = MOST_OF_ADDRESS) -> None:
        self._most, self._most_of_address = most, most_of_address
        self._addresses: dict[str, _Neighbours] = {}
        self._count = 0

    def admit(self, connection: LimitedProtocol) -> bool:
        """Add an idle connection. Returns False where there is no room, and none could be made."""
        address = connection.address
        own = self._addresses.get(address)
        if own is not None and len(own.all) >= self._most_of_address:
            if not self._make_room([own]):
                return False
        elif self._count >= self._most:
            crowded = sorted(self._addresses.values(), key=lambda some: len(some.all), reverse=True)
            if not self._make_room(crowded):
                return False
        self._count += 1
        own = self._addresses.setdefault(address, _Neighbours())
        own.all.add(connection)
        own.set(connection, "idle")
        return True

    def set(self, connection: LimitedProtocol, state: State) -> None:
        """Note what a connection does now."""
        own = self._addresses.get(connection.address)
        if own is not None and connection in own.all:
            own.set(connection, state)

    def remove(self, connection: LimitedProtocol) -> None:
        """Forget a connection that has ended, or is to end."""
        own = self._addresses.get(connection.address)
        if own is not None and connection in own.all:
            self._count -= 1
            own.set(connection, "busy")
            own.all.remove(connection)
            if not own.all:
                del self._addresses[connection.address]

    def _make_room(self, among: list[_Neighbours]) -> bool:
        for state in ("idle", "slow"):
            for neighbours in among:
                if (oldest := neighbours.oldest(state)) is not None:
                    self.remove(oldest)
                    oldest.give_way()
                    return True
        return False


class LimitedProtocol(HttpToolsProtocol):
    """A connection. A request may wait behind the one that is answered; a client that sends more is cut off.
    So reading never pauses for it, and the end of the connection is always seen."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._all = connections
        self.address = ""
        self._gone = self.loop.create_future()  # done once the client is, or has no answer to expect
        self._unanswered: deque[RequestResponseCycle] = deque()  # the first one is being answered
        self._head = 0  # bytes that have come of a head without an end, or of what is ahead of its turn
        self._fields = self._named = 0  # of the head, and behind the body; bytes of their names and values
        self._in_body = False
        self._refusal = ""  # of what the parser was made to stop at
        self._acknowledged = -1  # bytes, when last looked at; -1: nothing waited for the client
        self._head_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.address = _network("" if self.client is None else self.client[0])
        if self._all.admit(self):
            self._watch_head()
            self._watch_reader()
        else:
            transport.abort()

    def give_way(self) -> None:
        """End the connection, since another one needs its place."""
        if self._unanswered or self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _watch_head(self) -> None:
        self._unwatch_head()
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _unwatch_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _watch_reader(self) -> None:
        """Look again later whether the client has taken anything, and end the connection where it has not.
        That the kernel takes bytes says little: it takes megabytes that nobody reads, and then none for
        minutes while a slow client does read."""
        connection = self.transport.get_extra_info("socket")
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_BYTES)
        (acknowledged,) = struct.unpack_from("<Q", info, TCP_ACKNOWLEDGED)
        left = [struct.unpack_from("<I", info, place) != (0,) for place in (TCP_UNACKNOWLEDGED, TCP_NOT_SENT)]
        waits = any(left) or self.transport.get_write_buffer_size() > 0
        if waits and acknowledged == self._acknowledged:
            self.transport.abort()
            return
        self._acknowledged = acknowledged if waits else -1
        self._reader_timer = self.loop.call_later(STALL_SECONDS, self._watch_reader)

    def _note_state(self) -> None:
        if not self._unanswered:
            state: State = "idle"
        elif self.flow.write_paused or (self._in_body and len(self._unanswered) == 1):
            state = "slow"
        else:
            state = "busy"
        self._all.set(self, state)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        # Of a request that is refused already, the rest of the body is read and dropped, since most clients
        # read no answer before they have sent all; what takes longer than a head may is cut off.
        begins = self._head_timer is None if self._in_body else self._head == 0
        if begins and not self._unanswered:
            self._watch_head()
        self._head += len(data)
        super().data_received(data)
        if self._head > MOST_HEAD and not self.transport.is_closing():
            self.send_400_response(LARGE_HEAD)

    def _count_head(self, size: int) -> None:
        """Count a part of a head, which may have come whole, and with other bytes behind it."""
        self._named += size
        if self._named > MOST_HEAD:
            self._refuse(LARGE_HEAD)

    def on_message_begin(self) -> None:
        self._fields = self._named = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        self._count_head(len(name) + len(value))
        if self._fields > MOST_FIELDS:
            self._refuse(f"the request's head has more than {MOST_FIELDS} fields")
        if not self._in_body:  # what follows a body is no field of the head, and least of all a key
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self._unanswered) > MOST_WAITING:
            self._refuse("too many requests before an answer")
        self._in_body = True
        self._unwatch_head()
        self.scope["state"]["gone"] = self._gone
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        self.flow.resume_reading()
        self._note_progress()

    def on_body(self, body: bytes) -> None:
        if len(self._unanswered) <= 1:
            self._head = 0
        elif self._head > MOST_HEAD:
            self._refuse("too much before an answer")
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._unwatch_head()
        super().on_message_complete()
        self._note_progress()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        self._head = 0
        super().on_response_complete()
        self._note_state()

    def _note_progress(self) -> None:
        """Bytes have come that a request is served with, unless it is not its turn."""
        if len(self._unanswered) <= 1:
            self._head = 0
        self._note_state()

    def _refuse(self, text: str) -> None:
        """Stop the parser: what it raises then is answered with this text."""
        self._refusal = text
        raise ValueError(text)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP; uvicorn's answer is plain text. Behind an answer that has begun there is no
        place for another."""
        begun = len(self._unanswered) > 1 or any(cycle.response_started for cycle in self._unanswered)
        self._tell_gone()
        if begun:
            self.transport.abort()
            return
        body = dumps(ApiError(400, self._refusal or msg).body())
        head = (
            f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        )
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._note_state()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._note_state()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.remove(self)
        self._unwatch_head()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
        self._tell_gone()
        super().connection_lost(exc)

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing of a request to speak another protocol, which is answered in HTTP: uvicorn's advice is
        to install packages for WebSockets."""

    def _tell_gone(self) -> None:
        """Uvicorn tells only the request that came last."""
        if not self._gone.done():
            self._gone.set_result(None)
        self.pipeline.clear()
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()


def _network(host: str) -> str:
    """Returns an address, of IPv6 the network of 2^64 that each host has for itself."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return f"{int(address) >> 64:x}::"
    return host


def make_server(app: Any, connections: Connections) -> uvicorn.Server:
    """Returns uvicorn's server of an ASGI application."""
    protocol: Any = partial(LimitedProtocol, connections)
    config = uvicorn.Config(
        app,
        http=protocol,
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
