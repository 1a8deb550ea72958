"""The dashboard over HTTP: its files, which hold nothing about the engine and are public, and its events."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from pipeline.gateway.asgi import send_bytes
from pipeline.gateway.call import Call

KINDS = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "stream.js": "text/javascript; charset=utf-8",
    "experts.js": "text/javascript; charset=utf-8",
    "figures.js": "text/javascript; charset=utf-8",
}
ONLY_HERE = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:"
)
HEADERS = (
    (
        b"content-security-policy",
        f"{ONLY_HERE}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'".encode(),
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


@cache
def _content(name: str) -> bytes:
    return files("pipeline.gateway").joinpath("web", name).read_bytes()


async def page(call: Call) -> None:
    """A file by the last part of the path; the page itself without one that is known."""
    name = call.scope["path"].rpartition("/")[2]
    name = name if name in KINDS else "index.html"
    await send_bytes(call.send, _content(name), KINDS[name], headers=HEADERS)


async def events(call: Call) -> None:
    """What happens, as server-sent events, until the client disconnects."""
    await call.stream(call.service.feed.events())
