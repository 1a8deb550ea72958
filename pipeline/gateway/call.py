"""One request on its way through the gateway, with what its handler needs, and what the gateway counts."""

from __future__ import annotations

import secrets
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pipeline.gateway.asgi import EventStream, Receive, Scope, Send, send_json, unless_gone
from pipeline.gateway.body import decoded, read_body
from pipeline.gateway.chat_output import TemplateKind
from pipeline.gateway.dashboard import Feed
from pipeline.gateway.engine_links import EngineLinks, model_name
from pipeline.gateway.errors import ApiError, of_engine
from protocol.client import Client
from protocol.errors import ProtocolError
from protocol.messages import Welcome

T = TypeVar("T")

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass
class Histogram:
    """Seconds, in buckets by their upper bounds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, int]]:
        """As Prometheus has them: bounds, and how many are at most as large."""
        found, below = [], 0
        for bound, count in zip((*map(str, SECONDS), "+Inf"), self.counts, strict=True):
            below += count
            found.append((bound, below))
        return found


@dataclass
class Meter:
    """`requests`: by path and status; `disconnects`: clients that left before their answer's end."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    disconnects: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    first_token: Histogram = field(default_factory=Histogram)
    whole: Histogram = field(default_factory=Histogram)


@dataclass
class Service:
    """What all requests share."""

    links: EngineLinks
    started: float = field(default_factory=time.time)
    draining: bool = False
    template: TemplateKind = TemplateKind()  # noqa: RUF009 - frozen
    meter: Meter = field(default_factory=Meter)
    pieces: dict[int, bytes] = field(default_factory=dict)  # of tokens
    openings: dict[str, bool] = field(default_factory=dict)  # by variables: does the prompt open reasoning
    feed: Feed = field(init=False)  # of the dashboards


@dataclass
class Call:
    """A request. `key_name`: of its API key, "" without keys. `prompt_field`, `grammar_field`: of the
    body, for errors of the engine."""

    service: Service
    scope: Scope
    receive: Receive
    send: Send
    key_name: str
    anthropic: bool
    prompt_field: str | None = None
    grammar_field: str | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def refusal(self, error: ProtocolError) -> ApiError:
        """What the client sees of an error of the engine."""
        return of_engine(error, self.prompt_field, self.grammar_field)

    async def client(self) -> Client:
        """The API key's connection to the engine. Raises ApiError."""
        return await self.service.links.client(self.key_name)

    async def body(self, kind: type[T]) -> T:
        """Returns the body as a struct. Raises ApiError, ConnectionError."""
        return decoded(await read_body(self.scope, self.receive), kind, self.scope["path"])

    async def answer(self, work: Coroutine[Any, Any, dict[str, Any]]) -> None:
        """Send the object that `work` makes; it is cancelled where the client disconnects."""
        await send_json(self.send, await unless_gone(self.receive, work))

    async def stream(self, events: AsyncIterator[bytes]) -> None:
        """Send events; the generator is ended where the client disconnects."""
        await EventStream(events, self.refusal, self.anthropic).send(self.receive, self.send)


def check_model(name: str | None, welcome: Welcome) -> None:
    """Raises ApiError for a model that is not served. Without a name it is the one that is."""
    if name is not None and name not in (model_name(welcome), welcome.model, welcome.engine):
        raise ApiError(
            404,
            f"the model {name[:80]!r} is not served here; it is {model_name(welcome)!r}",
            "model",
            "model_not_found",
        )
