"""A chat model's text taken apart, however it arrives, and said in the dialects."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.gateway.answers import End
from pipeline.gateway.chat_output import ChatOutput, Part, TemplateKind, ToolCall
from pipeline.gateway.messages import Messages
from pipeline.gateway.metrics import Meter
from pipeline.gateway.responses import Response
from pipeline.gateway.settings import Tools

JSON_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
XML_CALL = """<tool_call>
<function=f>
<parameter=a>
1
</parameter>
<parameter=b>
x y
</parameter>
</function>
</tool_call>"""
SCHEMAS = {"f": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}}
TEXT = f"<think>I wonder. {JSON_CALL}</think>\n\nHello {JSON_CALL}\n{JSON_CALL}"


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
XML = TemplateKind(thinks=True, tools=True, calls="xml")
CALL = ("f", '{"a": 1}')


@settings(deadline=None)  # the first example imports the parser
@given(st.lists(st.integers(1, len(TEXT)), max_size=30))
def test_parts_do_not_depend_on_how_the_text_arrives(places: list[int]) -> None:
    wanted = [("reasoning", f"I wonder. {JSON_CALL}"), ("content", "Hello "), CALL, CALL]
    assert read(TEXT, places, JSON) == wanted


@pytest.mark.parametrize(
    "written",
    ["{", "[]", '{"name": "g", "arguments": {}}', '{"name": "f", "arguments": "{"}', "[" * 3000, "null"],
)
def test_what_is_no_call_stays_text(written: str) -> None:
    text = f"<tool_call>{written}</tool_call>"
    assert read(text, [5, 14], JSON) == [("content", text)]


def test_calls_in_xml_have_values_of_the_schemas_types() -> None:
    ((name, arguments),) = read(XML_CALL, [3, 20, 40], XML)
    assert name == "f"
    assert json.loads(arguments) == {"a": 1, "b": "x y"}


def test_arguments_may_be_written_as_a_string_or_left_out() -> None:
    written = ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"name": "f"}')
    text = "".join(f"<tool_call>{call}</tool_call>" for call in written)
    assert read(text, [], JSON) == [CALL, ("f", "{}")]


def test_reasoning_that_the_prompt_has_begun() -> None:
    assert read("so</think>yes", [1], JSON, thinking=True) == [("reasoning", "so"), ("content", "yes")]


def test_a_model_without_a_form_is_not_parsed() -> None:
    assert read(TEXT, [4], TemplateKind()) == [("content", TEXT)]


PARTS = (
    *(Part("reasoning", "I "), Part("reasoning", "see"), Part("content", "a"), Part("content", "b")),
    *(
        Part("call", call=ToolCall("call_1", "f", '{"a": 1}')),
        Part("call", call=ToolCall("call_2", "f", "{}")),
    ),
    Part("content", "c"),
)


async def said(dialect: type[Any]) -> tuple[list[Any], Any]:
    """What a dialect says of PARTS: the events of its stream, and its whole answer."""

    class Scripted(dialect):  # type: ignore[misc]
        async def events(self) -> AsyncGenerator[tuple[int, Part | End], None]:
            for event in (*PARTS, End("stop")):
                yield 0, event

    service = SimpleNamespace(meter=Meter())
    settings = SimpleNamespace(choices=1)
    made = Scripted(
        SimpleNamespace(service=service, id="x", created=1),
        SimpleNamespace(welcome=SimpleNamespace(model="m")),
        SimpleNamespace(tools=Tools(), settings=settings),
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
