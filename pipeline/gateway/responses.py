"""POST /v1/responses: OpenAI's newer API, as a chat without state: nothing is kept between requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from pipeline.gateway.asgi import event_of
from pipeline.gateway.bodies import (
    CalledFunction,
    CallItem,
    CallPart,
    MessageItem,
    Object,
    OutputItem,
    ReasoningItem,
    ResponsesBody,
)
from pipeline.gateway.body import fitting
from pipeline.gateway.call import Call, check_model
from pipeline.gateway.chat import reasoning_variables
from pipeline.gateway.chat_output import Part, TemplateKind, ToolCall
from pipeline.gateway.chat_run import ChatRequest, ChatRun, Whole, blocks, check_chats, rendered_call, turn
from pipeline.gateway.engine_links import model_name
from pipeline.gateway.errors import bad
from pipeline.gateway.settings import settings_of
from pipeline.gateway.tools import chosen_tools, flat_tools, grammar_of
from protocol.messages import ChatMessage, Welcome

Event = tuple[str, Object]

REFUSED = ("previous_response_id", "conversation", "prompt")
ITEMS: dict[str, type] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "reasoning": ReasoningItem,
}


def response_request(body: ResponsesBody, welcome: Welcome, kind: TemplateKind) -> ChatRequest:
    """Raises ApiError."""
    check_model(body.model, welcome)
    check_chats(welcome)
    for name in REFUSED:
        if getattr(body, name) is not None:
            raise bad(name, "is not supported: nothing is kept between requests; send all of the input")
    if body.background:
        raise bad("background", "is not supported: answers are sent as they are made")
    if "message.output_text.logprobs" in (body.include or ()):
        raise bad("include", "log-probabilities are not supported here; use /v1/chat/completions")
    tools = chosen_tools(
        *flat_tools(body.tools or ()), body.tool_choice, kind, body.parallel_tool_calls is not False
    )
    formats = {"format": body.format} if body.text is None else {"text.format": body.text.format}
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
    found = [turn("system", body.instructions)] if body.instructions else []
    given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    for place, value in enumerate(given):
        where = f"input[{place}]"
        kind = value.get("type") or "message"
        if not isinstance(kind, str) or kind not in ITEMS:
            raise bad(f"{where}.type", f"must be one of {', '.join(ITEMS)}")
        item: Any = fitting(value, ITEMS[kind], where)
        match item:
            case MessageItem():
                found.append(turn(item.role, item.content))
            case CallItem():
                part = CallPart(CalledFunction(item.name, item.arguments), item.call_id)
                found.append(turn("assistant", "", {"tool_calls": [rendered_call(part, where)]}))
            case OutputItem():
                found.append(turn("tool", item.output, {"tool_call_id": item.call_id}))
    return tuple(found)


async def create(call: Call) -> None:
    client = await call.client()
    request = response_request(await call.body(ResponsesBody), client.welcome, call.service.template)
    call.grammar_field = request.settings.grammar_field
    maker = _Maker(call, ChatRun(call, client, request), request, model_name(client.welcome))
    if request.settings.stream:
        await call.stream(maker.stream())
    else:
        await call.answer(maker.whole())


class _Maker:
    """The answer to one request. Its output is reasoning, a message, and calls of tools, in this order."""

    def __init__(self, call: Call, run: ChatRun, request: ChatRequest, model: str) -> None:
        self._call = call
        self._run = run
        self._request = request
        self._model = model
        self._whole = Whole()

    def _body(self, status: str) -> dict[str, Any]:
        usage = self._run.usage
        ended = status != "in_progress"
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        tools = [
            tool["function"] | {"type": "function", "strict": False} for tool in self._request.tools.given
        ]
        return {
            "id": f"resp_{self._call.id}",
            "object": "response",
            "created_at": self._call.created,
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "model": self._model,
            "output": self._output() if ended else [],
            "parallel_tool_calls": self._request.tools.parallel,
            "tool_choice": "required" if self._request.tools.wanted else "auto",
            "tools": tools,
            "store": False,
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.completion,
            }
            if ended
            else None,
        }

    def _output(self) -> list[dict[str, Any]]:
        whole = self._whole
        items = []
        if whole.reasoning:
            content = [{"type": "reasoning_text", "text": whole.reasoning}]
            items.append(
                {"id": f"rs_{self._call.id}", "type": "reasoning", "summary": [], "content": content}
            )
        if whole.content or not whole.calls:
            items.append(self._message(whole.content, "completed"))
        return [*items, *map(_function_call, whole.calls)]

    def _message(self, text: str | None, status: str) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        return {
            "id": f"msg_{self._call.id}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    @property
    def _status(self) -> str:
        return "incomplete" if self._whole.reason == "length" else "completed"

    async def whole(self) -> dict[str, Any]:
        async with aclosing(self._run.events()) as events:
            async for _, event in events:
                self._whole.add(event)
        return self._body(self._status)

    async def stream(self) -> AsyncIterator[bytes]:
        number = 0
        async with aclosing(blocks(self._run, self._whole)) as changes:
            async for change, place, part in changes:
                for kind, value in self._events(change, place, part):
                    yield _event(kind, value, number)
                    number += 1
        yield _event(f"response.{self._status}", {"response": self._body(self._status)}, number)

    def _events(self, change: str, place: int, part: Part) -> list[Event]:
        """Returns the names and values of what the stream says of a change of its blocks."""
        if change == "start":
            body = {"response": self._body("in_progress")}
            return [("response.created", body), ("response.in_progress", body)]
        if part.call is not None:
            return _call_events(part.call, place) if change == "more" else []
        if part.kind == "reasoning":
            item: Object = {"id": f"rs_{self._call.id}", "type": "reasoning", "summary": []}
            if change == "more":
                where = {"output_index": place, "item_id": item["id"], "content_index": 0}
                return [("response.reasoning_text.delta", where | {"delta": part.text})]
            if change == "open":
                return [("response.output_item.added", {"output_index": place, "item": item})]
            return [("response.output_item.done", {"output_index": place, "item": self._output()[0]})]
        where = {"output_index": place, "item_id": f"msg_{self._call.id}", "content_index": 0}
        if change == "more":
            return [("response.output_text.delta", where | {"delta": part.text, "logprobs": []})]
        if change == "open":
            added = {"output_index": place, "item": self._message(None, "in_progress")}
            return [
                ("response.output_item.added", added),
                ("response.content_part.added", where | {"part": _part("")}),
            ]
        text = self._whole.content
        done = {"output_index": place, "item": self._message(text, "completed")}
        return [
            ("response.output_text.done", where | {"text": text, "logprobs": []}),
            ("response.content_part.done", where | {"part": _part(text)}),
            ("response.output_item.done", done),
        ]


def _event(kind: str, value: Object, number: int) -> bytes:
    return event_of({"type": kind, "sequence_number": number} | value, kind)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _function_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id.replace("call_", "fc_"),
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _call_events(call: ToolCall, place: int) -> list[Event]:
    item = _function_call(call)
    where = {"output_index": place, "item_id": item["id"]}
    begun = item | {"arguments": "", "status": "in_progress"}
    return [
        ("response.output_item.added", {"output_index": place, "item": begun}),
        ("response.function_call_arguments.delta", where | {"delta": call.arguments}),
        (
            "response.function_call_arguments.done",
            where | {"arguments": call.arguments, "name": call.name},
        ),
        ("response.output_item.done", {"output_index": place, "item": item}),
    ]
