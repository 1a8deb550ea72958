"""The table of everything that the gateway serves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pipeline.gateway import chat, completions, messages, metrics, responses_api, status, tokens
from pipeline.gateway.call import Call
from pipeline.gateway.dashboard import pages

Handler = Callable[[Call], Awaitable[None]]


@dataclass(frozen=True)
class Endpoint:
    """`public`: served without an API key. `anthropic`: errors have Anthropic's shape.
    `prompt`: the field that has it."""

    method: str
    path: str
    handler: Handler
    public: bool = False
    anthropic: bool = False
    prompt: str | None = None


ENDPOINTS = (
    Endpoint("GET", "/", pages.page, public=True),
    Endpoint("GET", "/dashboard", pages.page, public=True),
    Endpoint("GET", "/dashboard/events", pages.events),
    Endpoint("GET", "/dashboard/{file}", pages.page, public=True),
    Endpoint("GET", "/health", status.health, public=True),
    Endpoint("GET", "/v1/health", status.health, public=True),
    Endpoint("GET", "/v1/models", status.models),
    Endpoint("GET", "/v1/models/{name:path}", status.model),
    Endpoint("POST", "/v1/chat/completions", chat.completions, prompt="messages"),
    Endpoint("POST", "/v1/completions", completions.completions, prompt="prompt"),
    Endpoint("POST", "/v1/responses", responses_api.create, prompt="input"),
    Endpoint("POST", "/v1/messages", messages.create, anthropic=True, prompt="messages"),
    Endpoint("POST", "/v1/messages/count_tokens", messages.count_tokens, anthropic=True, prompt="messages"),
    Endpoint("POST", "/tokenize", tokens.tokenize, prompt="prompt"),
    Endpoint("POST", "/detokenize", tokens.detokenize, prompt="tokens"),
    Endpoint("GET", "/tokenizer_info", tokens.tokenizer_info),
    Endpoint("GET", "/metrics", metrics.metrics),
)
