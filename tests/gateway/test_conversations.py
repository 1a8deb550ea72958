"""Conversations of Anthropic's API as templates read them, and what stays the same of their prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise, starmap
from typing import Any

import pytest
from agent_requests import ADDED, IMAGE, NOTES, RULES, TOOLS, conversation, counter
from chat_styles import STYLES, Style
from embedded_tokenizer import embedded_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from transformers.utils.chat_template_utils import render_jinja_template

from pipeline.gateway.answers import ChatRequest
from pipeline.gateway.bodies import MessagesBody, decoded
from pipeline.gateway.errors import ApiError
from pipeline.gateway.messages import messages_request
from pipeline.gateway.response_request import ResponsesBody, response_request
from pipeline.gateway.steady import steady
from pipeline.text.chat_format import TemplateKind
from pipeline.text.chat_history import as_template_reads
from protocol.messages import ChatMessage, Sampling, Welcome

WELCOME = Welcome(1, "e", "m", "f", "cpu", "p", True, 4096, 8192, True, True, sampling=Sampling())
KIND = TemplateKind(thinks=True, tools=True, calls="json")
WORDS = "type text content source data tool tool_name name tool_use_id input definition input_schema".split()
KINDS = """text image document search_result tool_use tool_result tool_reference tool_addition tool_removal
thinking server_tool_use compaction x custom bash_1 web_search_1 tool_search_1""".split()
CALL = {"type": "tool_use", "id": "t", "name": "Read", "input": {}}


def read(kind: TemplateKind = KIND, **fields: Any) -> ChatRequest:
    body = json.dumps({"max_tokens": 4} | fields).encode()
    return messages_request(decoded(body, MessagesBody, "/v1/messages"), WELCOME, kind)


def turns(messages: list[Any], **fields: Any) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in read(messages=messages, **fields).messages]


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def result(*content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t", "content": list(content)}


def shared(before: Sequence[Any], now: Sequence[Any]) -> int:
    """Returns the length of what both begin with."""
    pairs = enumerate(zip(before, now, strict=False))
    return next((place for place, (old, new) in pairs if old != new), min(len(before), len(now)))


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_an_answer_that_the_client_has_begun_goes_on(style: Style) -> None:
    begun = {"role": "assistant", "content": [text('{"a":')]}
    request = read(TemplateKind.of_text(style.template), messages=[user(text("JSON?")), begun])
    written = [{"role": message.role, "content": message.content} for message in request.messages]
    ((prompt,), _) = render_jinja_template([written], chat_template=style.template, **request.variables)
    assert prompt.endswith('{"a":')
    for block in (CALL, text(" ")):  # nothing to go on with
        last = {"role": "assistant", "content": [block]}
        assert read(messages=[user(text("JSON?")), last]).variables == {}


def test_blocks_are_texts_or_named_or_left_out() -> None:
    found = {"type": "search_result", "title": "T", "source": "http://a", "content": [text("found")]}
    answer = [{"type": "server_tool_use", "id": "s"}, text("Yes."), {"type": "x_tool_result", "content": []}]
    answer.append({"type": "compaction", "content": " So far."})
    left_out = "[image left out: only texts can be read here]"
    assert turns(
        [
            user(text("See"), IMAGE, NOTES),
            {"role": "assistant", "content": [*answer, CALL]},
            user(result(found, {"type": "new_block"}), text("<system-reminder>r</system-reminder>")),
            {"role": "assistant", "content": "Done."},
            user(text("And?")),
            user(text("Well?")),
        ]
    ) == [
        ("user", f"See\n\n{left_out}\n\nThe notes."),
        ("assistant", "Yes. So far."),
        (
            "tool",
            "T (http://a)\nfound\n\n[new_block left out: only texts can be read here]"
            "\n\n<system-reminder>r</system-reminder>",
        ),
        ("assistant", "Done."),
        ("user", "And?\n\nWell?"),
    ]


def test_a_system_message_stays_where_it_is_said() -> None:
    def system(text: str) -> dict[str, Any]:
        return {"role": "system", "content": text}

    called = {"role": "assistant", "content": [CALL]}
    said = [system("Be brief."), user(text("Q")), system("Note."), called, system("Late."), user(result())]
    kept = [
        ("system", "Rules.\n\nBe brief."),
        ("user", "Q\n\n<system-reminder>\nNote.\n</system-reminder>"),
        ("assistant", ""),
        ("tool", "<system-reminder>\nLate.\n</system-reminder>\n\n" + counter(5)),
    ]
    assert turns([*said, system(counter(5))], system="Rules.") == kept
    assert turns([*said[:4], system("Late.")], system="Rules.")[-1] == (
        "user",
        kept[3][1].partition("\n\n")[0],
    )
    answered = [*said, system(counter(5)), {"role": "assistant", "content": "A"}, system("More.")]
    assert turns(answered, system="Rules.")[:4] == kept


@pytest.mark.parametrize(
    ("message", "place"),
    [
        (user({"type": "text"}), "messages[0].content[0].text"),
        (user({"text": "x"}), "messages[0].content[0].type"),
        (user(result({"type": 5})), "messages[0].content[0].content[0].type"),
        (user({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
        ({"role": "assistant", "content": [{"type": "tool_use"}]}, "messages[0].content[0].name"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
    ],
)
def test_a_broken_block_is_named_with_its_place(message: dict[str, Any], place: str) -> None:
    with pytest.raises(ApiError, match=r"is required|[Ii]nvalid enum") as refused:
        read(messages=[message])
    assert refused.value.param == place


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=8,
)
BLOCKS = st.dictionaries(st.sampled_from(WORDS), JSON | st.sampled_from(KINDS), max_size=6)


@settings(max_examples=60)
@given(st.data())
def test_whatever_is_sent_is_read_or_named(data: st.DataObject) -> None:
    def drawn(blocks: int) -> list[Any]:
        found = data.draw(st.lists(BLOCKS, max_size=blocks))
        return [{"type": data.draw(st.sampled_from(KINDS))} | block for block in found]

    roles = data.draw(st.lists(st.sampled_from(["system", "assistant", "user"]), min_size=1, max_size=5))
    body = {"messages": [{"role": role, "content": drawn(3)} for role in roles], "tools": drawn(3)}
    with suppress(ApiError):
        assert all(isinstance(m.content, str) for m in read(**body, system=drawn(2)).messages)


def test_tools_are_those_that_a_client_can_run() -> None:
    def names(*tools: Any, **fields: Any) -> tuple[list[str], list[str]]:
        asked = read(messages=[user(text("x"))], tools=[*TOOLS, *tools], **fields).tools
        return [tool["function"]["name"] for tool in asked.given], list(asked.schemas)

    given = ["Read", "Task", "bash"]
    assert names() == (given, [*given, "Deploy"])
    # which the provider would search for
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    assert names(search) == ([*given, "Deploy"], [*given, "Deploy"])
    assert names(tool_choice={"type": "none"}) == (given, [])
    assert names(tool_choice={"type": "tool", "name": "web_search"}) == (given, [*given, "Deploy"])
    assert read(messages=[user()], tools=TOOLS[-3:], tool_choice={"type": "any"}).tools.schemas == {}
    with pytest.raises(ApiError, match="must name one of the tools"):
        names(tool_choice={"type": "tool", "name": "other"})


def test_a_deferred_tool_is_described_where_the_conversation_names_it() -> None:
    inline = {"type": "tool_addition", "tool": {"definition": {"name": "Inline", "input_schema": {}}}}
    asked = read(messages=[user(text("x")), {"role": "system", "content": [ADDED, inline]}], tools=TOOLS)
    assert '"Deploys."' in asked.messages[0].content
    assert '"name": "Inline"' in asked.messages[0].content
    assert set(asked.tools.schemas) == {"Read", "Task", "bash", "Deploy", "Inline"}


def test_a_short_body_makes_no_long_prompt() -> None:
    long = {"name": "x", "input_schema": {}, "description": "y" * 1000, "defer_loading": True}
    named = {"type": "tool_reference", "tool_name": "x"}
    (message,) = read(messages=[user(*[named] * 1000)], tools=[long]).messages
    assert message.content.count("y" * 1000) == 1
    assert message.content.count("[The function x can be called.]") == 999
    again = {"type": "tool_addition", "tool": {"definition": long | {"description": "z"}}}
    (message,) = read(messages=[user(named, again, named)], tools=[long]).messages
    assert message.content.count('"z"') == 1


def test_thousands_of_messages_of_one_side_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = []
    monkeypatch.setattr(
        "pipeline.gateway.conversations.replace", lambda *a, **k: joined.append(1) or replace(*a, **k)
    )
    (message,) = read(messages=[user(text("x"))] * 4000).messages
    assert message.content == "\n\n".join(["x"] * 4000)
    items = {"input": [{"role": "user", "content": "x"}] * 5000}
    body = decoded(json.dumps(items).encode(), ResponsesBody, "/v1/responses")
    (message,) = response_request(body, WELCOME, KIND).messages
    assert message.content == "\n\n".join(["x"] * 5000)
    assert len(joined) == 2


def test_each_prompt_of_a_conversation_begins_as_the_one_before() -> None:
    """All but the last message that the model answers, where the counter is: whatever changes."""
    tokenizer = embedded_tokenizer()
    whole, alone = [], []
    for bodies in conversation():
        for body in bodies:
            asked = read(**body)
            prompts = [
                tokenizer.encode_prompt(tokenizer.prompt(messages, asked.template))
                for messages in (asked.messages, asked.messages[:-1])
            ]
            if len(bodies) == 1:
                whole.append(prompts[0])
                alone.append(prompts[1])
            assert RULES in asked.messages[0].content
            assert "cch" not in asked.messages[0].content
            assert "total_tokens" not in asked.messages[0].content
            assert asked.messages[-1].content.count("total_tokens") >= 1
    for before, beginning, now in zip(whole, alone, whole[1:], strict=False):
        assert shared(before, now) >= len(beginning) - 1  # without the token that begins an answer


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_prompts_of_every_family_begin_as_the_ones_before(style: Style) -> None:
    """But for reasoning, which some leave out before a new question."""
    kind = TemplateKind.of_text(style.template)
    texts = []
    for body in (bodies[0] for bodies in conversation() if len(bodies) == 1):
        asked = read(kind, **body)
        turns = [{"role": m.role, "content": m.content} | json.loads(m.extra or "{}") for m in asked.messages]
        turns = as_template_reads(turns, style.template)
        variables = {"add_generation_prompt": True, "bos_token": ""} | json.loads(asked.template)
        ((text,), _) = render_jinja_template([turns], chat_template=style.template, **variables)
        texts.append(text)
    kept = sum(starmap(shared, pairwise(texts)))
    assert kept >= 0.9 * sum(map(len, texts[:-1]))


@pytest.mark.parametrize(
    ("system", "left", "moved"),
    [
        (f"Rules.\n\n{counter(9)}\n{counter(8)}", "Rules.", counter(8)),
        ("A.\nCurrent time: 2026-11-28 12:31:05 UTC\nB.", "A.\nB.", "Current time: 2026-11-28 12:31:05 UTC"),
        ("The current date and time is 12:31.\nB.", "B.", "The current date and time is 12:31."),
        ("Ask for the current time: 12:31 is one.", None, ""),
        ("Today's date is 2026-11-28.", None, ""),
        (counter(9), None, ""),
    ],
)
def test_counters_and_clocks_are_the_last_lines(system: str, left: str | None, moved: str) -> None:
    given = (ChatMessage("system", system), ChatMessage("user", "Q"), ChatMessage("assistant", "A"))
    found = steady(given)
    if left is None:
        assert found == given
    else:
        assert [m.content for m in found] == [left, f"Q\n\n{moved}", "A"]
    assert steady(given[1:]) == given[1:]
