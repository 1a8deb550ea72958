"""The answers to one request: choices that the engine computes at once, as one sequence of events, with their
usage and the texts of their tokens; and what the dialects of chats have in common."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.gateway.bodies import CallPart, Content, Object, parse_json
from pipeline.gateway.call import Call, Pieces
from pipeline.gateway.errors import ApiError, bad
from pipeline.gateway.metrics import Meter
from pipeline.gateway.settings import Settings, Tools
from pipeline.gateway.steady import without_bookkeeping
from pipeline.text.chat_format import TemplateKind
from pipeline.text.chat_output import PARSER, ChatOutput, Part, ToolCall, opens_reasoning
from pipeline.text.detokenizer import Detokenizer
from protocol.answer import Answer
from protocol.client import Client
from protocol.errors import ProtocolError
from protocol.messages import ChatMessage, Done, Token, Welcome

# Behind a tool's result some templates begin the answer otherwise than behind a question.
CALLED = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": {}}}
AFTER_TOOL = (
    ChatMessage("user", "x"),
    ChatMessage("assistant", "", json.dumps({"tool_calls": [CALLED]})),
    ChatMessage("tool", "x", json.dumps({"tool_call_id": CALLED["id"]})),
)
MOST_OPENINGS = 256  # different variables of templates whose openings are remembered

TOKEN_BYTES, BEST_BYTES = 400, 72  # of a token that waits, and of each of the best of its step

Event = tuple[int, Token | Done]
Queue = asyncio.Queue[Event | Exception]


async def events_of(call: Call, answers: Iterable[Answer]) -> AsyncGenerator[Event, None]:
    """Yields tokens, and at the end of each answer its Done, with the answer's place. Answers are sent as
    they are taken from `answers`; leaving the loop cancels them all. Tokens that have come and wait for the
    client count as held by `call`. Raises ProtocolError as the first that fails, ApiError where the engine
    has cancelled one, or there is no memory."""
    queue: Queue = asyncio.Queue()
    begun: list[Answer] = []
    tasks: list[asyncio.Task[None]] = []
    try:
        for place, answer in enumerate(answers):
            begun.append(answer)
            tasks.append(asyncio.create_task(_feed(call, queue, place, answer)))
        left = len(begun)
        while left:
            event = await queue.get()
            if isinstance(event, Exception):
                raise event
            call.release(_size(event[1]))
            if isinstance(done := event[1], Done):
                left -= 1
                if done.reason == "cancelled":  # by the engine: a client that cancels does not read on
                    raise ApiError(503, "the engine cancelled this answer: it is shutting down")
            yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for answer in begun:
            with suppress(ProtocolError):
                await answer.cancel()


async def _feed(call: Call, queue: Queue, place: int, answer: Answer) -> None:
    try:
        answer.on_waiting = call.waits
        async for token in answer:
            call.goes_on()
            call.hold(_size(token))
            queue.put_nowait((place, token))
        assert answer.done is not None
        queue.put_nowait((place, answer.done))
    except Exception as e:
        queue.put_nowait(e)


def _size(event: Token | Done) -> int:
    """Returns about the bytes of memory of a token that waits."""
    return TOKEN_BYTES + BEST_BYTES * len(event.top_tokens) if isinstance(event, Token) else 0


class Usage:
    """The tokens of all answers of a request, which the meter counts as well."""

    def __init__(self, meter: Meter) -> None:
        self.prompt = self.cached = self.completion = self.reasoning = 0
        self._fidelity: dict[str, Any] | None = None
        self._meter = meter
        self._began = time.perf_counter()

    def add(self, event: Token | Done, *, new_prompt: bool = True) -> None:
        """Count a token, or the end of an answer. `new_prompt`: not another choice for the same one."""
        seconds = time.perf_counter() - self._began
        if isinstance(event, Token):
            if not self.completion:
                self._meter.first_token.observe(seconds)
            self.completion += 1
            self._meter.tokens.inc()
            return
        cached = int(event.stats.get("kv_reused_tokens", 0))
        prompt = int(event.stats.get("prompt_tokens", 0))
        if new_prompt:
            self.prompt += prompt
            self.cached += cached
        self._fidelity = event.stats.get("fidelity", self._fidelity)
        self._meter.count(event.reason, prompt, cached, seconds)

    def openai(self) -> Object:
        """Returns the form of chats and completions."""
        usage: Object = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }
        return usage if self._fidelity is None else usage | {"fidelity": self._fidelity}


class TokenTexts:
    """The bytes of tokens; none without a tokenizer."""

    def __init__(self, detokenizer: Detokenizer | None) -> None:
        self._detokenizer = detokenizer

    def raw(self, token: int) -> bytes:
        """Returns a token's bytes."""
        return b"" if self._detokenizer is None else self._detokenizer.pieces((token,))[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, without special tokens."""
        return "" if self._detokenizer is None else self._detokenizer.decode(ids)

    def text(self, token: int) -> str:
        """Returns a token's text; one that is no whole characters is shown by its bytes."""
        raw = self.raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def chat(self, token: Token) -> Object:
        """Returns an entry of `logprobs.content`."""
        best = zip(token.top_tokens, token.top_logprobs, strict=True)
        others = [self._entry(other, logprob) for other, logprob in best]
        return self._entry(token.token, token.logprob) | {"top_logprobs": others}

    def _entry(self, token: int, logprob: float) -> Object:
        return {"token": self.text(token), "logprob": logprob, "bytes": list(self.raw(token))}

    def best(self, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, float]:
        """Returns a row of the legacy `top_logprobs`: tokens with the same text are one, the best of them."""
        row: dict[str, float] = {}
        for token, logprob in zip(tokens, logprobs, strict=True):
            row.setdefault(self.text(token), logprob)
        return row


# --- chats ----------------------------------------------------------------------------------------------


def check_chats(welcome: Welcome) -> None:
    """Raises ApiError for a model that has no chats."""
    if not welcome.has_chat_template:
        raise ApiError(400, "this model has no chat template; use /v1/completions")


def turn(role: str, content: Content, extra: Object | None = None) -> ChatMessage:
    """Returns a message as the engine reads it. `extra`: what else the template reads of it."""
    text = content or ""
    if isinstance(text, list):
        text = "".join(part.shown() for part in text)
    if role in ("system", "developer"):
        role, text = "system", without_bookkeeping(text)
    return ChatMessage(role, text, json.dumps(extra, ensure_ascii=False) if extra else "")


def rendered_call(call: CallPart, where: str) -> Object:
    """Returns a tool's call as chat templates read it: its arguments are an object. Raises ApiError."""
    if call.custom is not None:
        name, arguments = call.custom.name, {"input": call.custom.input}
    elif call.function is not None:
        name, given = call.function.name, call.function.arguments
        arguments = _arguments(given) if isinstance(given, str) else given
    else:
        raise bad(f"{where}.function", "is required")
    return {"id": call.id or "", "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(text: str) -> Object:
    """Returns a call's arguments; what a model has written badly stays in the conversation for ever."""
    try:
        return parse_json(text or "{}")
    except ApiError:
        return {"arguments": text}


def hashed(value: Any) -> str:
    """Returns a name for a value."""
    text = json.dumps(value, default=str, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class End:
    """The end of a choice. `reason`: stop, length, tool_calls; `stop`: the stop string that was found."""

    reason: str
    stop: str | None = None


ChatEvent = Part | Object | End
Change = tuple[Literal["start", "open", "more", "close"], int, Part]


@dataclass(frozen=True)
class ChatRequest:
    """`variables`: of the chat template, beside the messages and tools."""

    messages: tuple[ChatMessage, ...]
    settings: Settings
    tools: Tools
    variables: Object

    @property
    def template(self) -> str:
        """Returns what the template reads beside the messages, as JSON."""
        given = self.variables | ({"tools": list(self.tools.given)} if self.tools.given else {})
        return json.dumps(given, ensure_ascii=False) if given else ""


@dataclass
class Whole:
    """A choice, added up. `blocks`: its parts, neighbours of one kind as one; each call is one of its own."""

    blocks: list[Part] = field(default_factory=list)
    reason: str = ""
    stop: str | None = None
    logprobs: Pieces = field(default_factory=Pieces)

    def text(self, kind: str) -> str:
        """Returns all text of one kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def calls(self) -> list[ToolCall]:
        return [block.call for block in self.blocks if block.call is not None]

    def add(self, event: ChatEvent) -> bool:
        """Add a part or the end; returns whether a block begins with it."""
        match event:
            case Part(kind=kind, call=None) if self.blocks and self.blocks[-1].kind == kind:
                self.blocks[-1] = Part(kind, self.blocks[-1].text + event.text)
            case Part():
                self.blocks.append(event)
                return True
            case End(reason=reason, stop=stop):
                self.reason, self.stop = reason, stop
        return False


class ChatAnswer(ABC):
    """The answer to a chat request. A dialect says it as a whole, or as a stream of events."""

    def __init__(self, call: Call, client: Client, request: ChatRequest) -> None:
        self.call = call
        self.request = request
        self.model = call.service.model_name(client.welcome)
        self.usage = Usage(call.service.meter)  # complete when the events have ended
        self.client = client

    @abstractmethod
    def body(self, choices: list[Whole]) -> Object:
        """Returns the whole answer of complete choices."""

    @abstractmethod
    def stream(self) -> AsyncGenerator[bytes, None]:
        """Yields server-sent events. Raises ProtocolError, ApiError."""

    async def send(self) -> None:
        """Send the answer as the request wants it."""
        self.call.grammar_field = self.request.settings.grammar_field
        if self.request.settings.stream:
            await self.call.stream(self.stream())
        else:
            await self.call.answer(self._whole())

    async def _whole(self) -> Object:
        choices = [Whole() for _ in range(self.request.settings.choices)]
        async with aclosing(self.events()) as events:
            async for place, event in events:
                if isinstance(event, dict):
                    self.call.hold(choices[place].logprobs.add(event))
                else:
                    choices[place].add(event)
        return self.body(choices)

    async def changes(self, whole: Whole) -> AsyncGenerator[Change, None]:
        """Yields what a stream says of one choice in dialects whose answers are blocks of one kind each: that
        it starts; of each block, with its place, that it opens, each part of it, and the whole one when it
        closes. `whole` adds the parts up."""
        started, blocks = False, whole.blocks
        async with aclosing(self.events()) as events:
            async for _, event in events:
                if not started:
                    started = True
                    yield "start", 0, Part("content")
                begins = whole.add(event)
                if begins and len(blocks) > 1:
                    yield "close", len(blocks) - 2, blocks[-2]
                if isinstance(event, Part):
                    if begins:
                        yield "open", len(blocks) - 1, event
                    yield "more", len(blocks) - 1, event
        if blocks:
            yield "close", len(blocks) - 1, blocks[-1]

    async def events(self) -> AsyncGenerator[tuple[int, ChatEvent], None]:
        """Yields parts of the choices, each choice's End, and with logprobs an entry for each token, which
        follows the parts of its text."""
        request, kind = self.request, self.call.service.template
        thinking = await self._opens_thinking()
        if kind.thinks or (kind.calls and request.tools.schemas):
            await asyncio.to_thread(__import__, PARSER)
        formed = bool(request.settings.shaping.grammar)  # what follows a grammar begins with no reasoning
        # JSON is no reasoning and no call, whatever its texts say
        shown = TemplateKind() if formed and not request.tools.schemas else kind
        outputs = [
            ChatOutput(shown, request.tools.schemas, thinking=thinking and not formed)
            for _ in range(request.settings.choices)
        ]
        answers = (self._generate(index) for index in range(len(outputs)))
        async with aclosing(events_of(self.call, answers)) as events:
            async for place, event in events:
                self.usage.add(event, new_prompt=place == 0)
                output = outputs[place]
                for part in self._wanted(output.feed(event.text)):
                    self.usage.reasoning += part.kind == "reasoning"
                    yield place, part
                if isinstance(event, Token):
                    if request.settings.logprobs >= 0:
                        texts = TokenTexts(await self.call.service.detokenizer())
                        yield place, texts.chat(event)
                    continue
                for part in self._wanted(output.finish(cut=event.reason == "length")):
                    yield place, part
                yield place, End("tool_calls" if output.calls else event.reason, event.stats.get("stop"))

    def _wanted(self, parts: Iterable[Part]) -> Iterator[Part]:
        """Yields all parts; of an answer that has to call a tool no content, which is a call cut off."""
        demanded = bool(self.request.tools.wanted)
        yield from (part for part in parts if not (demanded and part.kind == "content"))

    def _generate(self, index: int) -> Answer:
        request, end = self.request, self.call.service.template.end
        arguments = request.settings.of_choice(index)
        if request.tools.schemas and not request.tools.parallel and end:
            arguments["stop"] = (*arguments["stop"], end)
        return self.client.generate(
            messages=request.messages,
            template=request.template,
            marks=bool(self.call.service.template.marks),
            **arguments,
        )

    async def _opens_thinking(self) -> bool:
        """Returns whether the template ends a prompt within reasoning. Rendered once for its variables."""
        openings, variables = self.call.service.openings, self.request.variables
        if not self.call.service.template.thinks or "continue_final_message" in variables:
            return False
        after_tool = self.request.messages[-1].role == "tool"
        name = hashed([variables, after_tool])
        if name not in openings:
            template = json.dumps(variables) if variables else ""
            messages = AFTER_TOOL if after_tool else AFTER_TOOL[:1]
            prompt = await self.client.tokenize(messages=messages, template=template)
            while len(openings) >= MOST_OPENINGS:  # by clients' variables there could be any number
                del openings[next(iter(openings))]
            return openings.setdefault(name, opens_reasoning(prompt.ending))
        return openings[name]
