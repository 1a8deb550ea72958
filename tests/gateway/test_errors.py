"""What clients see of the engine's refusals and failures."""

from __future__ import annotations

import asyncio
import codecs
import gc
import json
import re
import threading
import tracemalloc
from collections import Counter
from collections.abc import MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from waiting import until

from pipeline.gateway.access import Access
from pipeline.gateway.app import App
from pipeline.gateway.bodies import ChatBody, CountBody, decoded, parse_json
from pipeline.gateway.call import Call, Service
from pipeline.gateway.engine_links import EngineLinks
from pipeline.gateway.errors import ApiError, of_engine
from protocol.errors import EngineGone, MalformedMessage, ProtocolError, RequestFailed


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (
            RequestFailed("the prompt has 9 tokens, the context is 8", usage=True),
            400,
            "context_length_exceeded",
        ),
        (RequestFailed("top_k is -1; it must be 0 or more", usage=True), 400, None),
        (
            RequestFailed("too many requests are already queued; try again later", usage=True),
            429,
            None,
        ),
        (RequestFailed("a tile of layer 3 could not be computed"), 500, None),
        (RequestFailed("the engine crashed 2 times while it was computing this", usage=True), 400, None),
        (MalformedMessage("5000000 bytes of header, the limit is 4194304"), 400, None),
        (EngineGone("the engine was stopped"), 503, None),
    ],
)
def test_an_error_has_the_status_that_fits(error: ProtocolError, status: int, code: str | None) -> None:
    found = of_engine(error)
    assert (found.status, found.code) == (status, code)
    assert str(error) in str(found)


def test_an_error_of_the_engine_names_the_field_that_it_is_about() -> None:
    names = ("input", "text.format")
    long = RequestFailed("the prompt has 9 tokens, the context is 8", usage=True)
    assert of_engine(long, *names).param == "input"
    told = of_engine(long, "messages").body(anthropic=True)["error"]["message"]
    assert told == "messages: prompt is too long: 9 tokens > 8 maximum"
    assert (
        of_engine(RequestFailed("the grammar or schema cannot be used: x", usage=True), *names).param
        == names[1]
    )
    late = of_engine(RequestFailed("the grammar cannot be followed further: too large"), *names)
    assert (late.status, late.param) == (400, names[1])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a":' + "[" * 500 + "]" * 500 + "}", "nested too deeply"),
        ('{"a":' + "[" * 50_000, "nested too deeply"),
        ("{", "is no valid JSON"),
        ('{"a":NaN}', "is no valid JSON"),
    ],
)
def test_json_that_could_not_be_sent_on(text: str, reason: str) -> None:
    with pytest.raises(ApiError, match=f"^the body .*{reason}") as refused:
        parse_json(text)
    assert (refused.value.status, refused.value.param) == (400, None)
    with pytest.raises(ApiError, match=f"^arguments: .*{reason}") as refused:
        parse_json(text, "arguments")
    assert refused.value.param == "arguments"


def test_half_of_a_character_is_shown_as_one_that_is_missing() -> None:
    """Programs cut the results of tools by UTF-16 units, and send what is left with every later turn."""
    cut = "\ud83d a\\ud83d \\\ud83d\ude00 \ude00"
    shown = "\ufffd a\\ud83d \\\U0001f600 \ufffd"
    assert parse_json(json.dumps({"a": [cut], "\udc00": 1})) == {"a": [shown], "\ufffd": 1}


def test_json_that_can_be_sent_on_is_left_as_it_is() -> None:
    value = {"a": ["é", "\U0001f600", {"b": [[1.5, None]]}, '"[[[{\\"'] * 200}
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (b"[]", "65536 objects and arrays"),
        (b"{}", "65536 objects and arrays"),
        (b"[[[[[[[]]]]]]]", "65536 objects and arrays"),
        (b'"a":1', "65536 fields"),
        (b"1e300", "4096 numbers with exponents"),
        (b'"[]"', "262144 values"),
    ],
)
def test_values_are_counted_before_they_are_made_and_not_within_texts(value: bytes, what: str) -> None:
    opened = b"{%s}" if b":" in value else b"[%s]"
    many = opened % b",".join([value] * 300_000)
    with pytest.raises(ApiError, match=f"^the body has more than {what}$") as refused:
        parse_json(b'{"x": %s}' % many)
    assert refused.value.status == 413
    program = many.decode() + '\\" \\\\'
    assert parse_json(json.dumps({"x": [program, "\\", program]})) == {"x": [program, "\\", program]}


async def test_bodies_are_decoded_in_threads_one_of_each_key_at_a_time(monkeypatch) -> None:
    running: Counter[str] = Counter()
    together: list[str] = []
    both = threading.Barrier(2)

    def slow(raw: bytes, kind: type, endpoint: str) -> CountBody:
        assert threading.current_thread() is not threading.main_thread()
        key = raw.decode()
        running[key] += 1
        assert running[key] == 1
        together.append(key)
        both.wait(10)  # for the other key's
        running[key] -= 1
        return CountBody(messages=[])

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": received.pop(0)}

    async def send(message: object) -> None: ...

    monkeypatch.setattr("pipeline.gateway.call.decoded", slow)
    service = Service(cast(Any, None), Path())
    gone = asyncio.get_running_loop().create_future()
    fields = [(b"content-type", b"application/json")]
    scope = {"path": "/", "headers": fields, "state": {"gone": gone}}
    received = [b"a", b"b", b"a", b"b", b"a", b"b"]
    calls = [Call(service, scope, receive, send, key.decode()) for key in received]
    made = await asyncio.gather(*(call.body(CountBody, lambda body: body.messages) for call in calls))
    assert made == [[]] * 6
    assert all({*pair} == {"a", "b"} for pair in zip(together[::2], together[1::2], strict=True))


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({}, "messages: is required"),
        ({"messages": []}, "messages: expected `array` of length >= 1"),
        ({"messages": [{"content": "x"}]}, "messages[0].role: is required"),
        ({"logit_bias": {"1": 500}}, "logit_bias: expected `float` <= 100.0"),
        ({"n": 1.5}, "n: expected `float` that's a multiple of 1.0"),
        ({"documents": [1]}, "documents: is not supported here"),
        ([], "the body: expected `object`, got `array`"),
    ],
)
def test_a_misfit_is_named_with_its_place(body: Any, error: str) -> None:
    turns = [{"role": "user", "content": "x"}]
    if body and isinstance(body, dict):
        body = {"messages": turns} | body
    with pytest.raises(ApiError, match=f"^{re.escape(error)}"):
        decoded(json.dumps(body).encode(), ChatBody, "/v1/chat/completions")


def test_whole_numbers_may_be_written_as_floats_and_null_is_not_given() -> None:
    given = {"messages": [{"role": "user"}], "n": 2.0, "documents": None, "x": 1, "stop": None}
    body = decoded(json.dumps(given).encode(), ChatBody, "/v1/chat/completions")
    assert (body.n, body.stop, body.messages[0].content) == (2, None, None)
    assert decoded(codecs.BOM_UTF8 + json.dumps(given).encode(), ChatBody, "/v1/chat/completions") == body


async def test_a_refused_body_does_not_stay_in_memory(tmp_path: Path) -> None:
    """Until the next collection, which may be a hundred bodies later."""
    app = App(Service(EngineLinks("ipc:///x"), tmp_path), Access(None, "127.0.0.1"))
    raw = b'{"prompt":' + b"[" * (4 << 20)
    head = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    state = {"gone": asyncio.get_running_loop().create_future()}
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": head, "state": state}
    statuses = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": raw[:-1]}  # a copy

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    async def client(call: Call) -> Any:
        return SimpleNamespace(welcome=None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Call, "client", client)
        gc.disable()
        tracemalloc.start()
        try:
            await app(scope, receive, send)
            await until(lambda: tracemalloc.get_traced_memory()[0] < 1 << 20)  # once the thread is done
        finally:
            tracemalloc.stop()
            gc.enable()
    assert statuses[0] == 413


async def test_an_answer_that_is_no_stream_is_given_up_where_its_engine_waits_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.gateway.call.WAIT_SECONDS", 0.0)
    never = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await never.wait()
        return {}

    async def computed() -> dict[str, Any]:
        call.waits("lane 1 of the experts:\nb is away")
        await never.wait()
        return {}

    call = Call(cast(Service, None), {}, receive, cast(Any, None))
    with pytest.raises(ApiError, match="for lane 1 of the experts: b is away") as refused:
        await call.answer(computed())
    assert refused.value.status == 503


async def test_an_answer_is_not_given_up_whose_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.gateway.call.WAIT_SECONDS", 0.0)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(dict(message))

    async def computed() -> dict[str, Any]:
        call.waits("lane 1 of the experts: b is away")
        call.waits("")
        for _ in range(10):  # of a long prompt, before its first token
            await asyncio.sleep(0)
        return {"text": "x"}

    call = Call(cast(Service, None), {}, receive, send)
    await call.answer(computed())
    assert [message.get("status") for message in sent] == [200, None]
