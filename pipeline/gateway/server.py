"""uvicorn with limits of its own: on connections, on the time and size of a request's head."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pipeline.gateway.asgi import App, dumps
from pipeline.gateway.errors import ApiError
from protocol.errors import ProtocolError

HEAD_SECONDS = 15.0  # from a connection, or the end of an answer, to the next request's complete head
MOST_HEAD = 64 << 10  # bytes
MOST_CONNECTIONS = 2048
BACKLOG = 512
KEEP_SECONDS = 75  # that an idle connection is kept


class LimitedProtocol(HttpToolsProtocol):
    """One connection."""

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
        """The answer to what is no HTTP; uvicorn's is plain text."""
        body = dumps(ApiError(400, msg).body())
        head = (
            f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        )
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)


def bind(address: str) -> socket.socket:
    """A socket that listens at HOST:PORT; port 0 is any free one. Raises ProtocolError."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(BACKLOG)
        bound.setblocking(False)
    except OSError as e:
        bound.close()
        raise ProtocolError(f"--http {address}: cannot be bound: {e.strerror}") from None
    return bound


def split_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, with [HOST] for IPv6."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def make_server(app: App) -> uvicorn.Server:
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
