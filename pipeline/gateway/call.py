"""One request on its way through the gateway: its body, read within limits, and its answer, which is one JSON
object or a stream of server-sent events. A client that disconnects ends what is computed for it."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pipeline.fairness import held_bytes
from pipeline.gateway.access import Headers, Scope, header_of
from pipeline.gateway.bodies import Common, decoded, inflated
from pipeline.gateway.engine_links import EngineLinks, Health, model_name
from pipeline.gateway.errors import ApiError, of_engine
from pipeline.gateway.metrics import Meter
from pipeline.gateway.shares import BUSY, Bodies, Decoding, Places, Starts
from pipeline.gateway.shares import Body as HeldBody
from pipeline.text.chat_format import TemplateKind
from pipeline.text.detokenizer import Detokenizer
from protocol.client import Client
from protocol.errors import ProtocolError
from protocol.messages import Welcome

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Body = TypeVar("Body", bound=Common)
T = TypeVar("T")

MOST_BYTES = 32 << 20  # of a body, most of it pictures, which are left out: a message to the engine has 4 MB
BODY_SECONDS = 60.0  # for the whole body; a slow network sends 32 MB in less
PART_SECONDS = 15.0  # for the next part of it
HEADERS_WITHIN = 1.0  # seconds: until then a refusal is an HTTP error, later an event of the stream
PING_SECONDS = 10.0  # between signs of life in a stream, so that no proxy and no client closes the connection
WAIT_SECONDS = 300.0  # of an engine for a lost machine, after which an answer that is no stream is given up
PART_BYTES = 1 << 16  # of a large answer, sent at once
PLACE = secrets.token_hex(16)  # of Pieces in a text of JSON; no client can know it
PING = b": waiting\n\n"
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
ERROR_HEADERS: dict[int, Headers] = {
    401: ((b"www-authenticate", b"Bearer"),),
    **dict.fromkeys((429, 503), ((b"retry-after", b"1"),)),
}


class Pieces:
    """An array of JSON that is encoded as it grows: that takes a tenth of the memory of its values."""

    def __init__(self) -> None:
        self.text = bytearray(b"[")

    def add(self, value: Any) -> int:
        """Add a value; returns the number of its bytes."""
        piece = dumps(value)
        self.text += b"," * bool(self) + piece
        return len(piece) + 1

    def __bool__(self) -> bool:
        return len(self.text) > 1


def dumps(value: Any) -> bytes:
    """Returns JSON without spaces."""
    return b"".join(parts_of(value))


def parts_of(value: Any) -> list[bytes | memoryview]:
    """Returns JSON without spaces, in parts, of which those of Pieces are no copies."""
    found: list[memoryview] = []

    def placed(pieces: object) -> str:
        assert isinstance(pieces, Pieces)
        found.append(memoryview(pieces.text))
        return PLACE

    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=placed)
    first, *others = text.encode("utf-8", "replace").split(b'"' + PLACE.encode() + b'"')
    parts: list[bytes | memoryview] = [first]
    for pieces, other in zip(found, others, strict=True):
        for start in range(0, len(pieces), PART_BYTES):
            parts.append(pieces[start : start + PART_BYTES])
        parts.append(b"]" + other)
    return parts


def event_of(value: Any, kind: str = "") -> bytes:
    """Returns a server-sent event; `kind`: its name, in dialects whose events have one."""
    name = f"event: {kind}\n".encode() if kind else b""
    return name + b"data: " + dumps(value) + b"\n\n"


@dataclass
class Service:
    """State that all requests share."""

    links: EngineLinks
    decoder: Path  # of the model's tokenizer, where it has one: written by the text process
    template: TemplateKind = TemplateKind()  # noqa: RUF009 - frozen
    served: tuple[str, ...] = ()  # names of the model; without any it has its own, and every name is served
    started: float = field(default_factory=time.time)
    draining: bool = False
    meter: Meter = field(default_factory=Meter)
    bodies: Bodies = field(default_factory=Bodies)
    places: Places = field(default_factory=Places)
    openings: dict[str, bool] = field(default_factory=dict)  # does such a prompt open reasoning
    starts: Starts = field(init=False)
    decoding: Decoding = field(init=False)
    health: Health = field(init=False)
    _detokenizer: Detokenizer | None = None

    def __post_init__(self) -> None:
        self.starts, self.decoding = Starts(self.places), Decoding(self.places)
        self.health = Health(self.links)

    def model_name(self, welcome: Welcome) -> str:
        """Returns the model's name in answers."""
        return self.served[0] if self.served else model_name(welcome)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a model that is not served. Without a name it is the one that is."""
        if name is not None and self.served and name not in self.served:
            text = f"the model {name[:80]!r} is not served here; there is {', '.join(self.served)}"
            raise ApiError(404, text, "model", "model_not_found")

    async def detokenizer(self) -> Detokenizer | None:
        """Returns what decodes tokens, None for a model without a tokenizer. An engine that answers has
        written it."""
        if self._detokenizer is None and self.decoder.exists():
            self._detokenizer = await asyncio.to_thread(Detokenizer.read, self.decoder)
        return self._detokenizer


@dataclass
class Call:
    """A request. `key_name`: of its API key, "" without keys. `page_headers`: of the answer, where an
    allowed page of another site asks. `prompt_field`, `grammar_field`: of the body, for errors of the
    engine."""

    service: Service
    scope: Scope
    receive: Receive
    send: Send
    key_name: str = ""
    page_headers: Headers = ()
    prompt_field: str | None = None
    grammar_field: str | None = None
    status: int = 0  # of the answer, once it has begun
    placed: bool = False  # it has one of the places of requests
    kept: ExitStack = field(default_factory=ExitStack)  # until the answer's end
    _answer: HeldBody | None = None  # where it is large
    _sending: asyncio.Timeout | None = None  # ends it where its memory is needed
    _why: str = ""  # what the engine waits for
    _told: asyncio.Event = field(default_factory=asyncio.Event)  # it waits for something, or something else
    _waiting: asyncio.Timeout | None = None  # ends an answer that waits too long and cannot say so
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def refusal(self, error: Exception) -> ApiError:
        """Returns what the client sees of an error."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, ProtocolError):
            return of_engine(error, self.prompt_field, self.grammar_field)
        log.error("a request failed", exc_info=error)
        return ApiError(500, "the gateway failed; its log has the reason")

    async def client(self) -> Client:
        """Returns the API key's connection to the engine. Raises ApiError."""
        return await self.service.links.client(self.key_name)

    async def body(self, kind: type[Body], make: Callable[[Body], T]) -> T:
        """Returns what `make` makes of the body. It is decoded and made in a thread, in its key's
        turn. Raises ApiError, and ConnectionError where the client has gone."""
        media = header_of(self.scope, b"content-type").partition(";")[0].strip().lower()
        if (
            media != "application/json"
        ):  # a page of another site can send any other type without asking (CORS)
            media = media[:80] or "without a Content-Type"
            raise ApiError(415, f"the body must be application/json, not {media}")
        with self.service.bodies.one(self.key_name) as held:
            raw = await self._read(held)
            self.service.places.take(self.key_name)
            self.placed = True
            decoding = self.service.decoding
            coding = header_of(self.scope, b"content-encoding").strip().lower()
            if coding not in ("", "identity"):
                work = partial(inflated, raw, coding, MOST_BYTES)
                raw = await decoding.run(self.key_name, work, self.gone)
                self.service.bodies.grow(held, len(raw))
            return await decoding.run(self.key_name, partial(self._made, raw, kind, make), self.gone)

    def hold(self, size: int) -> None:
        """Count bytes of an answer that is kept until its end, or until `release`. Raises ApiError where
        there is no memory for them; one that is being sent ends then, as its client may not read."""
        if not size:
            return
        if self._answer is None:
            self._answer = self.kept.enter_context(self.service.bodies.one(self.key_name, grows=True))
            self._answer.limit = self._sending
        try:
            self.service.bodies.grow(self._answer, size)
        except ApiError:
            if self._sending is not None and self.status:
                self.service.bodies.end(self._answer)
            raise

    def release(self, size: int) -> None:
        """Count that bytes of an answer are held no longer."""
        if self._answer is not None:
            self.service.bodies.shrink(self._answer, size)

    @asynccontextmanager
    async def _endable(self) -> AsyncGenerator[None, None]:
        """Sending an answer, until its memory is needed. Raises ConnectionError then."""
        try:
            async with asyncio.timeout(None) as self._sending:
                if self._answer is not None:
                    self._answer.limit = self._sending
                yield
        except TimeoutError:
            raise ConnectionResetError from None
        finally:
            self._sending = None
            if self._answer is not None:
                self._answer.limit = None

    def keep(self, value: object) -> None:
        """Count a part of the body as long as the request runs. Raises ApiError where there is no memory for
        it."""
        held = self.kept.enter_context(self.service.bodies.one(self.key_name))
        self.service.bodies.grow(held, held_bytes(value))

    def _made(self, raw: bytes, kind: type[Body], make: Callable[[Body], T]) -> T:
        body = decoded(raw, kind, self.scope["path"])
        self.service.check_model(body.model)
        return make(body)

    async def _read(self, held: HeldBody) -> bytes:
        """Returns the body, which has BODY_SECONDS to arrive, and PART_SECONDS for each part."""
        length = header_of(self.scope, b"content-length")
        raw = bytearray()
        more = True
        clock = asyncio.get_running_loop().time
        end = clock() + BODY_SECONDS
        try:
            async with asyncio.timeout_at(end) as held.limit:
                while more:
                    if max(len(raw), int(length[:20]) if length.isdecimal() else 0) > MOST_BYTES:
                        raise ApiError(413, f"the body has more than {MOST_BYTES >> 20} MB")
                    held.limit.reschedule(min(end, clock() + PART_SECONDS))
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise ConnectionResetError
                    part = message.get("body", b"")
                    self.service.bodies.grow(held, len(part))
                    raw += part
                    more = message.get("more_body", False)
        except TimeoutError:
            if held.ended:
                raise ApiError(429, BUSY) from None
            text = f"the body did not arrive within {BODY_SECONDS:.0f} s, or its next part within"
            raise ApiError(408, f"{text} {PART_SECONDS:.0f} s") from None
        held.limit = None
        return bytes(raw)

    async def send_bytes(self, body: bytes, media: str, status: int = 200, headers: Headers = ()) -> None:
        """Send a whole answer."""
        await self._send_parts([body], media, status, headers)

    async def _send_parts(
        self, parts: Sequence[bytes | memoryview], media: str, status: int, headers: Headers
    ) -> None:
        length = (b"content-length", str(sum(map(len, parts))).encode())
        await self._begin(status, [(b"content-type", media.encode()), length, *headers])
        for left, part in zip(range(len(parts) - 1, -1, -1), parts, strict=True):
            await self.send({"type": "http.response.body", "body": bytes(part), "more_body": left > 0})

    async def send_json(self, value: Any, status: int = 200, headers: Headers = ()) -> None:
        """Send an object."""
        await self._send_parts(parts_of(value), "application/json", status, headers)

    async def send_error(self, error: ApiError) -> None:
        """Send a refusal in the shape of the endpoint's dialect."""
        await self.send_json(self._error_body(error), error.status, ERROR_HEADERS.get(error.status, ()))

    async def answer(self, work: Coroutine[Any, Any, dict[str, Any]]) -> None:
        """Send the object that `work` makes; it is cancelled where the client disconnects."""
        value = await self._unless_gone(self._unless_stuck(work))
        if self._answer is not None and self._answer.ended:
            raise ApiError(429, BUSY)
        async with self._endable():
            await self.send_json(value)

    async def _unless_stuck(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of `work`. Raises ApiError where the engine waits for a machine too long."""
        try:
            async with asyncio.timeout(None) as self._waiting:
                return await work
        except TimeoutError:
            if self._waiting is None or not self._waiting.expired():
                raise
            text = f"the engine has waited for {WAIT_SECONDS:.0f} s, for {self._why}"
            raise ApiError(503, text) from None
        finally:
            self._waiting = None

    def waits(self, why: str) -> None:
        """The engine waits for another machine, which a stream says at once; "": it goes on."""
        if not why:
            self.goes_on()
            return
        self._why = " ".join(why.split())
        self._told.set()
        if self._waiting is not None and self._waiting.when() is None:
            self._waiting.reschedule(asyncio.get_running_loop().time() + WAIT_SECONDS)

    def goes_on(self) -> None:
        """The engine waits for nothing any more."""
        if self._why:
            self._why = ""
            if self._waiting is not None:
                self._waiting.reschedule(None)

    async def stream(self, events: AsyncGenerator[bytes, None]) -> None:
        """Send events; the generator is ended where the client disconnects. An error before the first one, or
        the first second, is an HTTP error, a later one an event."""
        await self._unless_gone(self._stream_endable(events))

    async def _stream_endable(self, events: AsyncGenerator[bytes, None]) -> None:
        async with self._endable():
            await self._stream(events)

    async def _stream(self, events: AsyncGenerator[bytes, None]) -> None:
        last = b""
        pinging = asyncio.create_task(self._ping())
        try:
            async with aclosing(events):
                async for event in events:
                    await self._send_chunk(event)
        except Exception as e:
            if not self.status:
                raise
            name = "error" if self.anthropic else ""
            last = event_of(self._error_body(self.refusal(e)), name)
        finally:
            pinging.cancel()
        await self._send_chunk(last, more=False)

    async def _ping(self) -> None:
        """Begin the stream, and send a comment, or Anthropic's event, now and then; what the engine waits for
        is a comment in each dialect."""
        await asyncio.sleep(HEADERS_WITHIN)
        ping = event_of({"type": "ping"}, "ping") if self.anthropic else PING
        while True:
            self._told.clear()
            why = f": waiting for {self._why}\n\n".encode("utf-8", "replace") if self._why else b""
            await self._send_chunk(why or ping)
            with suppress(TimeoutError):
                async with asyncio.timeout(PING_SECONDS):
                    await self._told.wait()

    async def _send_chunk(self, chunk: bytes, more: bool = True) -> None:
        if not self.status:
            await self._begin(200, STREAM_HEADERS)
        await self.send({"type": "http.response.body", "body": chunk, "more_body": more})

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        await self.send(
            {"type": "http.response.start", "status": status, "headers": [*headers, *self.page_headers]}
        )

    async def _unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of `work`. It is cancelled where the client disconnects before; raises
        ConnectionError then."""
        task = asyncio.create_task(work)
        gone = asyncio.create_task(self._wait_gone())
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ConnectionResetError
            return task.result()
        finally:
            for pending in (task, gone):
                pending.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    async def _wait_gone(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    @property
    def gone(self) -> asyncio.Future[None]:
        """Returns what is done once the client has disconnected."""
        future: asyncio.Future[None] = self.scope["state"]["gone"]
        return future

    @property
    def anthropic(self) -> bool:
        """Returns whether the client speaks Anthropic's dialect."""
        named = header_of(self.scope, b"anthropic-version")  # as its clients send it with every request
        return bool(named or self.scope["path"].startswith("/v1/messages"))

    def _error_body(self, error: ApiError) -> dict[str, Any]:
        return error.body(self.anthropic)
