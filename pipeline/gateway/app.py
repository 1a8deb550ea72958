"""The gateway as an ASGI application: the table of what it serves, who may send a request, its errors; and
the answers about the engine: whether it is there, its model, its figures, the files of its pages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import PurePath
from traceback import clear_frames
from typing import Any, NamedTuple

from pipeline.gateway import chat, completions, messages, properties, responses
from pipeline.gateway.access import Access, Scope, header_of, permission
from pipeline.gateway.bodies import Object
from pipeline.gateway.call import Call, Receive, Send, Service
from pipeline.gateway.dashboard import Feed
from pipeline.gateway.engine_links import model_name
from pipeline.gateway.errors import ApiError
from pipeline.gateway.metrics import MEDIA, exposition
from pipeline.text.chat_format import TemplateKind
from protocol.errors import ProtocolError
from protocol.messages import Welcome

PAGES = {"/": "chat.html", "/dashboard": "dashboard.html", "/dashboard/": "dashboard.html"}
FILES = "/web/"  # before the names of the pages' files
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
ONLY_HERE = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FILE_HEADERS = (
    (b"content-security-policy", ONLY_HERE),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


class Endpoint(NamedTuple):
    """`prompt`: the field that has it; `public`: served without an API key."""

    handler: Callable[[Call], Awaitable[None]]
    method: str = "POST"
    prompt: str | None = None
    public: bool = False


class App:
    """An ASGI application. `feed`: the dashboard's events."""

    def __init__(self, service: Service, access: Access) -> None:
        self._service = service
        self._access = access
        self.feed = Feed(service.links)
        self._running = 0  # requests
        self.idle = asyncio.Event()
        self.idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            return
        meter, call = self._service.meter, Call(self._service, scope, receive, send)
        self._running += 1
        self.idle.clear()
        try:
            await self._service.starts.wait(self._access.account(scope), call.gone)
            await self._serve(call)
        except ConnectionError:
            meter.disconnects.inc()
        except Exception as e:
            await _refuse(call, e)
        finally:
            self._running -= 1
            if not self._running:
                self.idle.set()
            call.kept.close()
            if call.placed:
                self._service.places.leave(call.key_name)
            if call.status:  # by the table's paths, so that strangers cannot add any
                known = scope["path"] if scope["path"] in ENDPOINTS else "other"
                meter.requests.labels(known, call.status).inc()

    async def _serve(self, call: Call) -> None:
        method, path = call.scope["method"], call.scope["path"]
        call.page_headers = self._access.check_page(call.scope)
        endpoint = _endpoint(path)
        self._access.check_site(call.scope, public=endpoint.public)
        if method == "OPTIONS" and header_of(call.scope, b"access-control-request-method"):
            await call.send_bytes(b"", "text/plain", headers=permission(call.scope, endpoint.method))
            return
        if method == "OPTIONS":
            methods = "GET, HEAD" if endpoint.method == "GET" else endpoint.method
            allowed = (b"allow", f"{methods}, OPTIONS".encode())
            await call.send_bytes(b"", "text/plain", headers=(allowed,))
            return
        if endpoint.method != ("GET" if method == "HEAD" else method):
            raise ApiError(405, f"{method[:20]} is not served at {path[:80]}, but {endpoint.method}")
        call.prompt_field = endpoint.prompt
        if not endpoint.public:
            call.key_name = self._access.client(call.scope)
        if method == "POST" and self._service.draining:
            raise ApiError(503, "the server is shutting down")
        if path == EVENTS:
            await call.stream(self.feed.events(call.key_name))
        else:
            await endpoint.handler(call)


async def _refuse(call: Call, error: Exception) -> None:
    """Answer an error, where no answer has begun. The variables of the functions that it ended are cleared:
    they have the body, and live on with the error where a task or a variable among them has it."""
    refusal = call.refusal(error)
    clear_frames(error.__traceback__)
    if not call.status:
        await call.send_error(refusal)


def _endpoint(path: str) -> Endpoint:
    known = ENDPOINTS.get(path)
    if known is None:
        known = next((e for folder, e in FOLDERS.items() if path.startswith(folder)), None)
    if known is None:
        raise ApiError(404, f"nothing is served at {path[:80]!r}")
    return known


@cache
def _contents() -> dict[str, bytes]:
    """Returns the files of the chat and the dashboard by name."""
    return {entry.name: entry.read_bytes() for entry in files("pipeline.gateway").joinpath("web").iterdir()}


async def page(call: Call) -> None:
    """Send a page, or one of its files. They hold nothing about the engine, and are public."""
    path = call.scope["path"]
    name = PAGES.get(path) or path.removeprefix(FILES)
    if (content := _contents().get(name)) is None:
        raise ApiError(404, f"nothing is served at {path[:80]!r}")
    await call.send_bytes(content, f"{KINDS[PurePath(name).suffix]}; charset=utf-8", headers=FILE_HEADERS)


async def health(call: Call) -> None:
    """Say whether requests would be served, and computed."""
    if call.service.draining:
        raise ApiError(503, "the server is shutting down")
    await call.service.health.check()
    await call.send_json({"status": "ok"})


async def models(call: Call) -> None:
    """List the one model, by each of its names."""
    welcome = (await call.client()).welcome
    names = call.service.served or (call.service.model_name(welcome),)
    body: dict[str, Any] = {"data": [_entry(call, welcome, name) for name in names]}
    if call.anthropic:
        body |= {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    else:
        known = [codex_entry(name, welcome.context, call.service.template) for name in names]
        body |= {"object": "list", "models": known}
    await call.send_json(body)


async def model(call: Call) -> None:
    """Describe the model that the path names: where every name is one of the model's, by its own."""
    name = call.scope["path"].removeprefix("/v1/models/")
    welcome = (await call.client()).welcome
    call.service.check_model(name)
    await call.send_json(_entry(call, welcome, name if call.service.served else model_name(welcome)))


def _entry(call: Call, welcome: Welcome, name: str) -> dict[str, Any]:
    if call.anthropic:
        began = datetime.fromtimestamp(int(call.service.started), UTC)
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": began.isoformat().replace("+00:00", "Z"),
            "max_input_tokens": welcome.context,
            "max_tokens": welcome.context,
        }
    return {
        "id": name,
        "object": "model",
        "created": int(call.service.started),
        "owned_by": "tandem",
        "max_model_len": welcome.context,
        "context_length": welcome.context,
    }


async def metrics(call: Call) -> None:
    """Send the counters; while the engine is away, only the gateway's own."""
    stats: dict[str, Any] = {}
    welcome = None
    if call.service.links.ready:
        try:
            client = await call.client()
            stats, welcome = await client.stats(), client.welcome
        except (ApiError, ProtocolError) as e:
            if call.refusal(e).status != 503:
                raise
    await call.send_bytes(exposition(call.service.meter, call.service.links, welcome, stats), MEDIA)


EVENTS = "/dashboard/events"
ENDPOINTS = {
    **dict.fromkeys(PAGES, Endpoint(page, "GET", public=True)),
    EVENTS: Endpoint(page, "GET"),
    "/health": Endpoint(health, "GET", public=True),
    "/v1/models": Endpoint(models, "GET"),
    "/v1/chat/completions": Endpoint(chat.create, prompt="messages"),
    "/v1/completions": Endpoint(completions.create, prompt="prompt"),
    "/v1/responses": Endpoint(responses.create, prompt="input"),
    "/v1/responses/compact": Endpoint(responses.compact, prompt="input"),
    "/v1/messages": Endpoint(messages.create, prompt="messages"),
    "/v1/messages/count_tokens": Endpoint(messages.count_tokens, prompt="messages"),
    "/metrics": Endpoint(metrics, "GET"),
    "/version": Endpoint(properties.release, "GET"),
    "/props": Endpoint(properties.properties, "GET"),
    "/slots": Endpoint(properties.slots, "GET"),
}
FOLDERS = {
    FILES: Endpoint(page, "GET", public=True),
    "/v1/models/": Endpoint(model, "GET"),
}  # with what is in them


# ----------------------------------------------------------------------------------------------------------
# The model as Codex wants to know it, in `models` of GET /v1/models. Codex takes the context of a model
# that it knows nothing of for 272,000 tokens, and shortens no conversation before.


EFFORTS = {"low": "thinks least", "medium": "thinks more", "high": "thinks most"}
# Codex has no words of its own for a model that it does not know. Short, since each token is prefilled.
INSTRUCTIONS = """\
You are a coding agent. You work in a folder of the user's machine, through your tools, until what the
user asks for is done. Look before you change: read the files that matter, and search instead of guessing.
Change only what the task needs, in the style of the code around it; never undo changes that are not
yours. Run the tests or the program where you can, and go on until it works. Follow AGENTS.md where there
is one. At the end say in a few sentences what you have done, and what you could not check."""


def codex_entry(name: str, context: int, kind: TemplateKind) -> Object:
    """Returns what Codex has to know of a model; it refuses an entry that lacks one of these."""
    efforts = EFFORTS if kind.thinks else {}
    return {
        "slug": name,
        "display_name": name,
        "description": "served by Tandem",
        "base_instructions": INSTRUCTIONS,
        "context_window": context,
        "max_context_window": context,
        "auto_compact_token_limit": context * 3 // 4,  # an answer, or the summary, needs room behind it
        "truncation_policy": {"mode": "tokens", "limit": min(10_000, context // 8)},  # of a tool's output
        "default_reasoning_level": "medium" if efforts else None,
        "supported_reasoning_levels": [{"effort": e, "description": d} for e, d in efforts.items()],
        "supports_reasoning_summaries": kind.thinks,
        "shell_type": "shell_command",
        "apply_patch_tool_type": "freeform",
        "supports_parallel_tool_calls": True,
        "supports_search_tool": False,
        "support_verbosity": False,
        "default_verbosity": None,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "availability_nux": None,
        "upgrade": None,
    }
