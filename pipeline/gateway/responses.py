"""POST /v1/responses: OpenAI's newer API, as a chat without state: nothing is kept between requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pipeline.gateway.answers import ChatAnswer, ChatRequest, Whole, check_chats, rendered_call, turn
from pipeline.gateway.bodies import (
    CalledFunction,
    CallItem,
    CallPart,
    MessageItem,
    Object,
    OutputItem,
    ReasoningItem,
    ResponsesBody,
    fitting,
)
from pipeline.gateway.call import Call, event_of
from pipeline.gateway.chat import reasoning_variables
from pipeline.gateway.chat_output import Part, TemplateKind, ToolCall
from pipeline.gateway.errors import bad
from pipeline.gateway.settings import chosen_tools, flat_tools, grammar_of, settings_of
from protocol.messages import ChatMessage, Welcome

Event = tuple[str, Object]

ITEMS: dict[str, type] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "reasoning": ReasoningItem,
}


def response_request(body: ResponsesBody, welcome: Welcome, kind: TemplateKind) -> ChatRequest:
    """Returns what a body asks for. Raises ApiError."""
    check_chats(body.model, welcome)
    if "message.output_text.logprobs" in (body.include or ()):
        raise bad("include", "log-probabilities are not supported here; use /v1/chat/completions")
    tools = chosen_tools(
        *flat_tools(body.tools or ()), body.tool_choice, kind, body.parallel_tool_calls is not False
    )
    formats = {} if body.text is None else {"text.format": body.text.format}
    effort = None if body.reasoning is None else body.reasoning.effort
    settings = settings_of(
        body,
        welcome,
        body.max_output_tokens or welcome.context,
        stop=body.stop,
        grammar=grammar_of(body, formats, tools.grammar(kind)),
    )
    variables = reasoning_variables(effort, kind, "reasoning.effort")
    return ChatRequest(_messages(body), settings, tools, variables)


def _messages(body: ResponsesBody) -> tuple[ChatMessage, ...]:
    turns = [turn("system", body.instructions)] if body.instructions else []
    given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    for place, value in enumerate(given):
        where = f"input[{place}]"
        kind = value.get("type") or "message"
        if not isinstance(kind, str) or kind not in ITEMS:
            raise bad(f"{where}.type", f"must be one of {', '.join(ITEMS)}")
        item: Any = fitting(value, ITEMS[kind], where)
        match item:
            case MessageItem():
                turns.append(turn(item.role, item.content))
            case CallItem():
                part = CallPart(CalledFunction(item.name, item.arguments), item.call_id)
                turns.append(turn("assistant", "", {"tool_calls": [rendered_call(part, where)]}))
            case OutputItem():
                turns.append(turn("tool", item.output, {"tool_call_id": item.call_id}))
    return tuple(turns)


async def create(call: Call) -> None:
    """Answer a conversation."""
    client = await call.client()
    request = response_request(await call.body(ResponsesBody), client.welcome, call.service.template)
    await Response(call, client, request).send()


class Response(ChatAnswer):
    """The answer. Its output is reasoning, a message, and calls of tools, in this order."""

    async def whole(self) -> Object:
        """Returns the whole answer."""
        (whole,) = await self.wholes()
        return self._body(_status(whole), whole)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yields numbered events."""
        number, whole = 0, Whole()
        async with aclosing(self.blocks(whole)) as changes:
            async for change, place, part in changes:
                for kind, value in self._events(change, place, part, whole):
                    yield _event(kind, value, number)
                    number += 1
        status = _status(whole)
        yield _event(f"response.{status}", {"response": self._body(status, whole)}, number)

    def _body(self, status: str, whole: Whole | None = None) -> Object:
        """Returns the response; without `whole` as it is when it begins."""
        tools = self.request.tools
        return {
            "id": f"resp_{self.call.id}",
            "object": "response",
            "created_at": self.call.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": [] if whole is None else self._output(whole),
            "parallel_tool_calls": tools.parallel,
            "tool_choice": "required" if tools.wanted else "auto",
            "tools": [tool["function"] | {"type": "function", "strict": False} for tool in tools.given],
            "store": False,
            "usage": None if whole is None else self._usage(),
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

    def _output(self, whole: Whole) -> list[Object]:
        items = [self._reasoning(whole.reasoning)] if whole.reasoning else []
        if whole.content or not whole.calls:
            items.append(self._message([_part(whole.content)], "completed"))
        return [*items, *map(_function_call, whole.calls)]

    def _reasoning(self, text: str) -> Object:
        content = {"content": [{"type": "reasoning_text", "text": text}]} if text else {}
        return {"id": f"rs_{self.call.id}", "type": "reasoning", "summary": []} | content

    def _message(self, content: list[Object], status: str) -> Object:
        head = {"id": f"msg_{self.call.id}", "type": "message", "role": "assistant"}
        return head | {"status": status, "content": content}

    def _events(self, change: str, place: int, part: Part, whole: Whole) -> list[Event]:
        """Returns the names and values of what the stream says of a change of its blocks."""
        if change == "start":
            body = {"response": self._body("in_progress")}
            return [("response.created", body), ("response.in_progress", body)]
        if part.call is not None:
            return _call_events(part.call, place) if change == "more" else []
        reasons = part.kind == "reasoning"
        name = "rs" if reasons else "msg"
        where = {"output_index": place, "item_id": f"{name}_{self.call.id}", "content_index": 0}
        if reasons:
            if change == "more":
                return [("response.reasoning_text.delta", where | {"delta": part.text})]
            if change == "open":
                return [_item("added", place, self._reasoning(""))]
            return [_item("done", place, self._reasoning(whole.reasoning))]
        if change == "more":
            return [("response.output_text.delta", where | {"delta": part.text, "logprobs": []})]
        if change == "open":
            added = _item("added", place, self._message([], "in_progress"))
            return [added, ("response.content_part.added", where | {"part": _part("")})]
        return [
            ("response.output_text.done", where | {"text": whole.content, "logprobs": []}),
            ("response.content_part.done", where | {"part": _part(whole.content)}),
            _item("done", place, self._message([_part(whole.content)], "completed")),
        ]


def _status(whole: Whole) -> str:
    return "incomplete" if whole.reason == "length" else "completed"


def _event(kind: str, value: Object, number: int) -> bytes:
    return event_of({"type": kind, "sequence_number": number} | value, kind)


def _item(change: str, place: int, item: Object) -> Event:
    return f"response.output_item.{change}", {"output_index": place, "item": item}


def _part(text: str) -> Object:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _function_call(call: ToolCall) -> Object:
    return {
        "id": call.id.replace("call_", "fc_"),
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _call_events(call: ToolCall, place: int) -> list[Event]:
    item, name = _function_call(call), "response.function_call_arguments"
    where = {"output_index": place, "item_id": item["id"]}
    return [
        _item("added", place, item | {"arguments": "", "status": "in_progress"}),
        (f"{name}.delta", where | {"delta": call.arguments}),
        (f"{name}.done", where | {"arguments": call.arguments, "name": call.name}),
        _item("done", place, item),
    ]
