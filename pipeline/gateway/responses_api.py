"""POST /v1/responses: OpenAI's newer API, as a chat without state: nothing is kept between requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from pipeline.gateway.body import Fields, kind_of
from pipeline.gateway.call import Call
from pipeline.gateway.chat import EFFORTS, MOST_TOKENS, check_chats
from pipeline.gateway.chat_output import Part, ToolCall
from pipeline.gateway.chat_run import ChatRequest, ChatRun, End, Whole
from pipeline.gateway.conversation import CHANGING, message_of, text_of, tool_call
from pipeline.gateway.errors import bad
from pipeline.gateway.responses import dumps
from pipeline.gateway.served_model import check_model, model_name
from pipeline.gateway.settings import note_unknown, take_settings
from pipeline.gateway.template import TemplateKind
from pipeline.gateway.tools import MOST_TOOLS, chosen, take_format
from protocol.messages import ChatMessage, Welcome

REFUSED = ("previous_response_id", "conversation", "prompt")


def take_request(fields: Fields, welcome: Welcome, kind: TemplateKind) -> ChatRequest:
    """Raises ApiError."""
    check_model(fields.text("model", None), welcome)
    check_chats(welcome)
    for name in REFUSED:
        if fields.any(name) is not None:
            fields.refuse(name, "is not supported: nothing is kept between requests; send all of the input")
    if fields.flag("background"):
        fields.refuse("background", "is not supported: answers are sent as they are made")
    most = fields.integer("max_output_tokens", 1, MOST_TOKENS, welcome.context)
    given = fields.array("tools", None) or []
    tools, schemas = [], {}
    if len(given) > MOST_TOOLS:
        fields.refuse("tools", f"has {len(given)} tools; {MOST_TOOLS} is the most")
    for place, value in enumerate(given):
        tool = Fields(value if isinstance(value, dict) else {}, f"tools[{place}]")
        tool.choice("type", ("function",))
        name, schema = tool.text("name"), tool.object("parameters", {}) or {}
        schemas[name] = schema
        function = {"name": name, "description": tool.text("description", ""), "parameters": schema}
        tools.append({"type": "function", "function": function})
    parallel = fields.flag("parallel_tool_calls", True)
    choice = fields.any("tool_choice")
    wanted = chosen(fields, "tool_choice", tools, schemas, choice, kind, parallel)
    text = fields.within("text")
    if text is not None:
        text.choice("verbosity", ("medium",), None)
    forced, grammar = wanted.grammar(kind), take_format(fields if text is None else text, "format")
    if forced and grammar:
        fields.refuse("tool_choice", "an answer follows text.format or calls a tool; give one of them")
    variables: dict[str, Any] = {}
    reasoning = fields.within("reasoning")
    effort = None if reasoning is None else reasoning.choice("effort", EFFORTS, None)
    if effort is not None:
        if not kind.thinks:
            fields.refuse("reasoning.effort", "this model's chat template has no reasoning")
        variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    if fields.integer("top_logprobs", 0, 20, 0):
        fields.refuse("top_logprobs", "is not supported here; use /v1/chat/completions")
    messages = _messages(fields)
    fields.integer("n", 1, 1, 1)
    if "message.output_text.logprobs" in fields.strings("include"):
        fields.refuse("include", "log-probabilities are not supported here; use /v1/chat/completions")
    settings = take_settings(fields, welcome, most, grammar=forced or grammar)
    return ChatRequest(messages, settings, wanted, variables)


def _messages(fields: Fields) -> tuple[ChatMessage, ...]:
    found = []
    if instructions := fields.text("instructions", None):
        found.append(ChatMessage("system", CHANGING.sub("", instructions)))
    given = fields.any("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        fields.refuse("input", "must be a string or an array of items")
    for place, value in enumerate(given):
        where = f"input[{place}]"
        if not isinstance(value, dict):
            raise bad(where, f"must be an object, not {kind_of(value)}")
        item = Fields(value, where)
        kinds = ("message", "function_call", "function_call_output", "reasoning")
        match item.choice("type", kinds, "message"):
            case "message":
                role = item.choice("role", ("system", "developer", "user", "assistant"))
                text = text_of(item.any("content"), f"{where}.content")
                system = role in ("system", "developer")
                found.append(
                    ChatMessage("system" if system else role, CHANGING.sub("", text) if system else text)
                )
            case "function_call":
                function = {"name": item.any("name"), "arguments": item.any("arguments")}
                call = tool_call({"id": item.text("call_id"), "function": function}, where)
                found.append(message_of("assistant", "", {"tool_calls": [call]}))
            case "function_call_output":
                text = text_of(item.any("output"), f"{where}.output")
                found.append(message_of("tool", text, {"tool_call_id": item.text("call_id")}))
    return tuple(found)


async def create(call: Call) -> None:
    client = await call.client()
    fields = await call.fields()
    request = take_request(fields, client.welcome, call.service.template)
    for name in ("store", "metadata", "user", "include"):
        fields.any(name)
    note_unknown(fields, "/v1/responses")
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

        def event(kind: str, value: dict[str, Any]) -> bytes:
            nonlocal number
            number += 1
            data = dumps({"type": kind, "sequence_number": number - 1} | value)
            return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

        place, open_kind = -1, ""
        item: dict[str, Any] = {"output_index": 0, "item_id": f"msg_{self._call.id}", "content_index": 0}

        def closing() -> list[bytes]:
            """The ends of the item that is open."""
            if open_kind == "content":
                text = self._whole.content
                done = {"output_index": place, "item": self._message(text, "completed")}
                return [
                    event("response.output_text.done", item | {"text": text, "logprobs": []}),
                    event("response.content_part.done", item | {"part": _part(text)}),
                    event("response.output_item.done", done),
                ]
            if open_kind == "reasoning":
                return [
                    event("response.output_item.done", {"output_index": place, "item": self._output()[0]})
                ]
            return []

        begun = False
        async with aclosing(self._run.events()) as events:
            async for _, part in events:
                if not begun:
                    begun = True
                    yield event("response.created", {"response": self._body("in_progress")})
                    yield event("response.in_progress", {"response": self._body("in_progress")})
                if isinstance(part, Part) and part.kind != open_kind:
                    for end in closing():
                        yield end
                    place, open_kind = place + 1, part.kind
                    item["output_index"] = place
                    if part.kind == "content":
                        added = {"output_index": place, "item": self._message(None, "in_progress")}
                        yield event("response.output_item.added", added)
                        yield event("response.content_part.added", item | {"part": _part("")})
                    elif part.kind == "reasoning":
                        empty = {"id": f"rs_{self._call.id}", "type": "reasoning", "summary": []}
                        yield event("response.output_item.added", {"output_index": place, "item": empty})
                elif isinstance(part, Part) and part.kind == "call":
                    place += 1
                self._whole.add(part)
                match part:
                    case Part(kind="content", text=text):
                        yield event("response.output_text.delta", item | {"delta": text, "logprobs": []})
                    case Part(kind="reasoning", text=text):
                        where = {"output_index": place, "item_id": f"rs_{self._call.id}", "content_index": 0}
                        yield event("response.reasoning_text.delta", where | {"delta": text})
                    case Part(call=made) if made is not None:
                        for one in _call_events(made, place):
                            yield event(*one)
                    case End():
                        for end in closing():
                            yield end
        last = self._body(self._status)
        yield event(f"response.{self._status}", {"response": last})


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


def _call_events(call: ToolCall, place: int) -> list[tuple[str, dict[str, Any]]]:
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
