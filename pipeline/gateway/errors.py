"""Refusals and failures as HTTP answers, in OpenAI's shape or Anthropic's."""

from __future__ import annotations

import re
from typing import Any

from protocol.errors import EngineGone, MalformedMessage, ProtocolError, RequestFailed

# by status: what OpenAI's and what Anthropic's clients are told
KINDS = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout_error", "timeout_error"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("service_unavailable_error", "overloaded_error"),
}
TOO_LONG = "context_length_exceeded"
LENGTHS = re.compile(r"(\d+) tokens, the context is (\d+)")


class ApiError(Exception):
    """A request that is not served. `param`: the field that is at fault; `code`: a word for programs."""

    def __init__(self, status: int, text: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.param = param
        self.code = code

    def body(self, anthropic: bool = False) -> dict[str, Any]:
        """Returns what is sent."""
        kind, text = KINDS.get(self.status, KINDS[500])[anthropic], str(self)
        if anthropic:
            if self.code == TOO_LONG and (
                found := LENGTHS.search(text)
            ):  # programs then shorten what they send
                text = f"{self.param}: prompt is too long: {found[1]} tokens > {found[2]} maximum"
            return {"type": "error", "error": {"type": kind, "message": text}}
        error = {"message": text, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def bad(param: str, text: str, code: str | None = None) -> ApiError:
    """Returns the refusal of a field's value."""
    return ApiError(400, f"{param}: {text}", param, code)


def of_engine(error: ProtocolError, prompt: str | None = None, grammar: str | None = None) -> ApiError:
    """Returns what a client sees of an error of the client library. `prompt`, `grammar`: the fields that the
    engine got them from; what else it refuses, the gateway has refused before."""
    match error:
        case RequestFailed() if "try again later" in str(error):
            return ApiError(429, str(error))
        case RequestFailed() if "the grammar cannot be followed" in str(error):
            return _named(grammar, str(error))
        case RequestFailed(usage=True):
            code = TOO_LONG if LENGTHS.search(str(error)) else None
            return _named(grammar if "grammar" in str(error) else prompt, str(error), code)
        case MalformedMessage():
            return _named(prompt, f"the request cannot be sent to the engine: {error}")
        case EngineGone():
            return ApiError(503, str(error))
    return ApiError(500, str(error))


def _named(param: str | None, text: str, code: str | None = None) -> ApiError:
    return bad(param, text, code) if param else ApiError(400, text, code=code)
