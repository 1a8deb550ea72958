"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, as coding agents use it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from pipeline.gateway.body import Fields, kind_of
from pipeline.gateway.call import Call
from pipeline.gateway.chat import MOST_TOKENS, check_chats
from pipeline.gateway.chat_output import Part, ToolCall
from pipeline.gateway.chat_run import ChatRequest, ChatRun, End, whole_choices
from pipeline.gateway.conversation import CHANGING, MOST_MESSAGES, message_of, text_of
from pipeline.gateway.errors import bad
from pipeline.gateway.responses import dumps, send_json
from pipeline.gateway.served_model import check_model, model_name
from pipeline.gateway.settings import note_unknown, take_settings
from pipeline.gateway.template import TemplateKind
from pipeline.gateway.tools import MOST_TOOLS, Grammar, Tools, chosen, take_format
from protocol.messages import ChatMessage, Welcome

EFFORTS = ("low", "medium", "high", "xhigh", "max")
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def take_request(fields: Fields, welcome: Welcome, kind: TemplateKind, *, counted: bool) -> ChatRequest:
    """`counted`: only the prompt is wanted. Raises ApiError."""
    check_model(fields.text("model", None), welcome)
    check_chats(welcome)
    most = 1 if counted else fields.integer("max_tokens", 1, MOST_TOKENS)
    tools = _take_tools(fields, kind)
    variables: dict[str, Any] = {}
    thinking = fields.within("thinking")
    if thinking is not None:
        wanted = thinking.choice("type", ("enabled", "disabled", "adaptive"))
        thinking.integer("budget_tokens", 1, MOST_TOKENS, None)
        if wanted == "enabled" and not kind.thinks:
            fields.refuse("thinking", "this model's chat template has no reasoning")
        variables = {"enable_thinking": wanted != "disabled"}
    config = fields.within("output_config")
    effort = None if config is None else config.choice("effort", EFFORTS, None)
    if effort is not None and kind.thinks:
        variables["reasoning_effort"] = effort
    elif effort not in (None, "high"):  # which is the API's default
        fields.refuse("output_config.effort", "this model's chat template has no reasoning")
    formats = [take_format(fields, "output_format"), take_format(config, "format") if config else Grammar()]
    grammars = [grammar for grammar in (tools.grammar(kind), *formats) if grammar]
    if len(grammars) > 1:
        fields.refuse(
            "tool_choice" if tools.wanted else "output_format", "an answer follows one form; give one"
        )
    fields.integer("n", 1, 1, 1)
    settings = take_settings(
        fields, welcome, most, grammar=grammars[0] if grammars else Grammar(), stop_field="stop_sequences"
    )
    return ChatRequest(_messages(fields), settings, tools, variables)


def _messages(fields: Fields) -> tuple[ChatMessage, ...]:
    given = fields.array("messages")
    if not 1 <= len(given) <= MOST_MESSAGES:
        fields.refuse("messages", f"must have 1 to {MOST_MESSAGES} messages, not {len(given)}")
    found = []
    system = CHANGING.sub("", text_of(fields.any("system"), "system"))
    if system:
        found.append(ChatMessage("system", system))
    for place, value in enumerate(given):
        where = f"messages[{place}]"
        if not isinstance(value, dict):
            raise bad(where, f"must be an object, not {kind_of(value)}")
        message = Fields(value, where)
        role = message.choice("role", ("user", "assistant", "system"))
        found += _turns(role, message.any("content"), f"{where}.content")
    return tuple(found)


def _turns(role: str, content: Any, name: str) -> list[ChatMessage]:
    """A message's blocks as messages of chat templates: results of tools are messages of their own."""
    if not isinstance(content, list):
        return [ChatMessage(role, text_of(content, name))]
    texts: list[str] = []
    extra: dict[str, Any] = {}
    results = []
    for place, block in enumerate(content):
        where = f"{name}[{place}]"
        if not isinstance(block, dict):
            raise bad(where, f"must be an object, not {kind_of(block)}")
        fields = Fields(block, where)
        kinds = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
        match fields.choice("type", kinds):
            case "text":
                texts.append(fields.text("text"))
            case "thinking":
                extra["reasoning_content"] = extra.get("reasoning_content", "") + fields.text("thinking")
            case "tool_use":
                call = {"name": fields.text("name"), "arguments": fields.object("input", {}) or {}}
                calls = extra.setdefault("tool_calls", [])
                calls.append({"id": fields.text("id", ""), "type": "function", "function": call})
            case "tool_result":
                text = text_of(fields.any("content"), f"{where}.content")
                results.append(message_of("tool", text, {"tool_call_id": fields.text("tool_use_id")}))
    if texts or extra or not results:
        results.append(message_of(role, "".join(texts), extra))
    return results


def _take_tools(fields: Fields, kind: TemplateKind) -> Tools:
    given = fields.array("tools", None) or []
    if len(given) > MOST_TOOLS:
        fields.refuse("tools", f"has {len(given)} tools; {MOST_TOOLS} is the most")
    tools, schemas = [], {}
    for place, value in enumerate(given):
        where = f"tools[{place}]"
        if not isinstance(value, dict):
            raise bad(where, f"must be an object, not {kind_of(value)}")
        tool = Fields(value, where)
        tool.choice("type", ("custom",), "custom")
        name, schema = tool.text("name"), tool.object("input_schema")
        schemas[name] = schema
        function = {"name": name, "description": tool.text("description", ""), "parameters": schema}
        tools.append({"type": "function", "function": function})
    choice = fields.within("tool_choice")
    wanted: Any = None
    parallel = True
    if choice is not None:
        wanted = choice.choice("type", ("auto", "any", "tool", "none"))
        parallel = not choice.flag("disable_parallel_tool_use")
        if wanted == "tool":
            wanted = {"name": choice.text("name")}
        wanted = "required" if wanted == "any" else wanted
    return chosen(fields, "tool_choice", tools, schemas, wanted, kind, parallel)


async def create(call: Call) -> None:
    client = await call.client()
    fields = await call.fields()
    request = take_request(fields, client.welcome, call.service.template, counted=False)
    fields.any("metadata")
    note_unknown(fields, "/v1/messages")
    call.grammar_field = request.settings.grammar_field
    run = ChatRun(call, client, request)
    head = {
        "id": f"msg_{call.id}",
        "type": "message",
        "role": "assistant",
        "model": model_name(client.welcome),
    }
    if request.settings.stream:
        await call.stream(_events(run, head))
    else:
        await call.answer(_whole(run, head))


async def count_tokens(call: Call) -> None:
    client = await call.client()
    fields = await call.fields()
    request = take_request(fields, client.welcome, call.service.template, counted=True)
    note_unknown(fields, "/v1/messages/count_tokens")
    found = await client.tokenize(messages=request.messages, template=request.template)
    await send_json(call.send, {"input_tokens": len(found.ids)})


async def _whole(run: ChatRun, head: dict[str, Any]) -> dict[str, Any]:
    whole = (await whole_choices(run, 1))[0]
    content: list[dict[str, Any]] = []
    if whole.reasoning:
        content.append({"type": "thinking", "thinking": whole.reasoning, "signature": ""})
    if whole.content or not (whole.calls or whole.reasoning):
        content.append({"type": "text", "text": whole.content})
    content += [_tool_use(call) | {"input": json.loads(call.arguments)} for call in whole.calls]
    return head | {"content": content, "usage": _usage(run)} | _stop(whole.reason, whole.stop)


def _stop(reason: str, stop: str | None) -> dict[str, Any]:
    found = "stop_sequence" if stop is not None and reason == "stop" else REASONS.get(reason, reason)
    return {"stop_reason": found, "stop_sequence": stop if found == "stop_sequence" else None}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id.replace("call_", "toolu_"), "name": call.name, "input": {}}


def _usage(run: ChatRun) -> dict[str, Any]:
    usage = run.usage
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion,
    }


def _event(kind: str, value: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + dumps({"type": kind} | value) + b"\n\n"


async def _events(run: ChatRun, head: dict[str, Any]) -> AsyncIterator[bytes]:
    started, place, open_kind = False, -1, ""
    ending = End("stop")

    def opened(kind: str, block: dict[str, Any]) -> bytes:
        return _event("content_block_start", {"index": place, "content_block": block})

    def closed() -> bytes:
        return _event("content_block_stop", {"index": place})

    async with aclosing(run.events()) as events:
        async for _, event in events:
            if not started:
                started = True
                usage = {"input_tokens": 0, "output_tokens": 0}
                message = head | {"content": [], "usage": usage, "stop_reason": None, "stop_sequence": None}
                yield _event("message_start", {"message": message})
            if isinstance(event, End):
                ending = event
                continue
            if not isinstance(event, Part):
                continue
            if event.kind != open_kind or event.kind == "call":
                if open_kind:
                    yield closed()
                place, open_kind = place + 1, event.kind
                if event.call is not None:
                    yield opened("call", _tool_use(event.call))
                elif event.kind == "reasoning":
                    yield opened("reasoning", {"type": "thinking", "thinking": "", "signature": ""})
                else:
                    yield opened("content", {"type": "text", "text": ""})
            if event.call is not None:
                delta = {"type": "input_json_delta", "partial_json": event.call.arguments}
            elif event.kind == "reasoning":
                delta = {"type": "thinking_delta", "thinking": event.text}
            else:
                delta = {"type": "text_delta", "text": event.text}
            yield _event("content_block_delta", {"index": place, "delta": delta})
    if open_kind:
        yield closed()
    yield _event("message_delta", {"delta": _stop(ending.reason, ending.stop), "usage": _usage(run)})
    yield _event("message_stop", {})
