"""The table of everything that the gateway serves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pipeline.gateway import chat, status
from pipeline.gateway.call import Call

Handler = Callable[[Call], Awaitable[None]]


@dataclass(frozen=True)
class Endpoint:
    """`public`: served without an API key. `anthropic`: errors have Anthropic's shape."""

    method: str
    path: str
    handler: Handler
    public: bool = False
    anthropic: bool = False


ENDPOINTS = (
    Endpoint("GET", "/health", status.health, public=True),
    Endpoint("GET", "/v1/health", status.health, public=True),
    Endpoint("GET", "/v1/models", status.models),
    Endpoint("GET", "/v1/models/{name:path}", status.model),
    Endpoint("POST", "/v1/chat/completions", chat.completions),
)
