"""ASGI's types, and answers as its messages: one JSON object or a stream of events. Both notice a client that
has gone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from contextlib import suppress
from typing import Any, TypeVar

from pipeline.gateway.errors import ApiError
from protocol.connection import end_task
from protocol.errors import ProtocolError

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
T = TypeVar("T")

HEADERS_WITHIN = 1.0  # seconds: until then a refusal is an HTTP error, later an event of the stream
PING_SECONDS = 10.0  # of silence after which a comment is sent, so that no proxy closes the connection
PING = b": waiting\n\n"


def header_of(scope: Scope, name: bytes) -> str:
    """The first header of this name, in small letters; "" without one."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return ""


def dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


async def send_bytes(
    send: Send, body: bytes, kind: str, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    lines = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


async def send_json(
    send: Send, value: Any, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    await send_bytes(send, dumps(value), "application/json", status, headers)


async def send_error(send: Send, error: ApiError, anthropic: bool = False) -> None:
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if error.status == 401:
        headers = ((b"www-authenticate", b"Bearer"),)
    elif error.status in (429, 503):
        headers = ((b"retry-after", b"1"),)
    await send_json(send, error.body(anthropic), error.status, headers)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. It is cancelled where the client disconnects before; raises ConnectionError."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ConnectionResetError
        return task.result()
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """Server-sent events, each given as its bytes. An error before the first one is an HTTP error."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        refusal: Callable[[ProtocolError], ApiError],
        anthropic: bool = False,
    ) -> None:
        """`refusal`: what a client sees of an error of the engine."""
        self._events = events
        self._refusal = refusal
        self._anthropic = anthropic
        self._started = False
        self._sent = 0  # events and pings

    async def send(self, receive: Receive, send: Send) -> None:
        """Until the last event, or until the client has gone, which ends the generator."""
        producer = asyncio.create_task(self._produce(send))
        gone = asyncio.create_task(_wait_gone(receive))
        try:
            await asyncio.wait((producer, gone), timeout=HEADERS_WITHIN, return_when=asyncio.FIRST_COMPLETED)
            while not producer.done() and not gone.done():
                sent = self._sent
                await self._start(send)
                await asyncio.wait(
                    (producer, gone), timeout=PING_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if self._sent == sent and not producer.done():
                    self._sent += 1
                    await send(_chunk(PING))
            if not producer.done():
                raise ConnectionResetError
        finally:
            gone.cancel()
            with suppress(asyncio.CancelledError):
                await end_task(producer)

    async def _start(self, send: Send) -> None:
        if not self._started:
            self._started = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
            ]
            headers.append((b"x-accel-buffering", b"no"))
            await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _produce(self, send: Send) -> None:
        error = None
        try:
            async for event in self._events:
                await self._start(send)
                self._sent += 1
                await send(_chunk(event))
        except ApiError as e:
            error = e
        except ProtocolError as e:
            error = self._refusal(e)
        except Exception:
            log.exception("an answer's stream failed")
            error = ApiError(500, "the gateway failed; its log has the reason")
        if error is not None and not self._started:
            self._started = True
            return await send_error(send, error, self._anthropic)
        await self._start(send)
        last = b""
        if error is not None:
            last = event_of(error.body(self._anthropic), "error" if self._anthropic else "")
        await send({"type": "http.response.body", "body": last})


def _chunk(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


def event_of(value: Any, kind: str = "") -> bytes:
    """Returns a server-sent event; `kind`: its name, in dialects whose events have one."""
    name = f"event: {kind}\n".encode() if kind else b""
    return name + b"data: " + dumps(value) + b"\n\n"
