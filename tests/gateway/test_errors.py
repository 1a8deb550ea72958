"""What clients see of the engine's refusals and failures."""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

import pytest

from pipeline.gateway.bodies import ChatBody, decoded, parse_json
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
        ('{"a":' + "[" * 100_000, "nested too deeply"),
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


def test_errors_have_the_shape_of_each_api() -> None:
    error = ApiError(401, "no", code="invalid_api_key")
    assert error.body() == {
        "error": {"message": "no", "type": "authentication_error", "param": None, "code": "invalid_api_key"}
    }
    assert error.body(anthropic=True) == {
        "type": "error",
        "error": {"type": "authentication_error", "message": "no"},
    }
