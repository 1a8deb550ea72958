"""What a request of OpenAI's responses asks for."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from pipeline.gateway.answers import ChatRequest, check_chats
from pipeline.gateway.bodies import Common, Format, Object, Tokens, ToolObjects, note_once
from pipeline.gateway.chat import reasoning_variables
from pipeline.gateway.errors import bad
from pipeline.gateway.response_items import Conversation
from pipeline.gateway.settings import (
    Grammar,
    Origin,
    Tools,
    chosen_tools,
    flat_tools,
    functions_of,
    grammar_of,
    settings_of,
    told,
)
from pipeline.gateway.steady import steady
from pipeline.text.chat_format import TemplateKind
from protocol.messages import Welcome

SUMMARIZE = """\
Write a summary of this conversation, with which another assistant goes on with the task: it will not see
the messages. Say what the user wants, with every wish and limit; what was done and found, with the names
of files, commands and values that matter; what was decided, and why; what is left to do, and the next
step. Call no tool now. Write the summary and nothing else."""
SUMMARY_PART = 8  # of the context, for a summary


class TextOptions(Struct):
    format: Format | None = None
    verbosity: str | None = None


class Reasoning(Struct):
    effort: str | None = None
    summary: str | None = None


class ResponsesBody(Common, kw_only=True):
    input: str | list[Object]  # each is an item, by its `type`
    instructions: str | None = None
    stop: str | list[str] | None = None
    max_output_tokens: Tokens | None = None
    tools: ToolObjects | None = None  # each by its `type`
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    previous_response_id: str | None = None


@dataclass(frozen=True)
class ResponseRequest(ChatRequest):
    """`given`: the tools as the client wrote them, `choice`: which of them it wants; `origins`: what those
    are to it that can be called, by the model's names. `seals`: it wants reasoning in a form that it can
    send back. `compacts`: a summary is wanted, no answer."""

    given: tuple[Object, ...] = ()
    choice: str | Object = "auto"
    origins: dict[str, Origin] = field(default_factory=dict)
    seals: bool = False
    compacts: bool = False


def response_request(
    body: ResponsesBody, welcome: Welcome, kind: TemplateKind, *, compacts: bool = False
) -> ResponseRequest:
    """Returns what a body asks for. `compacts`: of a conversation that does not say it itself. Raises
    ApiError."""
    check_chats(welcome)
    if body.previous_response_id is not None:
        text = "nothing is kept between requests here; send the whole conversation in input"
        raise bad("previous_response_id", text, "previous_response_not_found")
    include = body.include or ()
    if "message.output_text.logprobs" in include:
        raise bad("include", "log-probabilities are not supported here; use /v1/chat/completions")
    options, reasoning = body.text or TextOptions(), body.reasoning or Reasoning()
    for name, value in (("text.verbosity", options.verbosity), ("reasoning.summary", reasoning.summary)):
        if value is not None:
            note_once(f"/v1/responses: {name} has no effect here")
    conversation = Conversation(functions_of(body.tools or [], "tools"))
    if body.instructions:
        conversation.say("system", body.instructions)
    if isinstance(body.input, str):
        conversation.say("user", body.input)
    else:
        conversation.add_all(body.input)
    compacts = compacts or conversation.compacts
    tools = _tools(body, conversation, kind)
    grammar = grammar_of(options.format, "text.format", tools)
    most = body.max_output_tokens
    if compacts:  # the tools stay in the prompt: all before the last message is known from earlier requests
        conversation.say("user", SUMMARIZE)
        tools, grammar = Tools(tools.given), Grammar()
        most = min(most or welcome.context, welcome.context // SUMMARY_PART)
    return ResponseRequest(
        told(steady(conversation.turns.all()), grammar),
        settings_of(body, welcome, most, stop=body.stop, grammar=grammar),
        tools,
        reasoning_variables(reasoning.effort, kind),
        tuple(body.tools or ()),
        body.tool_choice or "auto",
        {name: origin for name, (_, origin) in conversation.known.items()},
        "reasoning.encrypted_content" in include,
        compacts,
    )


def _tools(body: ResponsesBody, conversation: Conversation, kind: TemplateKind) -> Tools:
    given, _ = flat_tools(conversation.given)
    _, schemas = flat_tools(function for function, _ in conversation.known.values())
    return chosen_tools(given, schemas, body.tool_choice, kind, body.parallel_tool_calls is not False)
