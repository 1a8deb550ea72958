"""Who may send requests, and what is refused."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from gateway_engine import Served, serve
from waiting import until

from pipeline.assets import model_dir
from pipeline.gateway.access import read_api_keys
from pipeline.gateway.call import Service
from pipeline.gateway.engine_links import EngineLinks, model_name
from pipeline.gateway.errors import ApiError
from protocol.client import Client
from protocol.errors import ProtocolError
from protocol.messages import VERSION, Welcome

ANNA, BERT = "k" * 20, "b" * 20
FRONT = "https://chat.example"  # a page of another site that may send requests


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "http.keys"
    path.touch(mode=0o600)
    path.write_text(f"# comment\nanna {ANNA}\n")
    return path


@pytest.fixture(scope="module")
def served(keys: Path, tiny_model: Path) -> Iterator[Served]:
    options = ("--http-keys", str(keys), "--allowed-origins", f"http://localhost:3000,{FRONT}")
    with serve(*options, "--model", str(tiny_model)) as running:
        yield running


def status_of(served: Served, **headers: str) -> int:
    body = {"prompt": [5, 6], "max_tokens": 2}
    with served.http() as http:
        return http.post("/v1/completions", json=body, headers=headers).status_code


def test_requests_need_a_known_key(served: Served, keys: Path) -> None:
    status = partial(status_of, served)

    with served.http() as http:
        assert http.get("/health").status_code == 200  # needs none
        assert http.get("/metrics").status_code == 401
    assert status() == 401
    assert status(authorization=f"Bearer {ANNA}x") == 401
    assert status(authorization=f"Bearer {ANNA}") == 200
    assert status(**{"x-api-key": ANNA}) == 200
    assert status(authorization=f"Bearer {BERT}") == 401
    keys.write_text(f"bert {BERT}\n")
    until = time.monotonic() + 10
    while status(authorization=f"Bearer {BERT}") != 200 and time.monotonic() < until:
        time.sleep(0.1)
    assert status(authorization=f"Bearer {ANNA}") == 401
    keys.write_text("")  # cannot be read: those that were known stay
    time.sleep(1.2)
    assert status(authorization=f"Bearer {BERT}") == 200
    keys.write_text(f"anna {ANNA}\n")


def test_allowed_pages_of_other_sites_can_read_answers_and_refusals(served: Served, keys: Path) -> None:
    keys.write_text(f"anna {ANNA}\n")
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-os"}
    allowed, name = {"origin": FRONT}, "access-control-allow-origin"
    body = {"prompt": [5, 6], "max_tokens": 2}
    with served.http() as http:
        asked = http.options("/v1/completions", headers=allowed | asking)  # browsers send no key with it
        assert (asked.status_code, asked.headers[name]) == (200, FRONT)
        assert asked.headers["access-control-allow-methods"] == "POST"
        assert asked.headers["access-control-allow-headers"] == "authorization,x-os"
        own = http.options("/v1/models")  # of a program that asks what is served
        assert (own.status_code, own.headers["allow"]) == (200, "GET, HEAD, OPTIONS")
        for path, status in (("/v1/completions", 401), ("/nowhere", 404), ("/v1/models", 405)):
            refused = http.post(path, json=body, headers=allowed)
            assert (refused.status_code, refused.headers[name]) == (status, FRONT)
        known = allowed | {"authorization": f"Bearer {ANNA}"}
        for stream in (False, True):
            answer = http.post("/v1/completions", json=body | {"stream": stream}, headers=known)
            assert (answer.status_code, answer.headers[name]) == (200, FRONT)
            assert answer.headers["vary"] == "origin"
        for origin in ("https://evil.example", "http://chat.example", f"{FRONT}.evil.example", "null"):
            for refused in (
                http.options("/v1/completions", headers=asking | {"origin": origin}),
                http.post("/v1/completions", json=body, headers=known | {"origin": origin}),
            ):
                assert refused.status_code == 403
                assert name not in refused.headers
        assert name not in http.get("/health").headers


async def test_each_key_is_a_client_of_the_engine(served: Served, keys: Path) -> None:
    """So that keys take turns, and each has its own limits and conversations."""
    keys.write_text(f"anna {ANNA}\nbert {BERT}\n")  # noqa: ASYNC240 - a small file
    for key in (ANNA, BERT, ANNA):
        await until(lambda key=key: status_of(served, authorization=f"Bearer {key}") == 200)
    async with Client.connect(served.endpoint) as own:
        assert (await own.stats())["clients"]["connected"] == 4  # with the one that watches the engine


def test_a_head_with_two_hosts_is_refused(served: Served) -> None:
    """A proxy before us may go by the other one."""
    address = urlsplit(served.url)
    for hosts, wanted in ((1, b"200 OK"), (2, b'"message":"the request has two Host fields"')):
        with socket.create_connection((address.hostname, address.port), 60) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n" + b"Host: localhost\r\n" * hosts + b"\r\n")
            received = b""
            while wanted not in received:
                part = connection.recv(1 << 16)
                assert part, received
                received += part
    assert received.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no keys"),
        ("anna short", "16 to 256"),
        (f"anna {ANNA}\nanna {BERT}", "twice"),
        (f"anna {ANNA}\nbert {ANNA}", "twice"),
        (ANNA, "a name"),
        (f"änna {ANNA}", "ASCII"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text(text)
    with pytest.raises(ProtocolError, match=words) as refused:
        read_api_keys(path)
    assert ANNA not in str(refused.value)


def test_keys_that_others_can_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"anna {ANNA}\n")
    path.chmod(0o644)
    with pytest.raises(ProtocolError, match="chmod 600"):
        read_api_keys(path)


def test_heads_without_an_end_and_garbage_end_only_their_connection(served: Served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    for written in (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20000, b"\x00\xff" * 100, b"GET " + b"/" * 100000):
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            try:
                connection.sendall(written)
                answer = connection.recv(1 << 16)
            except OSError:
                continue
            head, _, body = answer.partition(b"\r\n\r\n")
            assert answer == b"" or b" 400 " in head.partition(b"\r\n")[0] + b" "
            assert answer == b"" or json.loads(body)["error"]["type"] == "invalid_request_error"
    with served.http() as http:
        assert http.get("/health").status_code == 200


def test_an_engine_stops_in_order_while_answers_run(keys: Path, tiny_model: Path) -> None:
    """A stream that does not end in time ends with an error, and not with a broken connection."""
    with serve("--model", str(tiny_model)) as running, running.http() as http:
        body = {"prompt": [5, 6], "max_tokens": 200, "stream": True, "ignore_eos": True, "temperature": 1.0}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.process.terminate()
            rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]" or '"error"' in rest[-1]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/models/Mixtral-8x7B", "Mixtral-8x7B"),
        ("/home/a/.cache/huggingface/hub/models--org--small-moe/snapshots/0123abcd", "org/small-moe"),
        ("shape:qwen3-30b-a3b/8", "shape:qwen3-30b-a3b/8"),
        (str(model_dir()), "tandem-embedded"),
    ],
)
def test_model_has_the_name_that_a_person_would_give(model: str, name: str) -> None:
    welcome = Welcome(VERSION, "e1", model, "f" * 64, "cpu", "all-host", True, 4096, 512, True, True)
    assert model_name(welcome) == name
    links, decoder = EngineLinks("ipc:///x"), Path("/x")
    plain, named = Service(links, decoder), Service(links, decoder, served=("a", "b"))
    assert (plain.model_name(welcome), named.model_name(welcome)) == (name, "a")
    for known in (name, "8", None):
        plain.check_model(known)
    for known in ("a", "b", None):
        named.check_model(known)
    with pytest.raises(ApiError, match="'8' is not served here; there is a, b"):
        named.check_model("8")
