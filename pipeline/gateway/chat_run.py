"""A chat request in the engine: what all chat endpoints send, and the parts of the answers that come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pipeline.gateway.call import Call
from pipeline.gateway.chat_output import CLOSE_CALL, ChatOutput, Part, ToolCall
from pipeline.gateway.choices import Usage, events_of, started
from pipeline.gateway.conversation import cache_name, hashed
from pipeline.gateway.settings import Settings
from pipeline.gateway.token_texts import TokenTexts
from pipeline.gateway.tools import Tools
from protocol.client import Client
from protocol.messages import ChatMessage, Token

PARSER = "transformers.utils.chat_parsing"  # takes a second to import
ENDING = 12  # last tokens of a prompt in which <think> may be


@dataclass(frozen=True)
class End:
    """The end of a choice. `reason`: stop, length, tool_calls."""

    reason: str
    stop: str | None = None


ChatEvent = tuple[int, Part | dict[str, Any] | End]


@dataclass(frozen=True)
class ChatRequest:
    """`variables`: of the chat template, beside the messages and tools."""

    messages: tuple[ChatMessage, ...]
    settings: Settings
    tools: Tools
    variables: dict[str, Any]

    @property
    def template(self) -> str:
        found = dict(self.variables)
        if self.tools.given:
            found["tools"] = list(self.tools.given)
        return json.dumps(found, ensure_ascii=False) if found else ""


class ChatRun:
    """One request. `usage` counts when `events` has ended."""

    def __init__(self, call: Call, client: Client, request: ChatRequest) -> None:
        self.usage = Usage(call.service.meter)
        self._call = call
        self._client = client
        self._request = request
        self._texts = TokenTexts(client, call.service.pieces)

    async def events(self) -> AsyncGenerator[ChatEvent, None]:
        """Parts of the choices, each choice's End, and with logprobs an entry for each token, which follows
        the parts of its text. Raises ProtocolError, ApiError."""
        request, kind = self._request, self._call.service.template
        settings = request.settings
        thinking = await self._opens_thinking()
        if kind.thinks or thinking or (kind.calls and request.tools.given):
            await asyncio.to_thread(__import__, PARSER)
        # A forced call is all of the answer.
        forced = bool(request.tools.wanted)
        outputs = [
            ChatOutput(kind, request.tools.schemas, thinking=thinking and not forced)
            for _ in range(settings.choices)
        ]
        name = cache_name(request.messages, self._call.key_name, request.template)
        answers = await started(
            self._client.generate(
                messages=request.messages,
                template=request.template,
                conversation=f"{name}/{index}",
                **self._arguments(index),
            )
            for index in range(settings.choices)
        )
        async with aclosing(events_of(answers)) as events:
            async for place, event in events:
                output = outputs[place]
                for part in output.feed(event.text):
                    self.usage.reasoning += part.kind == "reasoning"
                    yield place, part
                if isinstance(event, Token):
                    self.usage.note_token()
                    if settings.logprobs >= 0:
                        yield place, await self._texts.chat(event)
                    continue
                for part in output.finish():
                    yield place, part
                self.usage.add(answers[place], new_prompt=place == 0)
                yield place, End("tool_calls" if output.calls else event.reason, event.stats.get("stop"))

    def _arguments(self, index: int) -> dict[str, Any]:
        arguments = self._request.settings.of_choice(index)
        tools = self._request.tools
        if tools.given and not tools.parallel and self._call.service.template.calls:
            arguments["stop"] = (*arguments["stop"], CLOSE_CALL)
        return arguments

    async def _opens_thinking(self) -> bool:
        """Whether the template ends a prompt within reasoning. Rendered once for its variables."""
        if not self._call.service.template.thinks:
            return False
        openings, name = self._call.service.openings, hashed(self._request.variables)
        if name not in openings:
            template = json.dumps(self._request.variables) if self._request.variables else ""
            asked = await self._client.tokenize(messages=[ChatMessage("user", "x")], template=template)
            ending = await self._client.tokenize(token_ids=asked.ids[-ENDING:].tolist())
            text = b"".join(ending.pieces).decode(errors="replace")
            openings[name] = (
                text.rpartition("<think>")[1] != "" and "</think>" not in text.rpartition("<think>")[2]
            )
        return openings[name]


@dataclass
class Whole:
    """A choice, added up."""

    content: str = ""
    reasoning: str = ""
    reason: str = ""
    stop: str | None = None

    def __post_init__(self) -> None:
        self.calls: list[ToolCall] = []
        self.logprobs: list[dict[str, Any]] = []

    def add(self, event: Part | dict[str, Any] | End) -> None:
        match event:
            case Part(kind="content", text=text):
                self.content += text
            case Part(kind="reasoning", text=text):
                self.reasoning += text
            case Part(call=call) if call is not None:
                self.calls.append(call)
            case End(reason=reason, stop=stop):
                self.reason, self.stop = reason, stop
            case dict():
                self.logprobs.append(event)


async def whole_choices(run: ChatRun, choices: int) -> list[Whole]:
    found = [Whole() for _ in range(choices)]
    async with aclosing(run.events()) as events:
        async for place, event in events:
            found[place].add(event)
    return found
