"""Every family's tokenizer as it is published: loads without a network, encodes as transformers does, and
streams its text without a half character."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from family_tokenizers import CHATML, loaded, write_family, write_settings
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import check, rendered

from pipeline.errors import ModelError, RequestError
from pipeline.text.tokenizer import Tokenizer, has_chat_template
from protocol.messages import ChatMessage

# A letter of each difficult kind: of one to four bytes, marks that join the letter before them, letters that
# NFC changes, spaces of several kinds.
TROUBLE = "ab 1é€日한😀👩\u200d🇩\u0301\u0915\u094d\u212b\ufe0f\n\t\u00a0\u3000▁Ġ"
WORDS = (
    "the value",
    "日本語の文章",
    "👩‍👩‍👧",
    "e\u0301clair",
    "   ",
    "\r\n",
    "1234",
    "<s>",
    "</s>",
    "<|im_start|>user\n",
    "<|end|> ",
    " <tool> ",
    "<think>",
    "<｜User｜>",
    "|||IP_ADDRESS|||",
    "<|endoftext|>",
    "<0x41>",
)
TEXT = st.lists(st.sampled_from(WORDS) | st.text(TROUBLE, max_size=8), max_size=6).map("".join)
FIXED = ("", " ", "hello world", "  Größe 1234  x ", "<|user|> x <|end|>  y<s>z <tool> q", *WORDS, TROUBLE)
TALK = [ChatMessage("user", " Größe 日本? "), ChatMessage("assistant", "😀"), ChatMessage("user", "x")]


def test_encodes_as_transformers(model_dir: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(str(model_dir))
    # version 5 does not add DeepSeek's bos, which its settings ask for and version 4 added
    bos = [oracle.bos_token_id] if model_dir.name.startswith("deepseek") else []
    for text in FIXED:
        ids = tokenizer.encode(text)
        assert ids == bos + oracle.encode(text)
        assert tokenizer.decoder.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    assert tokenizer.decoder.eos_ids == {oracle.eos_token_id}
    turns = [{"role": turn.role, "content": turn.content} for turn in TALK]
    whole = oracle.apply_chat_template(turns, add_generation_prompt=True)
    assert rendered(tokenizer, TALK) == whole["input_ids"]


@settings(max_examples=60)
@given(text=TEXT, data=st.data())
def test_stream_of_any_ids_is_their_decoding(tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    """Half characters in the middle, tokens in any order, ids outside the vocabulary."""
    ids = tokenizer.encode(text)
    start = data.draw(st.integers(0, len(ids)))
    ids = ids[start:] + data.draw(st.lists(st.integers(0, 540), max_size=12)) + ids[:start]
    check(tokenizer, ids, [])
    check(tokenizer, ids, data.draw(st.lists(st.text(TROUBLE, min_size=1, max_size=3), max_size=2)))


@pytest.mark.parametrize("text", ["日本語", "👩‍👩‍👧 x", "naïve 한국어", "a\u0301\u0301b"])
def test_only_an_incomplete_last_character_is_held_back(tokenizer: Tokenizer, text: str) -> None:
    """Wherever an answer ends, all of its certain text was returned."""
    ids = tokenizer.encode(text)
    for end in range(len(ids) + 1):
        stream = tokenizer.decoder.stream([])
        shown = "".join(stream.push(token) for token in ids[:end])
        assert "\ufffd" not in shown
        assert shown + stream.finish() == tokenizer.decoder.decode(ids[:end])


@pytest.mark.parametrize(
    "name", ["LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", "GPTNeoXTokenizer"]
)
@pytest.mark.parametrize("model_type", ["qwen2_moe", "deepseek_v2", "phimoe", None, "nobody_knows"])
def test_tokenizer_json_overrides_the_class(tmp_path: Path, name: str, model_type: str | None) -> None:
    """Other programs write any class into tokenizer_config.json. Code in the directory never runs."""
    folder = write_family(tmp_path, "deepseek_v2")
    write_settings(folder, add_bos_token=None)
    expected = loaded(folder).encode("日本 12 <｜User｜>  x")
    own = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", "tokenization_own.OwnTokenizer"]}
    write_settings(folder, tokenizer_class=name, auto_map=own)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type} if model_type else {}))
    (folder / "tokenization_own.py").write_text("raise SystemExit('code from a model directory has run')\n")
    assert loaded(folder).encode("日本 12 <｜User｜>  x") == expected


def test_bos_is_added_where_the_settings_ask_for_it(tmp_path: Path) -> None:
    """Where tokenizer.json does not add it already; once in any case."""
    folder = write_family(tmp_path, "deepseek_v2")
    tokenizer = loaded(folder)
    (bos,) = tokenizer.encode("")
    assert tokenizer.encode("x")[0] == bos
    assert rendered(tokenizer, TALK).count(bos) == 1
    write_settings(folder, add_bos_token=False)
    assert loaded(folder).encode("x") == tokenizer.encode("x")[1:]
    mixtral = loaded(write_family(tmp_path, "mixtral"))
    assert mixtral.encode("") == [1]


def test_vocabulary_and_merges_replace_tokenizer_json(tmp_path: Path) -> None:
    """As Qwen's slow tokenizer saves them."""
    folder = write_family(tmp_path, "qwen2_moe")
    whole = loaded(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    parts = loaded(folder)
    for text in FIXED:
        assert parts.encode(text) == whole.encode(text)


ANSWER = [ChatMessage("user", "x")]
OTHER = "{{ raise_exception('not this one') }}"


@pytest.mark.parametrize(
    ("settings", "files"),
    [
        (CHATML, {}),
        ([{"name": "default", "template": CHATML}, {"name": "tool_use", "template": OTHER}], {}),
        (None, {"chat_template.jinja": CHATML}),
        (OTHER, {"chat_template.jinja": CHATML}),
        (None, {"chat_template.jinja": CHATML, "additional_chat_templates/tool_use.jinja": OTHER}),
    ],
    ids=["text", "list", "file", "file-first", "folder"],
)
def test_chat_template_is_found(tmp_path: Path, settings: object, files: dict[str, str]) -> None:
    folder = write_family(tmp_path, "qwen2_moe")
    write_settings(folder, chat_template=settings)
    (folder / "additional_chat_templates").mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    tokenizer = loaded(folder)
    assert tokenizer.has_chat_template
    assert has_chat_template(folder)
    text = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(tokenizer, ANSWER) == tokenizer.encode(text)


def test_templates_for_other_purposes_are_not_used(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "qwen2_moe")
    write_settings(folder, chat_template=[{"name": "rag", "template": OTHER}])
    tokenizer = loaded(folder)
    assert not tokenizer.has_chat_template
    assert not has_chat_template(folder)
    with pytest.raises(RequestError, match="no chat template"):
        rendered(tokenizer, ANSWER)


@pytest.mark.parametrize("template", ["{% for %}", "{{ m.x.y }}", "{{ ''.__class__.__mro__ }}", 5])
def test_failing_template_is_refused_in_one_line(tmp_path: Path, template: object) -> None:
    folder = write_family(tmp_path, "qwen2_moe")
    write_settings(folder, chat_template=template)
    with pytest.raises(RequestError, match="chat template refuses") as caught:
        rendered(loaded(folder), ANSWER)
    assert "\n" not in str(caught.value)


def test_end_of_turn_and_end_of_text_both_end_an_answer(tmp_path: Path) -> None:
    """A chat model's generation_config.json has both; its tokenizer has only the first."""
    folder = write_family(tmp_path, "qwen2_moe")
    tokenizer = loaded(folder)
    (end,), (text,) = tokenizer.encode("<|im_end|>"), tokenizer.encode("<|endoftext|>")
    assert tokenizer.decoder.eos_ids == {end}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, text]}))
    assert loaded(folder).decoder.eos_ids == {end, text}
    stream = tokenizer.decoder.stream([])
    assert stream.push(end) + stream.push(text) + stream.finish() == ""


DAMAGED = {
    "tokenizer.json": ("", "{", "[]", '{"version": "1.0"}', "\x00\xff"),
    "tokenizer_config.json": ("{", "[]", '{"added_tokens_decoder": 5}', "\xff"),
}


@pytest.mark.parametrize(("name", "content"), [(name, text) for name in DAMAGED for text in DAMAGED[name]])
def test_damaged_files_are_refused(tmp_path: Path, name: str, content: str) -> None:
    folder = write_family(tmp_path, "mixtral")
    (folder / name).write_text(content, encoding="latin-1")
    with pytest.raises(ModelError, match="cannot load the tokenizer") as caught:
        Tokenizer.load(folder)
    assert "\n" not in str(caught.value)


def test_panics_of_the_library_are_no_crash(tmp_path: Path) -> None:
    """They are exceptions that do not derive from Exception."""
    folder = write_family(tmp_path, "mixtral")
    path = folder / "tokenizer.json"
    described = json.loads(path.read_text())
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    path.write_text(json.dumps(described | {"normalizer": normalizer}))
    with pytest.raises(ModelError, match="cannot load the tokenizer"):
        Tokenizer.load(folder)
    letter, token = next(item for item in described["model"]["vocab"].items() if len(item[0]) == 1)
    strip = {"type": "Strip", "content": letter, "start": 0, "stop": 1 << 40}  # counts below zero
    path.write_text(json.dumps(described | {"decoder": strip}))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    assert tokenizer.decoder.decode([token]) == "\ufffd"


def test_names_with_control_characters_are_refused(tmp_path: Path) -> None:
    """The library prints unknown names of a token's settings as they are."""
    folder = write_family(tmp_path, "mixtral")
    path = folder / "tokenizer_config.json"
    tokens = {"5": {"content": "x", "\x1b]0;title\x07": True}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": tokens}))
    with pytest.raises(ModelError, match="control characters"):
        Tokenizer.load(folder)
