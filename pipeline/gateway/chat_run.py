"""A chat request in the engine: what all chat endpoints send, and the parts of the answers that come."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.gateway.answers import TokenTexts, Usage, events_of, started
from pipeline.gateway.bodies import CallPart, Content, Object
from pipeline.gateway.body import parse_json
from pipeline.gateway.call import Call
from pipeline.gateway.chat_output import CLOSE_CALL, ChatOutput, Part, ToolCall
from pipeline.gateway.errors import ApiError
from pipeline.gateway.settings import Settings
from pipeline.gateway.tools import Tools
from protocol.client import Client
from protocol.messages import ChatMessage, Token, Welcome

PARSER = "transformers.utils.chat_parsing"  # takes a second to import
ENDING = 12  # last tokens of a prompt in which <think> may be
# Coding agents put a token into the system prompt that changes with every request.
CHANGING = re.compile(r"\bcch=[0-9a-zA-Z]+;?[ \t]*")


def check_chats(welcome: Welcome) -> None:
    """Raises ApiError for a model that has no chats."""
    if not welcome.has_chat_template:
        raise ApiError(400, "this model has no chat template; use /v1/completions")


def turn(role: str, content: Content, extra: Object | None = None) -> ChatMessage:
    """Returns a message as the engine reads it. `extra`: what else the template reads of it."""
    text = content or ""
    if isinstance(text, list):
        text = "".join(part.text or part.refusal for part in text)
    if role in ("system", "developer"):
        role, text = "system", CHANGING.sub("", text)
    return ChatMessage(role, text, json.dumps(extra, ensure_ascii=False) if extra else "")


def rendered_call(call: CallPart, where: str) -> Object:
    """Returns a tool's call as chat templates read it: its arguments are an object. Raises ApiError."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        arguments = parse_json(arguments or "{}", f"{where}.function.arguments")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id or "", "type": "function", "function": function}


def cache_name(messages: Sequence[ChatMessage], *others: Any) -> str:
    """Returns a conversation's name: the same for each of its turns, which share all up to the first user's
    message. `others`: whatever else stands before that in the rendered text."""
    opening = []
    for message in messages:
        opening.append((message.role, message.content, message.extra))
        if message.role == "user":
            break
    return hashed([opening, *others])


def hashed(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


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
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[Object] = field(default_factory=list)

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


Change = tuple[Literal["start", "open", "more", "close"], int, Part]


async def blocks(run: ChatRun, whole: Whole) -> AsyncGenerator[Change, None]:
    """Yields what a stream says of one choice in dialects whose answers are blocks of one kind each: that it
    starts; of each block, with its place, that it opens, each part of it, that it closes. `whole` adds the
    parts up. Raises as `ChatRun.events`."""
    place, opened, started = -1, None, False
    async with aclosing(run.events()) as events:
        async for _, event in events:
            if not started:
                started = True
                yield "start", 0, Part("content")
            whole.add(event)
            if not isinstance(event, Part):
                continue
            if opened is None or event.kind != opened.kind or event.call is not None:
                if opened is not None:
                    yield "close", place, opened
                place, opened = place + 1, event
                yield "open", place, event
            yield "more", place, event
    if opened is not None:
        yield "close", place, opened
