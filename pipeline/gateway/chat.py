"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pipeline.gateway.answers import ChatAnswer, ChatRequest, End, Whole, check_chats, rendered_call, turn
from pipeline.gateway.bodies import ChatBody, ChatTurn, Object, note_once
from pipeline.gateway.call import Call, event_of
from pipeline.gateway.errors import bad
from pipeline.gateway.settings import free_input, grammar_of, openai_tools, settings_of, told
from pipeline.gateway.steady import steady
from pipeline.text.chat_format import TemplateKind
from pipeline.text.chat_output import Part, ToolCall
from pipeline.text.tokenizer import RESERVED
from protocol.messages import ChatMessage, Welcome

# Harmony's efforts for the others: its models always think.
EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high", "ultra": "high"}
THINKLESS = "this model's chat template has no reasoning, so what a request says of it has no effect"
# Of the template, where the last message is the beginning of the answer
BEGUN = {"add_generation_prompt": False, "continue_final_message": True}
DONE = b"data: [DONE]\n\n"


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


def _variables(body: ChatBody, kind: TemplateKind) -> Object:
    variables = body.chat_template_kwargs or {}
    if reserved := sorted(variables.keys() & RESERVED):
        raise bad("chat_template_kwargs", f"{reserved[0]} is no variable of a chat template")
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise bad("add_generation_prompt", "begins a message; leave it out to continue the last one")
        variables = variables | BEGUN
    elif body.add_generation_prompt is False:
        raise bad("add_generation_prompt", "is not supported here without continue_final_message")
    return variables | reasoning_variables(body.reasoning_effort, kind)


def reasoning_variables(effort: str | None, kind: TemplateKind) -> Object:
    """Returns the template's variables for an effort."""
    if effort is None:
        return {}
    if not kind.thinks:
        note_once(THINKLESS)
        return {}
    return {"reasoning_effort": known_effort(effort, kind), **thinking_variables(effort != "none")}


def known_effort(effort: str, kind: TemplateKind) -> str:
    """Returns an effort as the template knows it."""
    return EFFORTS.get(effort, effort) if kind.calls == "harmony" else effort


def thinking_variables(wanted: bool) -> Object:
    """Returns the template's variables for an answer with reasoning, or without: families name it
    differently."""
    return dict.fromkeys(("enable_thinking", "thinking"), wanted)


def chat_request(body: ChatBody, welcome: Welcome, kind: TemplateKind) -> ChatRequest:
    """Returns what a body asks for. Raises ApiError."""
    check_chats(welcome)
    turns = steady(_turn(message, f"messages[{place}]") for place, message in enumerate(body.messages))
    tools = openai_tools(body.tools, body.tool_choice, body.parallel_tool_calls, kind)
    grammar = grammar_of(body.response_format, "response_format", tools)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad("top_logprobs", "belongs to logprobs: true")
    settings = settings_of(
        body,
        welcome,
        body.max_completion_tokens or body.max_tokens,
        stop=body.stop,
        choices=body.n,
        grammar=grammar,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return ChatRequest(told(turns, grammar), settings, tools, _variables(body, kind))


async def create(call: Call) -> None:
    """Answer a chat."""
    client = await call.client()
    welcome, template = client.welcome, call.service.template
    request = await call.body(ChatBody, lambda body: chat_request(body, welcome, template))
    await Chat(call, client, request).send()


class Chat(ChatAnswer):
    """The answer in OpenAI's form."""

    def _body(self, kind: str, **fields: Any) -> Object:
        head = {"id": f"chatcmpl-{self.call.id}", "created": self.call.created, "model": self.model}
        return head | {"object": kind} | fields

    def body(self, choices: list[Whole]) -> Object:
        """Returns the whole answer."""
        bodies = [self._choice(place, whole) for place, whole in enumerate(choices)]
        return self._body("chat.completion", choices=bodies, usage=self.usage.openai())

    def _choice(self, place: int, whole: Whole) -> Object:
        content = whole.text("content")
        message: Object = {"role": "assistant", "content": content, "refusal": None}
        if reasoning := whole.text("reasoning"):
            message["reasoning_content"] = reasoning
        if whole.calls:
            message["content"] = content or None
            message["tool_calls"] = [self._called(call) for call in whole.calls]
        wanted = self.request.settings.logprobs >= 0
        logprobs = {"content": whole.logprobs, "refusal": None} if wanted else None
        return {"index": place, "message": message, "logprobs": logprobs, "finish_reason": whole.reason}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yields chunks."""
        settings = self.request.settings
        usage: Object = {"usage": None} if settings.include_usage else {}
        calls = [0] * settings.choices
        begun: set[int] = set()

        def chunk(
            place: int, delta: Object, reason: str | None = None, logprobs: Object | None = None
        ) -> bytes:
            choice = {"index": place, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            return event_of(self._body("chat.completion.chunk", choices=[choice], **usage))

        async with aclosing(self.events()) as events:
            async for place, event in events:
                if place not in begun:
                    begun.add(place)
                    yield chunk(place, {"role": "assistant", "content": ""})
                match event:
                    case Part(call=ToolCall() as tool):
                        yield chunk(place, {"tool_calls": [{"index": calls[place]} | self._called(tool)]})
                        calls[place] += 1
                    case Part(kind=kind, text=text):
                        yield chunk(place, {"reasoning_content" if kind == "reasoning" else kind: text})
                    case End(reason=reason):
                        yield chunk(place, {}, reason)
                    case dict():
                        yield chunk(place, {}, logprobs={"content": [event], "refusal": None})
        if settings.include_usage:
            yield event_of(self._body("chat.completion.chunk", choices=[], usage=self.usage.openai()))
        yield DONE

    def _called(self, call: ToolCall) -> Object:
        if call.name in self.request.tools.free:
            custom = {"name": call.name, "input": free_input(call.arguments)}
            return {"id": call.id, "type": "custom", "custom": custom}
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": call.id, "type": "function", "function": function}
