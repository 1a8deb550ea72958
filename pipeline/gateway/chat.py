"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from pipeline.gateway.asgi import event_of
from pipeline.gateway.bodies import ChatBody, ChatTurn, Object, TokenizeBody
from pipeline.gateway.call import Call, check_model
from pipeline.gateway.chat_output import Part, TemplateKind, ToolCall
from pipeline.gateway.chat_run import (
    ChatRequest,
    ChatRun,
    End,
    Whole,
    check_chats,
    rendered_call,
    turn,
    whole_choices,
)
from pipeline.gateway.engine_links import model_name
from pipeline.gateway.errors import bad
from pipeline.gateway.settings import settings_of
from pipeline.gateway.tools import grammar_of, openai_tools
from pipeline.text.tokenizer import RESERVED
from protocol.messages import ChatMessage, Welcome

DONE = b"data: [DONE]\n\n"


def chat_turns(given: list[ChatTurn]) -> tuple[ChatMessage, ...]:
    """Raises ApiError."""
    return tuple(_turn(message, f"messages[{place}]") for place, message in enumerate(given))


def _turn(message: ChatTurn, where: str) -> ChatMessage:
    extra: Object = {}
    if message.tool_calls:
        extra["tool_calls"] = [
            rendered_call(call, f"{where}.tool_calls[{number}]")
            for number, call in enumerate(message.tool_calls)
        ]
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    others = {"reasoning_content": reasoning, "tool_call_id": message.tool_call_id, "name": message.name}
    extra |= {name: text for name, text in others.items() if text is not None}
    return turn(message.role, message.content, extra)


def template_variables(body: ChatBody | TokenizeBody, kind: TemplateKind) -> Object:
    """Returns what the chat template reads beside messages and tools. Raises ApiError."""
    variables = dict(body.chat_template_kwargs or {})
    if reserved := sorted(variables.keys() & RESERVED):
        raise bad("chat_template_kwargs", f"{reserved[0]} is no variable of a chat template")
    for name in ("add_generation_prompt", "continue_final_message"):
        if (value := getattr(body, name)) is not None:
            variables[name] = value
    if variables.get("continue_final_message") and variables.setdefault("add_generation_prompt", False):
        raise bad("continue_final_message", "belongs to add_generation_prompt: false")
    return variables | reasoning_variables(body.reasoning_effort, kind, "reasoning_effort")


def reasoning_variables(effort: str | None, kind: TemplateKind, name: str) -> Object:
    """`name`: of the field with the effort. Raises ApiError."""
    if effort is None:
        return {}
    if not kind.thinks:
        raise bad(name, "this model's chat template has no reasoning")
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def chat_request(body: ChatBody, welcome: Welcome, kind: TemplateKind) -> ChatRequest:
    """Raises ApiError."""
    check_model(body.model, welcome)
    check_chats(welcome)
    messages = chat_turns(body.messages)
    tools = openai_tools(body.tools, body.tool_choice, body.parallel_tool_calls, kind)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad("top_logprobs", "belongs to logprobs: true")
    settings = settings_of(
        body,
        welcome,
        body.max_completion_tokens or body.max_tokens or welcome.context,
        stop=body.stop,
        choices=body.n,
        grammar=grammar_of(body, {"response_format": body.response_format}, tools.grammar(kind)),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return ChatRequest(messages, settings, tools, template_variables(body, kind))


async def completions(call: Call) -> None:
    client = await call.client()
    request = chat_request(await call.body(ChatBody), client.welcome, call.service.template)
    call.grammar_field = request.settings.grammar_field
    run = ChatRun(call, client, request)
    head = {"id": f"chatcmpl-{call.id}", "created": call.created, "model": model_name(client.welcome)}
    if request.settings.stream:
        await call.stream(_chunks(run, request, head))
    else:
        await call.answer(_whole(run, request, head))


async def _whole(run: ChatRun, request: ChatRequest, head: dict[str, Any]) -> dict[str, Any]:
    choices = [
        _choice(place, whole, request)
        for place, whole in enumerate(await whole_choices(run, request.settings.choices))
    ]
    return head | {"object": "chat.completion", "choices": choices, "usage": run.usage.openai()}


def _choice(place: int, whole: Whole, request: ChatRequest) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": whole.content, "refusal": None}
    if whole.reasoning:
        message["reasoning_content"] = whole.reasoning
    if whole.calls:
        message["content"] = whole.content or None
        message["tool_calls"] = [_call(call) for call in whole.calls]
    logprobs = {"content": whole.logprobs, "refusal": None} if request.settings.logprobs >= 0 else None
    return {"index": place, "message": message, "logprobs": logprobs, "finish_reason": whole.reason}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


async def _chunks(run: ChatRun, request: ChatRequest, head: dict[str, Any]) -> AsyncIterator[bytes]:
    head = head | {"object": "chat.completion.chunk"}
    if request.settings.include_usage:
        head["usage"] = None
    calls = [0] * request.settings.choices
    begun: set[int] = set()

    def chunk(
        place: int, delta: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": place, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return event_of(head | {"choices": [choice]})

    async with aclosing(run.events()) as events:
        async for place, event in events:
            if place not in begun:
                begun.add(place)
                yield chunk(place, {"role": "assistant", "content": ""})
            match event:
                case Part(kind="content", text=text):
                    yield chunk(place, {"content": text})
                case Part(kind="reasoning", text=text):
                    yield chunk(place, {"reasoning_content": text})
                case Part(call=tool) if tool is not None:
                    yield chunk(place, {"tool_calls": [{"index": calls[place]} | _call(tool)]})
                    calls[place] += 1
                case End(reason=reason):
                    yield chunk(place, {}, reason)
                case dict():
                    yield chunk(place, {}, logprobs={"content": [event], "refusal": None})
    if request.settings.include_usage:
        yield event_of(head | {"choices": [], "usage": run.usage.openai()})
    yield DONE
