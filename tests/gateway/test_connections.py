"""What clients without a key, or with one, can do with connections and unfinished requests to others."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import resource
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from urllib.parse import urlsplit

import pytest
from gateway_engine import Served, serve
from waiting import until

from pipeline.fairness import RateLimiter
from pipeline.gateway.answers import ChatEvent, ChatRequest, End
from pipeline.gateway.bodies import CompletionBody, decoded
from pipeline.gateway.call import Call, Service
from pipeline.gateway.chat import Chat
from pipeline.gateway.connections import Connections, make_server
from pipeline.gateway.dashboard import MOST_BROWSERS, Feed
from pipeline.gateway.engine_links import EngineLinks
from pipeline.gateway.errors import ApiError
from pipeline.gateway.settings import Settings, Tools
from pipeline.gateway.shares import COSTLY, Bodies, Decoding, Places, Starts
from protocol.answer import Answer
from protocol.client import Client
from protocol.messages import Sampling, Token

ANNA, BERT = "k" * 20, "b" * 20
AMPLE = 60.0  # seconds
GET = b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
CROWD = 2060  # connections, more than there may be
LONG = {"prompt": [5, 6], "max_tokens": 1000, "ignore_eos": True, "temperature": 1.0}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = tmp_path_factory.mktemp("keys") / "http.keys"
    keys.touch(mode=0o600)
    keys.write_text(f"anna {ANNA}\nbert {BERT}\n")
    with serve("--http-keys", str(keys)) as running:
        yield running


def connected(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname, address.port), timeout=AMPLE)


def head(key: str, *fields: str) -> bytes:
    lines = ("POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *fields)
    return "\r\n".join((*lines, f"Authorization: Bearer {key}", "", "")).encode()


def post(key: str, **body: Any) -> bytes:
    raw = json.dumps(body).encode()
    return head(key, f"Content-Length: {len(raw)}") + raw


def received(connection: socket.socket) -> bytes:
    """All that comes before the connection's end."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def sent(connection: socket.socket, data: bytes) -> bool:
    """Whether all was taken before the connection's end."""
    try:
        connection.sendall(data)
    except ConnectionError:
        return False
    return True


def test_what_comes_before_an_answer_is_limited(served: Served) -> None:
    """A head without an end, behind a request that is being answered; more requests than may wait there; the
    fields behind a body, which are no part of it."""
    for ahead in (b"GET / HTTP/1.1\r\na: " + b"x" * (1 << 20), GET * 3):
        with connected(served.url) as connection:
            connection.sendall(post(ANNA, **LONG, stream=True))
            assert connection.recv(10) == b"HTTP/1.1 2"
            sent(connection, ahead)
            assert b"[DONE]" not in received(connection)
    with connected(served.url) as connection:
        sent(connection, head(ANNA, "Transfer-Encoding: chunked") + b"1\r\n{\r\n0\r\n")
        assert not sent(connection, b"a:b\r\n" * (1 << 20)) or b" 400 " in received(connection)


def test_a_large_head_is_refused_also_where_it_comes_at_once(served: Served) -> None:
    for large in (b"GET /%b HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\na: %b\r\n\r\n"):
        with connected(served.url) as connection:
            sent(connection, large % (b"x" * 100_000))
            assert b"head has more than 64 kB" in received(connection)


async def until_running(own: Client, wanted: bool) -> None:
    """Wait until the engine computes something, or nothing."""
    while bool((await own.stats())["scheduler"]["running"]) != wanted:  # noqa: ASYNC110 - of another process
        await asyncio.sleep(0.01)


async def test_a_request_that_waits_hides_no_disconnect(served: Served) -> None:
    async with Client.connect(served.endpoint) as own:
        before = (await own.stats())["counted_tokens"]
        with connected(served.url) as connection:
            connection.sendall(post(ANNA, **LONG, n=2))
            await until_running(own, True)
            connection.sendall(GET)
        await until_running(own, False)
        assert (await own.stats())["counted_tokens"] - before < 2 * LONG["max_tokens"]


def test_lines_about_what_is_no_http_are_few(served: Served) -> None:
    for _ in range(300):
        with connected(served.url) as connection:
            connection.sendall(b"\x00\xff\r\n\r\n")
            assert b" 400 " in received(connection)
    lines = Path(f"/proc/{served.process.pid}/fd/2").read_text().splitlines()
    assert 0 < sum("Invalid HTTP request" in line for line in lines) < 150


def test_another_protocol_is_not_spoken_and_no_package_advised(served: Served) -> None:
    with connected(served.url) as connection:
        connection.sendall(GET[:-2] + b"Connection: close, Upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert received(connection).startswith(b"HTTP/1.1 401 ")
    assert "pip install" not in Path(f"/proc/{served.process.pid}/fd/2").read_text()


@pytest.fixture
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 2 * CROWD:
        pytest.skip(f"a process may have {before[1]} open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * CROWD, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_files")
def test_neither_idle_connections_nor_unfinished_bodies_keep_others_out(served: Served) -> None:
    unfinished = head(ANNA, "Content-Length: 100") + b"{"
    for beginning in (b"GET /vers", unfinished):
        with ExitStack() as opened:
            crowd = [opened.enter_context(connected(served.url)) for _ in range(CROWD)]
            for connection in crowd:
                sent(connection, beginning)
            with connected(served.url) as connection:
                connection.sendall(post(BERT, prompt=[5, 6], max_tokens=2))
                assert connection.recv(13) == b"HTTP/1.1 200 "
            with served.http() as http:
                assert http.get("/health").status_code == 200


def test_what_follows_a_body_is_no_key(served: Served) -> None:
    asked = (
        b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n"
    )
    with connected(served.url) as connection:
        connection.sendall(asked + f"\r\n0\r\nAuthorization: Bearer {ANNA}\r\n\r\n".encode())
        assert received(connection).startswith(b"HTTP/1.1 401 ")
    with connected(served.url) as connection:
        sent(connection, asked + b"\r\n0\r\n" + b"a: b\r\n" * 257 + b"\r\n")
        assert b"more than 256 fields" in received(connection)


def test_events_are_not_loaded_by_pages_of_other_sites(served: Served) -> None:
    own = {"authorization": f"Bearer {ANNA}"}
    with served.http() as http:
        for site, mode, path, status in (
            ("cross-site", "no-cors", "/dashboard/events", 403),
            ("same-site", "no-cors", "/dashboard/events", 403),  # another port of this machine
            ("cross-site", "navigate", "/dashboard/events", 403),
            ("cross-site", "no-cors", "/health", 403),
            ("cross-site", "navigate", "/dashboard", 200),
            ("none", "navigate", "/v1/models", 200),
            ("same-origin", "cors", "/v1/models", 200),
        ):
            dest = "document" if mode == "navigate" else "empty"
            told = {"sec-fetch-site": site, "sec-fetch-mode": mode, "sec-fetch-dest": dest}
            with http.stream("GET", path, headers=own | told) as answer:
                assert answer.status_code == status, (site, mode, path)


# --- the parts, in this process -------------------------------------------------------------------------


class Endless:
    """An application whose answers have no end but their clients'."""

    def __init__(self) -> None:
        self.running = self.ended = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.running += 1
        start = {"type": "http.response.start", "status": 200, "headers": []}
        await send(start)
        gone = asyncio.create_task(self._gone(receive))
        while not gone.done():
            part = b"x" * (1 << 16) if scope["path"] == "/much" else b"x"
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0.001)
        await gone
        self.ended += 1

    async def _gone(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


@asynccontextmanager
async def a_server(app: Any, connections: Connections) -> AsyncIterator[tuple[Any, str]]:
    """Uvicorn's state of a server of this application, and its address."""
    server = make_server(app, connections)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        try:
            yield server.server_state, f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            await serving


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1 << 16, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


async def test_the_longest_idle_connection_gives_way_and_never_one_that_is_answered() -> None:
    app = Endless()
    async with a_server(app, Connections(most=4, most_of_address=3)) as (state, url):
        with ExitStack() as opened:

            async def another(data: bytes = b"") -> socket.socket:
                connection: socket.socket = opened.enter_context(connected(url))
                connection.sendall(data)
                await until(lambda: any(c.client == connection.getsockname() for c in state.connections))
                return connection

            slow = await another(b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n")
            await until(lambda: app.running == 1)
            busy = await another(b"GET / HTTP/1.1\r\n\r\n")
            await until(lambda: app.running == 2)
            idle = await another()
            younger = await another()
            await until(lambda: not is_open(idle))
            assert is_open(slow)
            assert is_open(younger)
            younger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            await until(lambda: app.running == 3)
            last = await another(b"GET / HTTP/1.1\r\n\r\n")
            await until(lambda: app.running == 4)
            await until(lambda: app.ended == 1)  # the slow one's, whose body had not come
            assert is_open(busy)
            assert is_open(last)
            refused = opened.enter_context(connected(url))
            await until(lambda: not is_open(refused))
            assert len(state.connections) == 3


async def test_a_client_that_reads_nothing_is_cut_off_and_a_slow_one_is_not() -> None:
    app = Endless()
    async with a_server(app, Connections()) as (state, url):
        with connected(url) as connection:
            connection.sendall(b"GET /much HTTP/1.1\r\n\r\n")
            await until(lambda: any(c.flow.write_paused for c in state.connections))
            (protocol,) = state.connections
            protocol._watch_reader()
            await asyncio.to_thread(take, connection, 32 << 20)  # more than buffers hold
            await until(lambda: protocol.flow.write_paused)
            protocol._watch_reader()
            assert not protocol.transport.is_closing()
            while not protocol.transport.is_closing():  # once the client's buffers are full
                await asyncio.sleep(0.05)
                protocol._watch_reader()
            await until(lambda: app.ended == 1)


def take(connection: socket.socket, size: int) -> None:
    while size > 0:
        part = connection.recv(1 << 16)
        assert part
        size -= len(part)


def a_call(service: Service, key: str, parts: asyncio.Queue[bytes]) -> Call:
    """A request whose body has these parts; the empty one ends it."""

    async def receive() -> dict[str, Any]:
        part = await parts.get()
        return {"type": "http.request", "body": part, "more_body": part != b""}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    gone = asyncio.get_running_loop().create_future()
    fields = [(b"content-type", b"application/json")]
    scope = {"path": "/v1/completions", "headers": fields, "state": {"gone": gone}}
    return Call(service, scope, receive, send, key)


async def test_the_key_with_most_bytes_loses_its_oldest_unfinished_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = Service(EngineLinks("ipc:///x"), Path("/x"), bodies=Bodies(most=100, own=20))
    service.places = Places(most=1, own=1)
    parts: list[asyncio.Queue[bytes]] = []
    reading: list[asyncio.Task[CompletionBody]] = []
    for key, size in (("bert", 15), ("anna", 50), ("anna", 30), ("anna", 20)):
        parts.append(asyncio.Queue())
        reading.append(
            asyncio.create_task(a_call(service, key, parts[-1]).body(CompletionBody, lambda body: body))
        )
        parts[-1].put_nowait(b'{"prompt":"x"}' + b" " * (size - 14))
        await until(parts[-1].empty)
        await asyncio.sleep(0)
    with pytest.raises(ApiError, match="the memory") as ended:
        await reading[1]
    assert ended.value.status == 429
    for queue in parts:
        queue.put_nowait(b"")
    bert, _, first, second = await asyncio.gather(*reading, return_exceptions=True)
    assert isinstance(bert, CompletionBody)  # and takes the only place, but each key has one of its own
    assert isinstance(first, CompletionBody)
    assert isinstance(second, ApiError)
    assert "1 requests are running" in str(second)

    monkeypatch.setattr("pipeline.gateway.call.PART_SECONDS", 0.01)
    parts.append(asyncio.Queue())
    parts[-1].put_nowait(b"{")
    with pytest.raises(ApiError, match="did not arrive") as late:
        await a_call(service, "bert", parts[-1]).body(CompletionBody, lambda body: body)
    assert late.value.status == 408


def test_lines_about_what_clients_send_have_an_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.gateway.bodies._noted", set())
    monkeypatch.setattr("pipeline.gateway.bodies._rate", RateLimiter(5))
    caplog.set_level(logging.INFO, "pipeline.gateway.bodies")
    body = {"prompt": "x"} | {f"field-{number}": 1 for number in range(3000)}
    decoded(json.dumps(body).encode(), CompletionBody, "/v1/completions")
    assert 0 < len(caplog.records) <= 2 * 5  # in two seconds at most
    monkeypatch.setattr("pipeline.gateway.bodies._rate", RateLimiter(10_000))
    decoded(json.dumps(body).encode(), CompletionBody, "/v1/completions")
    assert len(caplog.records) == 1024


async def test_requests_begin_one_in_a_turn_of_the_loop_and_keys_in_turn() -> None:
    starts, begun, turns = Starts(Places()), [], 0
    stays = asyncio.get_running_loop().create_future()

    async def request(account: str) -> None:
        await starts.wait(account, stays)
        begun.append((account, turns))

    names = ["", "", "", "", "anna", "anna"]
    tasks = [asyncio.create_task(request(name)) for name in names]
    await asyncio.sleep(0)
    tasks[1].cancel()
    while len(begun) < len(names) - 1:
        turns += 1
        await asyncio.sleep(0)
    assert [name for name, _ in begun] == ["", "anna", "", "anna", ""]
    assert len({turn for _, turn in begun}) == len(begun)
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)
    await starts.wait("", stays)  # none waits: at once


async def test_requests_without_a_key_begin_apart_while_keys_requests_are_computed() -> None:
    places, begun = Places(), []
    places.take("anna")
    stays, goes = (asyncio.get_running_loop().create_future() for _ in range(2))

    async def request(starts: Starts, account: str, gone: asyncio.Future[None]) -> None:
        await starts.wait(account, gone)
        begun.append(account or "none")

    for pace in (1000.0, 0.001):
        starts = Starts(places, pace)
        first = asyncio.create_task(request(starts, "", stays))
        others = [asyncio.create_task(request(starts, "", gone)) for gone in (stays, goes)]
        await asyncio.gather(first, *(request(starts, "bert", stays) for _ in range(3)))
        if pace == 1000.0:
            assert begun == ["none", "bert", "bert", "bert"]
            goes.set_result(None)
            with pytest.raises(ConnectionResetError):
                await others[1]
            assert not others[0].done()
            others[0].cancel()
        else:
            await others[0]  # its turn comes, though a key's request is still computed
        await asyncio.gather(*others, return_exceptions=True)


async def test_a_request_that_waits_to_begin_ends_with_its_connection() -> None:
    begins, ends = asyncio.Event(), asyncio.Event()
    places = Places()
    places.take("anna")
    starts = Starts(places, 1000.0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begins.set()
        with pytest.raises(ConnectionResetError):
            await starts.wait("", scope["state"]["gone"])
        ends.set()

    await starts.wait("", asyncio.get_running_loop().create_future())
    async with asyncio.timeout(AMPLE), a_server(app, Connections()) as (_, url):
        with connected(url) as connection:
            connection.sendall(GET)
            await begins.wait()
            assert not ends.is_set()
        await ends.wait()


async def test_after_a_costly_body_its_keys_next_waits_while_others_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places, clock, begun = Places(), [0.0], []
    stays, goes = (asyncio.get_running_loop().create_future() for _ in range(2))
    decoding = Decoding(places, lambda: clock[0])

    def work(name: str, cost: float) -> None:
        begun.append(name)
        clock[0] += cost

    async def decode(name: str, cost: float, gone: asyncio.Future[None] = stays) -> None:
        await decoding.run(name[:-1], partial(work, name, cost), gone)

    monkeypatch.setattr("pipeline.gateway.shares.MOST_PAUSE", 0.001)
    places.take("bert")
    await decode("anna0", 1000.0)
    await decode("anna1", 0.0)  # the wait has an end
    places.leave("bert")
    monkeypatch.setattr("pipeline.gateway.shares.MOST_PAUSE", 1000.0)
    await decode("anna2", 1000.0)  # only her own requests are computed
    places.take("bert")
    await decode("anna3", 1000.0)
    waiting = asyncio.create_task(decode("anna4", 0.0, goes))
    for name in ("bert0", "bert1"):
        await decode(name, COSTLY / 2)
    assert begun == ["anna0", "anna1", "anna2", "anna3", "bert0", "bert1"]
    goes.set_result(None)
    with pytest.raises(ConnectionResetError):
        await waiting


async def test_a_body_that_is_given_up_in_its_turn_blocks_no_other_of_its_key() -> None:
    stays = asyncio.get_running_loop().create_future()
    decoding, begun = Decoding(Places()), []

    async def decode(name: str) -> None:
        await decoding.run("anna", partial(begun.append, name), stays)

    async def first() -> None:
        await decode("first")
        second.cancel()  # its turn has just come

    async with asyncio.timeout(AMPLE):
        running = asyncio.create_task(first())
        second = asyncio.create_task(decode("second"))
        await running
        await decode("third")
    assert begun == ["first", "third"]


async def test_what_an_answer_keeps_of_its_body_counts_until_its_end() -> None:
    service = Service(EngineLinks("ipc:///x"), Path("/x"), bodies=Bodies(most=100_000, own=10))
    first, second = (a_call(service, "anna", asyncio.Queue()) for _ in range(2))
    first.keep(({"type": "web_search", "x": "y" * 60_000},))
    with pytest.raises(ApiError, match="the memory"):
        second.keep(({"type": "web_search", "x": list(range(2000))},))
    first.kept.close()
    second.kept.close()
    second.keep(({"type": "web_search", "x": list(range(2000))},))


async def test_inflated_bytes_count_as_those_of_a_body() -> None:
    service = Service(EngineLinks("ipc:///x"), Path("/x"), bodies=Bodies(most=100_000, own=10))
    for size, served in ((50_000, True), (150_000, False)):
        parts: asyncio.Queue[bytes] = asyncio.Queue()
        for part in (gzip.compress(json.dumps({"prompt": "x" * size}).encode()), b""):
            parts.put_nowait(part)
        call = a_call(service, "anna", parts)
        call.scope["headers"].append((b"content-encoding", b"gzip"))
        if served:
            assert len(await call.body(CompletionBody, lambda body: str(body.prompt))) == size
        else:
            with pytest.raises(ApiError, match="the memory"):
                await call.body(CompletionBody, lambda body: body)


class Likely(Chat):
    """An answer of so many tokens with their log-probabilities."""

    ENTRY: ClassVar[dict[str, Any]] = {"token": "x", "logprob": -1.5, "top_logprobs": [{"token": "é"}] * 20}

    def __init__(self, call: Call, tokens: int) -> None:
        settings = Settings(9, Sampling(), (), False, 1, False, False, logprobs=20)
        asked = ChatRequest((), settings, Tools(), {})
        super().__init__(call, cast(Any, SimpleNamespace(welcome=None)), asked)
        self.model, self.tokens = "m", tokens

    async def events(self) -> AsyncGenerator[tuple[int, ChatEvent], None]:
        for _ in range(self.tokens):
            yield 0, self.ENTRY
        yield 0, End("stop")


async def test_a_body_that_is_late_can_lose_its_memory_in_the_same_moment() -> None:
    bodies, loop = Bodies(most=100, own=10), asyncio.get_running_loop()

    async def late() -> None:
        with bodies.one("anna") as body:
            async with asyncio.timeout_at(loop.time()) as body.limit:
                bodies.grow(body, 90)
                await loop.create_future()

    reading = asyncio.create_task(late())
    for _ in range(2):  # it begins; its time is over, which it does not know yet
        await asyncio.sleep(0)
    with bodies.one("bert") as body:
        bodies.grow(body, 20)
    with pytest.raises(TimeoutError):
        await reading


async def test_log_probabilities_count_until_the_answers_end_and_have_a_limit() -> None:
    """The key with most loses its oldest answer."""
    service = Service(EngineLinks("ipc:///x"), Path("/x"), bodies=Bodies(most=100_000, own=2000))
    service.served = ("m",)
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    def call(key: str) -> Call:
        made = a_call(service, key, asyncio.Queue())
        made.send = send
        return made

    first = call("anna")
    await Likely(first, 200).send()
    (choice,) = json.loads(b"".join(sent))["choices"]
    assert choice["logprobs"] == {"content": [Likely.ENTRY] * 200, "refusal": None}
    await Likely(call("bert"), 5).send()
    await Likely(call("anna"), 200).send()  # in place of the first
    with pytest.raises(ApiError, match="the memory"):
        first.hold(1)
    with pytest.raises(ApiError, match="the memory") as refused:
        await Likely(call("bert"), 400).send()
    assert refused.value.status == 429


async def test_what_clients_do_not_read_of_their_answers_counts_and_is_dropped() -> None:
    """Of whole answers, and of streams, to which tokens come meanwhile."""
    service = Service(EngineLinks("ipc:///x"), Path("/x"), bodies=Bodies(most=100_000, own=2000))
    service.served = ("m",)
    begun: list[Call] = []

    def unread() -> Call:
        made = a_call(service, "anna", asyncio.Queue())

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                begun.append(made)
                await asyncio.Event().wait()

        made.send = send
        return made

    async with asyncio.timeout(AMPLE):
        calls = [unread(), unread()]
        first = asyncio.create_task(Likely(calls[0], 200).send())
        await until(lambda: begun == calls[:1])
        second = asyncio.create_task(Likely(calls[1], 200).send())
        with pytest.raises(ConnectionResetError):
            await first
        await until(lambda: begun == calls)

        answer = Answer(0, lambda request: None)
        call = unread()
        client = cast(Any, SimpleNamespace(welcome=None, generate=lambda **_: answer))
        settings = Settings(9, Sampling(), (), False, 1, True, False, logprobs=20)
        streaming = asyncio.create_task(Chat(call, client, ChatRequest((), settings, Tools(), {})).send())
        best = tuple(range(20)), (-1.5,) * 20
        for number in range(200):
            answer.feed(Token(0, number, 5, "x", 0.0, 0, -1.5, *best))
            if not number:
                await until(lambda: call in begun)
        for sending in (second, streaming):
            with pytest.raises(ConnectionResetError):
                await sending


async def test_a_key_with_all_dashboards_gives_one_of_them_to_another() -> None:
    feed = Feed(EngineLinks("ipc:///x"))
    crowd = [feed.events("anna") for _ in range(MOST_BROWSERS)]
    for events in crowd:
        assert b"away" in await anext(events)
    with pytest.raises(ApiError, match="dashboards are open"):
        await anext(feed.events("anna"))
    one = feed.events("bert")
    assert b"away" in await anext(one)
    async with asyncio.timeout(AMPLE):
        assert [event async for event in crowd[0]] == []  # the oldest
    for events in (one, *crowd):
        await events.aclose()
