"""POST /v1/responses: OpenAI's newer API, as a chat without state: nothing is kept between requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pipeline.gateway.answers import ChatAnswer, ChatRequest, Whole, check_chats, rendered_call, turn
from pipeline.gateway.bodies import (
    CalledFunction,
    CallItem,
    CallPart,
    Content,
    MessageItem,
    Object,
    OutputItem,
    ReasoningItem,
    ResponsesBody,
    TextOptions,
    fitting,
)
from pipeline.gateway.call import Call, event_of
from pipeline.gateway.chat import reasoning_variables
from pipeline.gateway.errors import bad
from pipeline.gateway.settings import chosen_tools, flat_tools, grammar_of, settings_of
from pipeline.gateway.steady import steady
from pipeline.text.chat_format import TemplateKind
from pipeline.text.chat_output import Part
from protocol.messages import ChatMessage, Welcome

Event = tuple[str, Object]

ITEMS: dict[str, type] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "reasoning": ReasoningItem,
}

# By the kind of a part: of which event the deltas are, and its field with the whole text.
FIELDS = {
    "reasoning": ("reasoning_text", "text"),
    "content": ("output_text", "text"),
    "call": ("function_call_arguments", "arguments"),
}


def response_request(body: ResponsesBody, welcome: Welcome, kind: TemplateKind) -> ChatRequest:
    """Returns what a body asks for. Raises ApiError."""
    check_chats(welcome)
    if "message.output_text.logprobs" in (body.include or ()):
        raise bad("include", "log-probabilities are not supported here; use /v1/chat/completions")
    tools = chosen_tools(
        *flat_tools(body.tools or ()), body.tool_choice, kind, body.parallel_tool_calls is not False
    )
    effort = None if body.reasoning is None else body.reasoning.effort
    settings = settings_of(
        body,
        welcome,
        body.max_output_tokens,
        stop=body.stop,
        grammar=grammar_of((body.text or TextOptions()).format, "text.format", tools.grammar()),
    )
    variables = reasoning_variables(effort, kind)
    return ChatRequest(steady(_messages(body)), settings, tools, variables)


def _messages(body: ResponsesBody) -> tuple[ChatMessage, ...]:
    turns = [turn("system", body.instructions)] if body.instructions else []
    given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    answer = _Answer()
    for place, value in enumerate(given):
        where = f"input[{place}]"
        kind = value.get("type") or "message"
        if not isinstance(kind, str) or kind not in ITEMS:
            raise bad(f"{where}.type", f"must be one of {', '.join(ITEMS)}")
        item: Any = fitting(value, ITEMS[kind], where)
        if not answer.add(item, where):
            turns += answer.turns()
            answer = _Answer()
            match item:
                case OutputItem():
                    turns.append(turn("tool", item.output, {"tool_call_id": item.call_id}))
                case MessageItem() if item.role != "assistant":
                    turns.append(turn(item.role, item.content))
                case _:
                    answer.add(item, where)
    return (*turns, *answer.turns())


@dataclass
class _Answer:
    """What the model wrote at once, which templates read as one message: reasoning, a text, calls."""

    reasoning: str = ""
    content: Content = None
    calls: list[Object] = field(default_factory=list)

    def add(self, item: Any, where: str) -> bool:
        """Add the next item; returns False where it is of another message."""
        match item:
            case ReasoningItem() if self.content is None and not self.calls:
                self.reasoning += "".join(part.text for part in item.content or ())
            case MessageItem(role="assistant") if self.content is None and not self.calls:
                self.content = item.content or ""
            case CallItem():
                part = CallPart(CalledFunction(item.name, item.arguments), item.call_id)
                self.calls.append(rendered_call(part, where))
            case _:
                return False
        return True

    def turns(self) -> list[ChatMessage]:
        """Returns the message, none without a text and calls."""
        if self.content is None and not self.calls:
            return []
        extra = {"reasoning_content": self.reasoning, "tool_calls": self.calls}
        return [turn("assistant", self.content, {name: value for name, value in extra.items() if value})]


async def create(call: Call) -> None:
    """Answer a conversation."""
    client = await call.client()
    request = response_request(await call.body(ResponsesBody), client.welcome, call.service.template)
    await Response(call, client, request).send()


class Response(ChatAnswer):
    """The answer. Its output is items: reasoning, messages and calls of tools."""

    def body(self, choices: list[Whole]) -> Object:
        """Returns the whole answer."""
        (whole,) = choices
        blocks = whole.blocks or [Part("content")]
        output = [self._item(place, block, whole=True) for place, block in enumerate(blocks)]
        return self._body(_status(whole), output, self._usage())

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yields numbered events."""
        number, whole = 0, Whole()
        async with aclosing(self.changes(whole)) as changes:
            async for change, place, part in changes:
                for kind, value in self._events(change, place, part):
                    yield _event(kind, value, number)
                    number += 1
        yield _event(f"response.{_status(whole)}", {"response": self.body([whole])}, number)

    def _body(self, status: str, output: list[Object], usage: Object | None) -> Object:
        tools = self.request.tools
        return {
            "id": f"resp_{self.call.id}",
            "object": "response",
            "created_at": self.call.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": tools.parallel,
            "tool_choice": "required" if tools.wanted else "auto",
            "tools": [tool["function"] | {"type": "function", "strict": False} for tool in tools.given],
            "store": False,
            "usage": usage,
        }

    def _usage(self) -> Object:
        usage = self.usage
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        }

    def _item(self, place: int, part: Part, *, whole: bool) -> Object:
        """Returns a whole item of the output, or the empty one that a part begins."""
        name, status = f"{self.call.id}_{place}", "completed" if whole else "in_progress"
        if part.call is not None:
            call, arguments = part.call, part.call.arguments if whole else ""
            item = {"id": f"fc_{name}", "type": "function_call", "call_id": call.id, "name": call.name}
            return item | {"arguments": arguments, "status": status}
        if part.kind == "reasoning":
            content = {"content": [{"type": "reasoning_text", "text": part.text}]} if whole else {}
            return {"id": f"rs_{name}", "type": "reasoning", "summary": []} | content
        item = {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status}
        return item | {"content": [_part(part.text)] if whole else []}

    def _events(self, change: str, place: int, part: Part) -> list[Event]:
        """Returns the names and values of what the stream says of a change of its blocks."""
        if change == "start":
            body = {"response": self._body("in_progress", [], None)}
            return [("response.created", body), ("response.in_progress", body)]
        item = self._item(place, part, whole=change == "close")
        name, field = FIELDS[part.kind]
        text = part.text if part.call is None else part.call.arguments
        where = {"output_index": place, "item_id": item["id"]}
        if part.call is None:
            where["content_index"] = 0
        of_content: Object = {"logprobs": []} if part.kind == "content" else {}
        if change == "more":
            return [(f"response.{name}.delta", where | {"delta": text} | of_content)]
        state = "done" if change == "close" else "added"
        events = [(f"response.output_item.{state}", {"output_index": place, "item": item})]
        if part.kind == "content":
            shown = _part(text if change == "close" else "")
            events.insert(change == "open", (f"response.content_part.{state}", where | {"part": shown}))
        if change == "close":
            called = {} if part.call is None else {"name": part.call.name}
            events.insert(0, (f"response.{name}.done", where | {field: text} | of_content | called))
        return events


def _status(whole: Whole) -> str:
    return "incomplete" if whole.reason == "length" else "completed"


def _event(kind: str, value: Object, number: int) -> bytes:
    return event_of({"type": kind, "sequence_number": number} | value, kind)


def _part(text: str) -> Object:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
