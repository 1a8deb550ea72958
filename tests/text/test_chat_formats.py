"""Families' chat formats: found by the template, read from answers however they arrive, and written back into
the next prompt as the template wants it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from chat_styles import CALLED, DEEPSEEK_V31, HARMONY, KIMI, SCHEMAS, STYLES, Style
from family_tokenizers import loaded, write_family, write_settings
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pipeline.errors import ModelError, RequestError
from pipeline.text.chat_format import TemplateKind
from pipeline.text.chat_output import ChatOutput, opens_reasoning
from pipeline.text.tokenizer import Tokenizer, chat_templates, read_template
from protocol.messages import ChatMessage

Parts = list[tuple[str, Any]]
REASONING, TEXT = "Oslo, then.", "I look."
EXTRA = ("<think>", "</think>", "<｜User｜>", "<|im_end|>", "<tool_call>", "é")
STYLED = pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)


def read(
    style: Style, pieces: list[str], *, ending: str = "", cut: bool = False, tools: Any = SCHEMAS
) -> Parts:
    """The parts of an answer that arrives in pieces, adjoining ones of a kind joined."""
    kind = TemplateKind.of_text(style.template)
    output = ChatOutput(kind, tools, thinking=opens_reasoning(ending or style.ending))
    found: Parts = []
    parts = [part for piece in pieces for part in output.feed(piece)]
    for part in [*parts, *output.finish(cut=cut)]:
        if part.call is not None:
            found.append((part.call.name, json.loads(part.call.arguments)))
        elif found and found[-1][0] == part.kind:
            found[-1] = (part.kind, found[-1][1] + part.text)
        else:
            found.append((part.kind, part.text))
    return found


def split(text: str, places: set[int]) -> list[str]:
    return [text[start:end] for start, end in pairwise(sorted({0, len(text), *places}))]


def stripped(parts: Parts) -> Parts:
    return [(kind, value.strip() if isinstance(value, str) else value) for kind, value in parts]


@STYLED
def test_reasoning_text_and_calls_are_found_wherever_the_answer_is_cut(style: Style) -> None:
    whole = read(style, [style.answer])
    expected = [("reasoning", REASONING), ("content", TEXT), *CALLED[: style.calls]]
    assert stripped(whole) == expected
    assert read(style, list(style.answer)) == whole
    for place in range(1, len(style.answer)):
        assert read(style, split(style.answer, {place})) == whole


@settings(max_examples=150)
@given(data=st.data())
def test_no_text_is_lost_and_none_depends_on_how_it_arrives(data: st.DataObject) -> None:
    """Answers with pieces left out, doubled and in any order."""
    style = data.draw(st.sampled_from(STYLES))
    bounds = sorted(data.draw(st.sets(st.integers(1, len(style.answer) - 1), max_size=6)))
    pieces = split(style.answer, set(bounds))
    text = "".join(data.draw(st.lists(st.sampled_from([*pieces, *EXTRA]), max_size=9)))
    cut = data.draw(st.booleans())
    places = data.draw(st.sets(st.integers(1, max(len(text) - 1, 1)), max_size=12))
    whole = read(style, [text], cut=cut)
    assert read(style, split(text, {p for p in places if p < len(text)}), cut=cut) == whole
    shown = "".join(value if isinstance(value, str) else f"{kind} {value}" for kind, value in whole)
    for word in ("Oslo, then.", "I look.", "é"):
        assert shown.count(word) >= text.count(word)


BROKEN = {
    "no-json": ('{"city"', '{"city'),
    "no-object": ('{"city"', '["city"'),
    "no-quote": ('<|"|>Oslo', "Oslo"),
    "another-tool": ("weather", "rain"),
    "a-key-open": ("</arg_key>", "<arg_key>"),
    "a-value-open": ("</parameter>\n</", "</"),
    "text-between": ("Oslo</parameter>", "Oslo</parameter> and"),
    "text-behind": ("Oslo</arg_value>", "Oslo</arg_value> and"),
}
CASES = [(style, old, new) for style in STYLES for old, new in BROKEN.values() if old in style.answer]


@pytest.mark.parametrize(("style", "old", "new"), CASES, ids=lambda value: getattr(value, "name", None))
def test_what_is_no_call_stays_text(style: Style, old: str, new: str) -> None:
    parts = read(style, [style.answer.replace(old, new, 1)])
    assert stripped(parts[:1]) == [("reasoning", REASONING)]
    content = "".join(value for kind, value in parts if kind == "content")
    for text in (TEXT, "rain" if new == "rain" else "weather", new, "Oslo", "<c>"):
        assert text in content
    called = [(kind, value) for kind, value in parts if isinstance(value, dict)]
    assert called == list(CALLED[1 : style.calls])


@STYLED
def test_an_answer_that_was_cut_within_a_call_has_none(style: Style) -> None:
    """The text of a call can look complete before it is."""
    kind = TemplateKind.of_text(style.template)
    assert kind.form is not None
    end = style.answer.index(kind.end or "<|call|>")
    parts = read(style, [style.answer[:end]], cut=True)
    assert [name for name, _ in parts] == ["reasoning", "content"]
    assert "Oslo" in parts[1][1]
    # But a stop string, or the model's own end of its turn, ends a call.
    assert read(style, [style.answer[:end]])[2:] == [CALLED[0]]


@STYLED
def test_without_tools_a_call_is_text(style: Style) -> None:
    (_, _), (kind, text) = read(style, [style.answer], tools={})
    assert kind == "content"
    assert text.startswith(TEXT)
    assert "weather" in text


def write_style(folder: Path, style: Style) -> Tokenizer:
    """A model's folder with this template, and its markers as special tokens."""
    write_family(folder, "qwen2_moe")
    write_settings(folder, chat_template=style.template, bos_token="<|endoftext|>")
    path = str(folder / "tokenizer.json")
    backend = Backend.from_file(path)
    names = dict.fromkeys((*style.special, *style.ends))
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    backend.save(path)
    return loaded(folder)


def history(style: Style) -> list[ChatMessage]:
    """A question, the answer as a client sends it back, and the results."""
    calls = [
        {
            "id": f"functions.{name}:{place}",
            "type": "function",
            "function": {"name": name, "arguments": given},
        }
        for place, (name, given) in enumerate(CALLED)
    ]
    extra = {"reasoning_content": REASONING, "tool_calls": calls}
    results = [
        ChatMessage("tool", f"result {call['id']}", json.dumps({"tool_call_id": call["id"]}))
        for call in calls
    ]
    return [ChatMessage("user", "Rain?"), ChatMessage("assistant", TEXT, json.dumps(extra)), *results]


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]


@STYLED
def test_a_conversation_with_tools_goes_round(tmp_path: Path, style: Style) -> None:
    """What the template writes of an answer is read as that answer, and results follow their calls."""
    tokenizer = write_style(tmp_path, style)
    asked = history(style)
    assert opens_reasoning(tokenizer.prompt(asked[:1])) == opens_reasoning(style.ending)
    rest = tokenizer.prompt(asked, json.dumps({"tools": TOOLS})).partition("Rain?")[2]
    for text in ("result functions.weather:0", "result functions.clock:1"):
        assert rest.count(text) == 1
    written = rest[: rest.index("result")]
    assert (REASONING in written) != style.name.startswith("deepseek")  # which forgets it
    written = written.partition("<|start|>assistant" if style is HARMONY else TEXT)[2]
    parts = [value for kind, value in read(style, [written], ending="</think>") if isinstance(value, dict)]
    assert parts == [given for _, given in CALLED[: style.calls]]
    later = [*asked, ChatMessage("assistant", "It rains."), ChatMessage("user", "Thanks")]
    assert "It rains." in tokenizer.prompt(later)


def test_a_call_keeps_the_models_own_id(tmp_path: Path) -> None:
    output = ChatOutput(TemplateKind.of_text(KIMI.template), SCHEMAS, thinking=False)
    calls = [part.call for part in output.feed(KIMI.answer) if part.call is not None]
    assert [call.id for call in calls] == ["functions.weather:0", "functions.clock:1"]


def test_harmony_has_one_call_a_message_and_thoughts_only_before_the_final_answer(tmp_path: Path) -> None:
    tokenizer = write_style(tmp_path, HARMONY)
    asked = history(HARMONY)
    (_, rest) = tokenizer.prompt(asked, '{"reasoning_effort": "low"}').split("Rain?")
    assert rest == (
        "<|end|><|start|>assistant<|channel|>analysis<|message|>Oslo, then.\nI look.<|end|>"
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
        + json.dumps(CALLED[0][1])
        + "<|call|><|start|>functions.weather to=assistant<|channel|>commentary<|message|>"
        '"result functions.weather:0"<|end|>'
        "<|start|>assistant to=functions.clock<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>functions.clock to=assistant<|channel|>commentary<|message|>"
        '"result functions.clock:1"<|end|><|start|>assistant'
    )
    answered = tokenizer.prompt([*asked, ChatMessage("assistant", "It rains."), ChatMessage("user", "So?")])
    assert "analysis" not in answered
    assert "Reasoning: medium" in answered
    head = "<|start|>assistant to=functions.clock<|channel|>commentary json<|message|>"
    for text in (
        head.removeprefix("<|start|>assistant") + "{}",
        head.partition("<|start|>assistant")[2] + "{}",
    ):
        assert read(HARMONY, [text]) == [("clock", {})]


@STYLED
def test_markers_that_are_special_tokens_are_text_where_they_are_asked_for(
    tmp_path: Path, style: Style
) -> None:
    tokenizer = write_style(tmp_path, style)
    ids = tokenizer.encode(style.answer)
    for marks in (True, False):
        stream = tokenizer.decoder.stream([], marks=marks)
        pieces = [stream.push(token) for token in ids]
        text = "".join(pieces) + stream.finish()
        expected = style.answer
        for special in () if marks else style.special:
            expected = expected.replace(special, "")
        assert text == expected
        if marks:
            assert read(style, pieces) == read(style, [style.answer])
    ends = {tokenizer.encode(end)[0] for end in style.ends}
    assert ends <= tokenizer.decoder.eos_ids
    held = tokenizer.decoder.stream(["I lurk"], marks=True)
    assert "".join([*map(held.push, ids), held.finish()]) == style.answer


@pytest.mark.parametrize("after_tool", [False, True])
def test_whether_a_prompt_opens_reasoning_is_seen_at_its_end(tmp_path: Path, after_tool: bool) -> None:
    tokenizer = write_style(tmp_path, DEEPSEEK_V31)
    turns = history(DEEPSEEK_V31) if after_tool else history(DEEPSEEK_V31)[:1]
    assert opens_reasoning(tokenizer.prompt(turns, '{"thinking": true}')[-64:]) is not after_tool
    assert not opens_reasoning(tokenizer.prompt(turns)[-64:])


def test_a_template_in_a_file_of_its_own_as_models_for_pictures_have_it(tmp_path: Path) -> None:
    write_style(tmp_path, KIMI)
    write_settings(tmp_path, chat_template=None)
    assert chat_templates(tmp_path) == {}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": KIMI.template}))
    assert read_template(tmp_path).calls == "kimi"
    assert loaded(tmp_path).prompt([ChatMessage("user", "x")]).endswith(KIMI.ending)


def test_a_tokenizer_that_is_a_program_is_refused_in_one_line(tmp_path: Path) -> None:
    write_style(tmp_path, KIMI)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tiktoken.model").write_text("YQ== 0\nYg== 1\n")
    own = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    write_settings(tmp_path, tokenizer_class="TikTokenTokenizer", auto_map=own)
    (tmp_path / "tokenization_kimi.py").write_text(
        "raise SystemExit('code from a model directory has run')\n"
    )
    with pytest.raises(ModelError, match="not run here; put a tokenizer") as refused:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(refused.value)


def test_calls_that_are_none_are_refused_by_name(tmp_path: Path) -> None:
    tokenizer = write_style(tmp_path, HARMONY)
    wrong = ChatMessage("assistant", "", '{"tool_calls": [5]}')
    with pytest.raises(RequestError, match="chat template refuses this"):
        tokenizer.prompt([wrong])


def test_tools_without_a_place_are_told_by_the_system_and_their_calls_read(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[answer]"
    style = Style("plain", template, "", "[answer]")
    tokenizer, (asked, *rest) = write_style(tmp_path, style), history(style)
    given = json.dumps({"tools": TOOLS})
    first = tokenizer.prompt([ChatMessage("system", "Be short."), asked], given)
    assert first.startswith("[system]Be short.\n\nYou may call tools.")
    assert all(json.dumps(tool["function"], ensure_ascii=False) in first for tool in TOOLS)
    assert first.endswith("[user]Rain?[answer]")
    assert tokenizer.prompt([asked], given).startswith("[system]You may call tools.")
    assert tokenizer.prompt([asked]) == "[user]Rain?[answer]"
    later = tokenizer.prompt([asked, *rest], given).partition("[assistant]")[2]
    written, results = later.split("[user]")
    assert [part for part in read(style, [written]) if part[0] != "content"] == list(CALLED)
    assert results.count("<tool_response>") == len(CALLED)
