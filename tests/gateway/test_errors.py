"""What clients see of the engine's refusals and failures."""

from __future__ import annotations

import json

import pytest

from pipeline.gateway.body import parse_json
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
            RequestFailed("1024 requests of this client are already queued; try again later", usage=True),
            429,
            None,
        ),
        (RequestFailed("the engine exited 3 times without progress of this request"), 500, None),
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
    assert (
        of_engine(RequestFailed("the grammar or schema cannot be used: x", usage=True), *names).param
        == names[1]
    )
    late = of_engine(RequestFailed("the grammar cannot be followed further: too large"), *names)
    assert (late.status, late.param) == (400, names[1])


@pytest.mark.parametrize(
    ("text", "param"),
    [
        (json.dumps({"a": ["x", {"b": "\ud800"}]}), "a[1].b"),
        (json.dumps({"a": {"\udc00": 1}}), r"a.\udc00"),
        ('{"a":' + "[" * 500 + "]" * 500 + "}", "a" + "[0]" * 65),
        ("{", None),
    ],
)
def test_json_that_could_not_be_sent_on(text: str, param: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        parse_json(text)
    assert refused.value.status == 400
    assert refused.value.param == param if param is None else str(refused.value.param).startswith(param)
    with pytest.raises(ApiError, match=r"^arguments"):
        parse_json(text, "arguments")


def test_json_that_can_be_sent_on_is_left_as_it_is() -> None:
    value = {"a": ["é", "\U0001f600", {"b": [[1.5, None]]}] * 100}
    assert parse_json(json.dumps(value)) == value


def test_errors_have_the_shape_of_each_api() -> None:
    error = ApiError(401, "no", code="invalid_api_key")
    assert error.body() == {
        "error": {"message": "no", "type": "authentication_error", "param": None, "code": "invalid_api_key"}
    }
    assert error.body(anthropic=True) == {
        "type": "error",
        "error": {"type": "authentication_error", "message": "no"},
    }
