"""The gateway as an ASGI application: the table of what it serves, who may send a request, its errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.routing import Match, Route

from pipeline.gateway import chat, completions, info, messages, metrics, pages, responses
from pipeline.gateway.access import Access
from pipeline.gateway.asgi import Receive, Scope, Send, send_error
from pipeline.gateway.call import Call, Service
from pipeline.gateway.errors import ApiError, of_engine
from protocol.errors import ProtocolError

log = logging.getLogger(__name__)

MOST_CALLS = 1024  # requests at once; the engine itself decides which of them run


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
    Endpoint("GET", "/health", info.health, public=True),
    Endpoint("GET", "/v1/health", info.health, public=True),
    Endpoint("GET", "/v1/models", info.models),
    Endpoint("GET", "/v1/models/{name:path}", info.model),
    Endpoint("POST", "/v1/chat/completions", chat.completions, prompt="messages"),
    Endpoint("POST", "/v1/completions", completions.completions, prompt="prompt"),
    Endpoint("POST", "/v1/responses", responses.create, prompt="input"),
    Endpoint("POST", "/v1/messages", messages.create, anthropic=True, prompt="messages"),
    Endpoint("POST", "/v1/messages/count_tokens", messages.count_tokens, anthropic=True, prompt="messages"),
    Endpoint("POST", "/tokenize", info.tokenize, prompt="prompt"),
    Endpoint("POST", "/detokenize", info.detokenize, prompt="tokens"),
    Endpoint("GET", "/tokenizer_info", info.tokenizer_info),
    Endpoint("GET", "/metrics", metrics.metrics),
)


class Front:
    """An ASGI application."""

    def __init__(self, service: Service, access: Access) -> None:
        self._service = service
        self._access = access
        self._routes = [(Route(e.path, _unused, methods=[e.method]), e) for e in ENDPOINTS]
        self._exact = {(e.method, e.path): e for e in ENDPOINTS if "{" not in e.path}
        self.running = 0  # requests
        self.idle = asyncio.Event()
        self.idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status = 0  # of the answer, once it has begun

        async def watched(message: Any) -> None:
            nonlocal status
            status = status or message["status"]
            await send(message)

        anthropic = scope["path"].startswith("/v1/messages")
        self.running += 1
        self.idle.clear()
        try:
            await self._serve(scope, receive, watched, anthropic)
            return
        except ApiError as e:
            error = e
        except ProtocolError as e:
            error = of_engine(e)
        except ConnectionError:
            self._service.meter.disconnects += 1
            return
        except Exception:
            log.exception("a request failed")
            error = ApiError(500, "the gateway failed; its log has the reason")
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()
            if status:
                self._count(scope, status)
        if not status:
            self._count(scope, error.status)
            await send_error(send, error, anthropic)

    def _count(self, scope: Scope, status: int) -> None:
        """By the table's paths, so that strangers cannot add any."""
        known = (scope["method"], scope["path"]) in self._exact
        self._service.meter.requests[scope["path"] if known else "other", status] += 1

    async def _serve(self, scope: Scope, receive: Receive, send: Send, anthropic: bool) -> None:
        endpoint = self._endpoint(scope)
        self._access.check_page(scope)
        key_name = "" if endpoint.public else self._access.client(scope)
        if endpoint.method == "POST":
            if self._service.draining:
                raise ApiError(503, "the server is shutting down")
            if self.running > MOST_CALLS:
                raise ApiError(429, f"{MOST_CALLS} requests are running; try again later")
        call = Call(self._service, scope, receive, send, key_name, anthropic, endpoint.prompt)
        try:
            await endpoint.handler(call)
        except ProtocolError as e:
            raise call.refusal(e) from e

    def _endpoint(self, scope: Scope) -> Endpoint:
        method, path = scope["method"], scope["path"]
        if found := self._exact.get((method, path)):
            return found
        allowed = []
        for route, endpoint in self._routes:
            match, inner = route.matches({**scope, "method": endpoint.method})
            if match is Match.FULL:
                if endpoint.method == method:
                    scope.update(inner)
                    return endpoint
                allowed.append(endpoint.method)
        if allowed:
            raise ApiError(405, f"{method[:20]} is not served at {path[:80]}, but {', '.join(allowed)}")
        raise ApiError(404, f"nothing is served at {path[:80]!r}")


async def _unused() -> None:
    """A Route has an endpoint; only its pattern is used."""
