"""One request on its way through the gateway, with what its handler needs."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.gateway.body import Fields, read_json
from pipeline.gateway.engine_links import EngineLinks
from pipeline.gateway.errors import ApiError, of_engine
from pipeline.gateway.meter import Meter
from pipeline.gateway.responses import EventStream, send_json, unless_gone
from pipeline.gateway.template import TemplateKind
from pipeline.gateway.types import Receive, Scope, Send
from protocol.client import Client
from protocol.errors import ProtocolError

if TYPE_CHECKING:
    from pipeline.gateway.dashboard.feed import Feed


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

    async def fields(self) -> Fields:
        """The body's. Raises ApiError, ConnectionError."""
        return Fields(await read_json(self.scope, self.receive))

    async def answer(self, work: Coroutine[Any, Any, dict[str, Any]]) -> None:
        """Send the object that `work` makes; it is cancelled where the client disconnects."""
        await send_json(self.send, await unless_gone(self.receive, work))

    async def stream(self, events: AsyncIterator[bytes]) -> None:
        """Send events; the generator is ended where the client disconnects."""
        await EventStream(events, self.refusal, self.anthropic).send(self.receive, self.send)
