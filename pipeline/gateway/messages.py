"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, as coding agents use it."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

from pipeline.gateway.answers import ChatAnswer, ChatRequest, Whole, check_chats
from pipeline.gateway.bodies import CountBody, MessagesBody, Object, note_once
from pipeline.gateway.call import Call, event_of
from pipeline.gateway.chat import BEGUN, THINKLESS, known_effort, thinking_variables
from pipeline.gateway.conversations import Catalogue, Conversation
from pipeline.gateway.errors import bad
from pipeline.gateway.settings import Tools, chosen_tools, flat_tools, grammar_of, settings_of, told
from pipeline.gateway.steady import steady
from pipeline.text.chat_format import TemplateKind
from pipeline.text.chat_output import Part, ToolCall
from protocol.messages import Welcome

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def messages_request(
    body: CountBody, welcome: Welcome, kind: TemplateKind, max_tokens: float = 1
) -> ChatRequest:
    """Returns what a body asks for. `max_tokens`: 1 where only the prompt is wanted. Raises ApiError."""
    check_chats(welcome)
    catalogue = Catalogue(body.tools or ())
    conversation = Conversation(catalogue)
    conversation.add_system(body.system)
    for place, message in enumerate(body.messages):
        conversation.add(message, f"messages[{place}]")
    conversation.end()
    tools = _tools(body, catalogue, kind)
    form, name = body.output_format, "output_format"
    if body.output_config is not None and body.output_config.format is not None:
        if form is not None:
            raise bad(name, "an answer follows one form only; give output_config.format alone")
        form, name = body.output_config.format, "output_config.format"
    grammar = grammar_of(form, name, tools)
    settings = settings_of(
        body,
        welcome,
        max_tokens,
        stop=body.stop_sequences,
        stop_field="stop_sequences",
        grammar=grammar,
    )
    turns, variables = steady(conversation.turns.all()), _variables(body, kind)
    if turns and turns[-1].role == "assistant" and turns[-1].content.strip() and not turns[-1].extra:
        variables = variables | BEGUN
    return ChatRequest(told(turns, grammar), settings, tools, variables)


def _variables(body: CountBody, kind: TemplateKind) -> Object:
    """Returns what the chat template reads beside messages and tools."""
    thinking = None if body.thinking is None else body.thinking.type != "disabled"
    effort = None if body.output_config is None else body.output_config.effort
    if not kind.thinks:
        if thinking or effort is not None:
            note_once(THINKLESS)
        return {}
    variables: Object = {} if thinking is None else thinking_variables(thinking)
    return variables if effort is None else variables | {"reasoning_effort": known_effort(effort, kind)}


def _tools(body: CountBody, catalogue: Catalogue, kind: TemplateKind) -> Tools:
    """Returns what can be called. Raises ApiError."""
    given, _ = flat_tools(catalogue.given)
    _, schemas = flat_tools(catalogue.functions)
    choice = body.tool_choice
    wanted: str | Object | None = None
    if choice is not None:
        wanted = "required" if choice.type == "any" else choice.type
        if choice.type == "tool":
            wanted = {"name": choice.name}
        if catalogue.skipped and (not schemas or choice.name in catalogue.skipped):
            wanted = None  # what it has to call is not here
    parallel = choice is None or not choice.disable_parallel_tool_use
    return chosen_tools(given, schemas, wanted, kind, parallel)


async def create(call: Call) -> None:
    """Answer a conversation."""
    client = await call.client()
    welcome, template = client.welcome, call.service.template
    request = await call.body(
        MessagesBody, lambda body: messages_request(body, welcome, template, body.max_tokens)
    )
    await Messages(call, client, request).send()


async def count_tokens(call: Call) -> None:
    """Send the number of a conversation's tokens."""
    client = await call.client()
    welcome, template = client.welcome, call.service.template
    request = await call.body(CountBody, lambda body: messages_request(body, welcome, template))
    await call.send_json({"input_tokens": await Messages(call, client, request).prompt_tokens()})


class Messages(ChatAnswer):
    """The answer in Anthropic's form."""

    def _body(self, content: list[Object], usage: Object, stop: Object) -> Object:
        head = {"id": f"msg_{self.call.id}", "type": "message", "role": "assistant", "model": self.model}
        return head | {"content": content, "usage": usage} | stop

    def _usage(self) -> Object:
        return {
            "input_tokens": self.usage.prompt - self.usage.cached,
            "cache_read_input_tokens": self.usage.cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self.usage.completion,
        }

    async def prompt_tokens(self) -> int:
        """Returns the length of the prompt; how much of it is cached is known at the end. Raises
        ProtocolError."""
        asked = self.request
        tokenized = await self.client.tokenize(messages=asked.messages, template=asked.template)
        return len(tokenized.ids)

    def body(self, choices: list[Whole]) -> Object:
        """Returns the whole answer."""
        (whole,) = choices
        content = [_block(block, whole=True) for block in whole.blocks or [Part("content")]]
        return self._body(content, self._usage(), _stop(whole))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yields events."""
        whole = Whole()
        async with aclosing(self.changes(whole)) as changes:
            async for change, place, part in changes:
                match change:
                    case "start":
                        none = {"stop_reason": None, "stop_sequence": None}
                        usage = self._usage() | {"input_tokens": await self.prompt_tokens()}
                        message = self._body([], usage | {"output_tokens": 0}, none)
                        yield _event("message_start", {"message": message})
                    case "open":
                        yield _event(
                            "content_block_start",
                            {"index": place, "content_block": _block(part, whole=False)},
                        )
                    case "more":
                        yield _event("content_block_delta", {"index": place, "delta": _delta(part)})
                    case "close":
                        yield _event("content_block_stop", {"index": place})
        yield _event("message_delta", {"delta": _stop(whole), "usage": self._usage()})
        yield _event("message_stop", {})


def _stop(whole: Whole) -> Object:
    if whole.stop is not None and whole.reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": whole.stop}
    return {"stop_reason": REASONS.get(whole.reason, whole.reason), "stop_sequence": None}


def _event(kind: str, value: Object) -> bytes:
    return event_of({"type": kind} | value, kind)


def _block(part: Part, *, whole: bool) -> Object:
    """Returns a whole block, or the empty one that a part begins."""
    text = part.text if whole else ""
    match part:
        case Part(call=ToolCall(id=name) as call):
            given = json.loads(call.arguments) if whole else {}
            return {
                "type": "tool_use",
                "id": re.sub("^call_", "toolu_", name),
                "name": call.name,
                "input": given,
            }
        case Part(kind="reasoning"):
            return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _delta(part: Part) -> Object:
    if part.call is not None:
        return {"type": "input_json_delta", "partial_json": part.call.arguments}
    if part.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": part.text}
    return {"type": "text_delta", "text": part.text}
