"""What clients see of the engine's refusals and failures."""

from __future__ import annotations

import pytest

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


def test_errors_have_the_shape_of_each_api() -> None:
    error = ApiError(401, "no", code="invalid_api_key")
    assert error.body() == {
        "error": {"message": "no", "type": "authentication_error", "param": None, "code": "invalid_api_key"}
    }
    assert error.body(anthropic=True) == {
        "type": "error",
        "error": {"type": "authentication_error", "message": "no"},
    }
