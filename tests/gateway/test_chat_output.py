"""A chat model's text taken apart, however it arrives."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.gateway.chat_output import ChatOutput, TemplateKind

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
