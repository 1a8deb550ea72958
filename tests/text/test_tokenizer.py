"""Tokenizer: loading, encoding, chat templates and end tokens, on model directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from family_tokenizers import loaded, write_family, write_settings
from streams import rendered
from tokenizers import Tokenizer as Backend

from pipeline.errors import ModelError, RequestError
from pipeline.text.detokenizer import QUICK
from pipeline.text.tokenizer import Tokenizer, eos_ids
from protocol.messages import ChatMessage


def test_directory_without_tokenizer_loads_none(tmp_path: Path) -> None:
    """Neither has one with settings alone, or with a folder of a tokenizer file's name."""
    (tmp_path / "tokenizer.json").mkdir()
    for name in ("config.json", "tokenizer_config.json", "merges.txt"):
        (tmp_path / name).write_text("{}")
    assert Tokenizer.load(tmp_path) is None
    assert Tokenizer.load(tmp_path / "missing") is None


def test_least_tokens_of_a_long_text(model_dir: Path, tokenizer: Tokenizer) -> None:
    """No text of so many characters has fewer; a short one is encoded at once."""
    longest = max(map(len, Backend.from_file(str(model_dir / "tokenizer.json")).get_vocab()))
    assert [tokenizer.decoder.min_tokens(count) for count in (0, QUICK)] == [0, 0]
    for count in (QUICK + 1, 1_000_000):
        assert tokenizer.decoder.min_tokens(count) == count // (2 * longest)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty"),
        ([ChatMessage("oracle", "x")], "no such role: oracle"),
        ([ChatMessage("user", "\ud800")], "Unicode"),
    ],
)
def test_conversation_that_the_template_refuses(tmp_path: Path, messages, words) -> None:
    folder = write_family(tmp_path, "mixtral")
    refusal = "{% if m.role == 'oracle' %}{{ raise_exception('no such role: ' + m.role) }}{% endif %}"
    write_settings(folder, chat_template="{% for m in messages %}" + refusal + "{{ m.content }}{% endfor %}")
    with pytest.raises(RequestError, match=words) as caught:
        rendered(loaded(folder), messages)
    assert "\n" not in str(caught.value)


def test_invalid_unicode_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="Unicode at character 2"):
        tokenizer.encode("ab\ud83d")


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "spiece.model", "tiktoken.model"])
def test_each_kind_of_tokenizer_file_is_one(tmp_path: Path, name: str) -> None:
    """Not read as a model without a tokenizer."""
    (tmp_path / name).write_text("no tokenizer")
    with pytest.raises(ModelError, match="tokenizer in"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "wanted"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, {5, 6}),
        ({"eos_token_id": 5}, {"eos_token_id": 7}, {5}),
        ({"max_length": 5}, {"eos_token_id": 7}, {7}),
        (None, {"eos_token_id": [7]}, {7}),
        (None, {"eos_token_id": None}, set()),
        (None, None, set()),
    ],
)
def test_eos_ids_of_a_directory(tmp_path, generation, config, wanted) -> None:
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert eos_ids(tmp_path) == wanted


@pytest.mark.parametrize("content", ["{", '{"eos_token_id": "</s>"}', '{"eos_token_id": [1, true]}'])
def test_damaged_eos_ids_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match="generation_config"):
        eos_ids(tmp_path)
