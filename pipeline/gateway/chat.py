"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from pipeline.gateway.body import Fields
from pipeline.gateway.call import Call
from pipeline.gateway.chat_output import Part, ToolCall
from pipeline.gateway.chat_run import ChatRequest, ChatRun, End, Whole, whole_choices
from pipeline.gateway.conversation import take_messages
from pipeline.gateway.errors import ApiError
from pipeline.gateway.responses import event_of
from pipeline.gateway.served_model import check_model, model_name
from pipeline.gateway.settings import note_unknown, take_settings
from pipeline.gateway.template import TemplateKind
from pipeline.gateway.tools import take_format, take_tools
from pipeline.text.tokenizer import RESERVED
from protocol.messages import Welcome

DONE = b"data: [DONE]\n\n"
MOST_TOP = 20
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
MOST_TOKENS = 1 << 31


def check_chats(welcome: Welcome) -> None:
    if not welcome.has_chat_template:
        raise ApiError(400, "this model has no chat template; use /v1/completions")


def take_variables(fields: Fields, kind: TemplateKind) -> dict[str, Any]:
    """Of the chat template. Raises ApiError."""
    variables = dict(fields.object("chat_template_kwargs", None) or {})
    if reserved := sorted(variables.keys() & RESERVED):
        fields.refuse("chat_template_kwargs", f"{reserved[0]} is no variable of a chat template")
    for name in ("add_generation_prompt", "continue_final_message"):
        if fields.any(name) is not None:
            variables[name] = fields.flag(name)
    if variables.get("continue_final_message") and variables.setdefault("add_generation_prompt", False):
        fields.refuse("continue_final_message", "belongs to add_generation_prompt: false")
    effort = fields.choice("reasoning_effort", EFFORTS, None)
    if effort is not None:
        if not kind.thinks:
            fields.refuse("reasoning_effort", "this model's chat template has no reasoning")
        variables |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return variables


def take_chat(fields: Fields, welcome: Welcome, kind: TemplateKind) -> ChatRequest:
    """Raises ApiError."""
    check_model(fields.text("model", None), welcome)
    check_chats(welcome)
    messages = take_messages(fields)
    most = fields.integer("max_tokens", 1, MOST_TOKENS, welcome.context)
    most = fields.integer("max_completion_tokens", 1, MOST_TOKENS, most)
    tools = take_tools(fields, kind)
    grammar, forced = take_format(fields), tools.grammar(kind)
    if grammar and forced:
        fields.refuse("tool_choice", "an answer follows response_format or calls a tool; give one of them")
    top = fields.integer("top_logprobs", 0, MOST_TOP, None)
    logprobs = fields.flag("logprobs")
    if top is not None and not logprobs:
        fields.refuse("top_logprobs", "belongs to logprobs: true")
    settings = take_settings(
        fields, welcome, most, grammar=grammar or forced, logprobs=(top or 0) if logprobs else -1
    )
    return ChatRequest(messages, settings, tools, take_variables(fields, kind))


async def completions(call: Call) -> None:
    client = await call.client()
    fields = await call.fields()
    request = take_chat(fields, client.welcome, call.service.template)
    fields.any("user")
    note_unknown(fields, "/v1/chat/completions")
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
