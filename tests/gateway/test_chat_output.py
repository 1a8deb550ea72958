"""A chat model's text taken apart, however it arrives, and said in the dialects."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from chat_styles import CALLED, KIMI, STYLES, Style
from chat_styles import SCHEMAS as STYLED_SCHEMAS

from pipeline.gateway.answers import AFTER_TOOL, ChatRequest, End
from pipeline.gateway.bodies import ChatBody, MessagesBody, fitting
from pipeline.gateway.call import Service
from pipeline.gateway.chat import Chat, chat_request
from pipeline.gateway.messages import Messages, messages_request
from pipeline.gateway.metrics import Meter
from pipeline.gateway.response_request import ResponsesBody, response_request
from pipeline.gateway.responses import Response
from pipeline.gateway.settings import Origin, Tools
from pipeline.text.chat_format import TemplateKind
from pipeline.text.chat_output import ChatOutput, Part, ToolCall
from protocol.answer import Answer
from protocol.messages import VERSION, Done, Token, Welcome

SCHEMAS = {"f": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}}


def read(
    text: str, places: list[int], kind: TemplateKind, *, thinking: bool = False
) -> list[tuple[str, str]]:
    """Parts of a text that arrives in pieces, with adjoining ones joined."""
    output = ChatOutput(kind, SCHEMAS, thinking=thinking)
    cuts = sorted({0, len(text), *(place for place in places if place < len(text))})
    found: list[tuple[str, str]] = []
    parts = [part for start, end in pairwise(cuts) for part in output.feed(text[start:end])]
    for part in [*parts, *output.finish()]:
        if part.call is not None:
            found.append((part.call.name, part.call.arguments))
        elif found and found[-1][0] == part.kind:
            found[-1] = (part.kind, found[-1][1] + part.text)
        else:
            found.append((part.kind, part.text))
    return found


JSON = TemplateKind(thinks=True, tools=True, calls="json")
CALL = ("f", '{"a": 1}')


def test_arguments_may_be_written_as_a_string_or_left_out() -> None:
    written = ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"name": "f"}')
    text = "".join(f"<tool_call>{call}</tool_call>" for call in written)
    assert read(text, [], JSON) == [CALL, ("f", "{}")]


PARTS = (
    *(Part("reasoning", "I "), Part("reasoning", "see"), Part("content", "a"), Part("content", "b")),
    *(
        Part("call", call=ToolCall("call_1", "f", '{"a": 1}')),
        Part("call", call=ToolCall("call_2", "f", "{}")),
    ),
    Part("content", "c"),
)


async def said(dialect: type[Any], reason: str = "stop") -> tuple[list[Any], Any]:
    """What a dialect says of PARTS: the events of its stream, and its whole answer."""

    class Scripted(dialect):  # type: ignore[misc]
        async def events(self) -> AsyncGenerator[tuple[int, Part | End], None]:
            for event in (*PARTS, End(reason)):
                yield 0, event

    service = SimpleNamespace(meter=Meter(), model_name=lambda welcome: "m")
    settings = SimpleNamespace(choices=1)
    made = Scripted(
        SimpleNamespace(service=service, id="x", created=1),
        SimpleNamespace(welcome=None, tokenize=StyledEngine(KIMI).tokenize),
        SimpleNamespace(
            **{"tools": Tools(), "settings": settings, "messages": (), "template": ""},
            **{"given": (), "choice": "auto", "seals": False, "origins": {"f": Origin("f")}},
        ),
    )
    events = [json.loads(event.partition(b"data: ")[2]) async for event in made.stream()]
    return events, await made._whole()


async def test_items_of_a_response_are_streamed_and_whole_alike() -> None:
    events, whole = await said(Response)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1] == {"type": "response.completed", "sequence_number": len(events) - 1, "response": whole}
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert items == whole["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", *["function_call"] * 2, "message"]
    assert len({item["id"] for item in items}) == len(items)
    texts = dict.fromkeys((item["id"] for item in items), "")
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] += event["delta"]
    assert list(texts.values()) == ["I see", "ab", '{"a": 1}', "{}", "c"]
    done = [event for event in events if event["type"].endswith(("text.done", "arguments.done"))]
    assert [event.get("text", event.get("arguments")) for event in done] == list(texts.values())


async def test_what_is_cut_off_is_incomplete() -> None:
    events, whole = await said(Response, "length")
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert items == whole["output"]
    assert [item.get("status") for item in items] == [None, *["completed"] * 3, "incomplete"]
    assert (events[-1]["type"], whole["status"]) == ("response.incomplete", "incomplete")


async def test_blocks_of_a_message_are_streamed_and_whole_alike() -> None:
    events, whole = await said(Messages)
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            ((kind, text),) = [(k, v) for k, v in event["delta"].items() if k != "type"]
            blocks[-1] |= (
                {"input": json.loads(text)} if kind == "partial_json" else {kind: blocks[-1][kind] + text}
            )
    assert blocks == whole["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use", "text"]
    assert sum(event["type"] == "content_block_stop" for event in events) == len(blocks)


# --- families' answers in the dialects ---------------------------------------------------------------------

WELCOME = Welcome(VERSION, "e", "m", "f", "cpu", "all-host", True, 9, 1024, True, True)
ASKED = [{"role": "user", "content": "Rain?"}]


class StyledEngine:
    """Answers each request as a style, a few characters a token. `asked`: what it was asked."""

    def __init__(self, style: Style) -> None:
        self.welcome = WELCOME
        self.style = style
        self.asked: list[dict[str, Any]] = []
        self.probed: list[Any] = []

    def generate(self, **fields: Any) -> Answer:
        self.asked.append(fields)
        answer, text = Answer(0, lambda request: None), self.style.answer
        for index in range(0, len(text), 5):
            answer.feed(Token(0, index, 1, text[index : index + 5]))
        answer.feed(Done(0, "stop"))
        return answer

    async def tokenize(self, *, messages: Any, template: str) -> Any:
        self.probed.append(messages)
        return SimpleNamespace(ending=self.style.ending, ids=[])


FORMED = Style(
    "formed",
    "{#- <think> </think> <tool_call> #}{%- if tools %}{% endif %}",
    '{"a": "<think>x</think> <tool_call>"}',
    "<think>\n",
)


def call_of(service: Any) -> Any:
    """What an answer needs of its call; its client reads at once, so nothing waits for it."""
    return SimpleNamespace(
        service=service,
        id="x",
        created=1,
        key_name="",
        hold=lambda size: None,
        release=lambda size: None,
        waits=lambda why: None,
        goes_on=lambda: None,
    )


@pytest.mark.parametrize("dialect", [Chat, Response, Messages])
async def test_an_answer_in_a_form_is_content_where_the_prompt_opens_reasoning(dialect: type[Any]) -> None:
    kind = TemplateKind.of_text(FORMED.template)
    form = {"type": "json_schema", "schema": {"type": "object"}}
    service: Any = Service(SimpleNamespace(), SimpleNamespace(), kind)  # type: ignore[arg-type]
    call = call_of(service)
    if dialect is Chat:
        asked = chat_request(
            fitting({"messages": ASKED, "response_format": form}, ChatBody, ""), WELCOME, kind
        )
    elif dialect is Response:
        asked = response_request(
            fitting({"input": ASKED, "text": {"format": form}}, ResponsesBody, ""), WELCOME, kind
        )
    else:
        given = {"messages": ASKED, "max_tokens": 9, "output_format": form}
        asked = messages_request(fitting(given, MessagesBody, ""), WELCOME, kind)
    events = [event async for _, event in dialect(call, StyledEngine(FORMED), asked).events()]
    parts = [event for event in events if isinstance(event, Part)]
    assert {part.kind for part in parts} == {"content"}
    assert "".join(part.text for part in parts) == FORMED.answer


def request_of(dialect: type[Any], turns: list[Any], kind: TemplateKind) -> ChatRequest:
    """A request in a dialect with the tools of the styles, as a client sends it."""
    body: dict[str, Any] = {"max_tokens": 99, "messages": turns}
    functions = [
        {"name": name, "description": "", "parameters": schema} for name, schema in STYLED_SCHEMAS.items()
    ]
    if dialect is Chat:
        tools = [{"type": "function", "function": function} for function in functions]
        return chat_request(fitting(body | {"tools": tools}, ChatBody, ""), WELCOME, kind)
    if dialect is Response:
        body = {"input": turns, "tools": [{"type": "function", **function} for function in functions]}
        return response_request(fitting(body, ResponsesBody, ""), WELCOME, kind)
    tools = [{"name": f["name"], "description": "", "input_schema": f["parameters"]} for f in functions]
    return messages_request(fitting(body | {"tools": tools}, MessagesBody, ""), WELCOME, kind)


def sent_back(dialect: type[Any], body: dict[str, Any]) -> list[Any]:
    """The next turns of a client: the whole answer as it came, and a result of each call."""
    if dialect is Chat:
        message = body["choices"][0]["message"]
        assert body["choices"][0]["finish_reason"] == "tool_calls"
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "yes"} for c in message["tool_calls"]]
        return [message, *results]
    if dialect is Response:
        calls = [item["call_id"] for item in body["output"] if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": name, "output": "yes"} for name in calls]
        return [*body["output"], *results]
    assert body["stop_reason"] == "tool_use"
    uses = [block["id"] for block in body["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": name, "content": "yes"} for name in uses]
    return [{"role": "assistant", "content": body["content"]}, {"role": "user", "content": results}]


@pytest.mark.parametrize("dialect", [Chat, Response, Messages])
@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
async def test_an_answer_comes_back_as_one_message_in_each_dialect(style: Style, dialect: type[Any]) -> None:
    kind = TemplateKind.of_text(style.template)
    engine = StyledEngine(style)
    service: Any = Service(SimpleNamespace(), SimpleNamespace(), kind)  # type: ignore[arg-type]
    call = call_of(service)
    turns: list[Any] = list(ASKED)
    answer = dialect(call, engine, request_of(dialect, turns, kind))
    body = await answer._whole()
    assert engine.asked[0]["marks"]
    question, said, *results = request_of(dialect, [*turns, *sent_back(dialect, body)], kind).messages
    assert (question.role, question.content) == ("user", "Rain?")
    extra = json.loads(said.extra)
    assert (said.role, said.content.strip()) == ("assistant", "I look.")
    assert extra["reasoning_content"].strip() == "Oslo, then."
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in extra["tool_calls"]]
    assert calls == list(CALLED[: style.calls])
    assert [json.loads(result.extra)["tool_call_id"] for result in results] == [
        call["id"] for call in extra["tool_calls"]
    ]
    if style is KIMI:
        assert [call["id"] for call in extra["tool_calls"]] == ["functions.weather:0", "functions.clock:1"]
    again = dialect(call, engine, request_of(dialect, [*turns, *sent_back(dialect, body)], kind))
    async for _ in again.stream():
        pass
    openings = [asked for asked in engine.probed if asked[0] == AFTER_TOOL[0]]  # beside the prompt's length
    assert openings == [AFTER_TOOL[:1], AFTER_TOOL]
