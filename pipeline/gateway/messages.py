"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, as coding agents use it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from pipeline.gateway.asgi import event_of, send_json
from pipeline.gateway.bodies import (
    CountBody,
    Function,
    MessagesBody,
    MessageTurn,
    Object,
    ResultBlock,
    TextBlock,
    ThinkingBlock,
    UseBlock,
)
from pipeline.gateway.call import Call, check_model
from pipeline.gateway.chat_output import Part, TemplateKind, ToolCall
from pipeline.gateway.chat_run import ChatRequest, ChatRun, Whole, blocks, check_chats, turn, whole_choices
from pipeline.gateway.engine_links import model_name
from pipeline.gateway.errors import bad
from pipeline.gateway.settings import settings_of
from pipeline.gateway.tools import Tools, chosen_tools, flat_tools, grammar_of
from protocol.messages import ChatMessage, Welcome

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def messages_request(
    body: CountBody, welcome: Welcome, kind: TemplateKind, max_tokens: float = 1
) -> ChatRequest:
    """`max_tokens`: 1 where only the prompt is wanted. Raises ApiError."""
    check_model(body.model, welcome)
    check_chats(welcome)
    tools = _tools(body, kind)
    formats = {"output_format": body.output_format}
    if body.output_config is not None:
        formats["output_config.format"] = body.output_config.format
    settings = settings_of(
        body,
        welcome,
        max_tokens,
        stop=body.stop_sequences,
        stop_field="stop_sequences",
        grammar=grammar_of(body, formats, tools.grammar(kind)),
    )
    messages = [turn("system", body.system)] if body.system else []
    if messages and not messages[0].content:
        messages = []
    for message in body.messages:
        messages += _turns(message)
    return ChatRequest(tuple(messages), settings, tools, _variables(body, kind))


def _variables(body: CountBody, kind: TemplateKind) -> Object:
    """Returns what the chat template reads beside messages and tools. Raises ApiError."""
    variables: Object = {}
    if body.thinking is not None:
        wanted = body.thinking.type
        if wanted == "enabled" and not kind.thinks:
            raise bad("thinking", "this model's chat template has no reasoning")
        variables = {"enable_thinking": wanted != "disabled"}
    effort = None if body.output_config is None else body.output_config.effort
    if effort is not None and kind.thinks:
        variables["reasoning_effort"] = effort
    elif effort not in (None, "high"):  # which is the API's default
        raise bad("output_config.effort", "this model's chat template has no reasoning")
    return variables


def _turns(message: MessageTurn) -> list[ChatMessage]:
    """Returns a message's blocks as messages of templates: results of tools are messages of their own."""
    if not isinstance(message.content, list):
        return [ChatMessage(message.role, message.content or "")]
    texts: list[str] = []
    extra: Object = {}
    results = []
    for block in message.content:
        match block:
            case TextBlock(text=text):
                texts.append(text)
            case ThinkingBlock(thinking=text):
                extra["reasoning_content"] = extra.get("reasoning_content", "") + text
            case UseBlock():
                function = {"name": block.name, "arguments": block.input or {}}
                calls = extra.setdefault("tool_calls", [])
                calls.append({"id": block.id, "type": "function", "function": function})
            case ResultBlock():
                results.append(turn("tool", block.content, {"tool_call_id": block.tool_use_id}))
    if texts or extra or not results:
        text = json.dumps(extra, ensure_ascii=False) if extra else ""
        results.append(ChatMessage(message.role, "".join(texts), text))
    return results


def _tools(body: CountBody, kind: TemplateKind) -> Tools:
    given = [Function(tool.name, tool.description, tool.input_schema) for tool in body.tools or ()]
    choice = body.tool_choice
    wanted: str | Object | None = None
    if choice is not None:
        wanted = "required" if choice.type == "any" else choice.type
        if choice.type == "tool":
            wanted = {"name": choice.name}
    parallel = choice is None or not choice.disable_parallel_tool_use
    return chosen_tools(*flat_tools(given), wanted, kind, parallel)


async def create(call: Call) -> None:
    client = await call.client()
    body = await call.body(MessagesBody)
    request = messages_request(body, client.welcome, call.service.template, body.max_tokens)
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
    request = messages_request(await call.body(CountBody), client.welcome, call.service.template)
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
    return event_of({"type": kind} | value, kind)


async def _events(run: ChatRun, head: dict[str, Any]) -> AsyncIterator[bytes]:
    whole = Whole()
    async with aclosing(blocks(run, whole)) as changes:
        async for change, place, part in changes:
            match change:
                case "start":
                    usage = {"input_tokens": 0, "output_tokens": 0}
                    empty: Object = {
                        "content": [],
                        "usage": usage,
                        "stop_reason": None,
                        "stop_sequence": None,
                    }
                    yield _event("message_start", {"message": head | empty})
                case "open":
                    yield _event("content_block_start", {"index": place, "content_block": _block(part)})
                case "more":
                    yield _event("content_block_delta", {"index": place, "delta": _delta(part)})
                case "close":
                    yield _event("content_block_stop", {"index": place})
    yield _event("message_delta", {"delta": _stop(whole.reason, whole.stop), "usage": _usage(run)})
    yield _event("message_stop", {})


def _block(part: Part) -> dict[str, Any]:
    """Returns the empty block that a part begins."""
    if part.call is not None:
        return _tool_use(part.call)
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _delta(part: Part) -> dict[str, Any]:
    if part.call is not None:
        return {"type": "input_json_delta", "partial_json": part.call.arguments}
    if part.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": part.text}
    return {"type": "text_delta", "text": part.text}
