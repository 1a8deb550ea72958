"""Tokenizer, templates, ends and sampling settings of a GGUF file: as of the model that it was converted
from. What no file can say right is refused in one line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from family_tokenizers import CHATML, TEXTS, loaded, sentence_pieces, write_family, write_settings
from gguf_tokenizers import write_gguf
from hypothesis import given, settings
from streams import rendered
from test_family_tokenizers import FIXED, TALK, TEXT
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from pipeline.checkpoint import gguf_file
from pipeline.checkpoint.gguf_file import read_metadata
from pipeline.errors import ModelError
from pipeline.text import gguf_text
from pipeline.text.generation_defaults import sampling_defaults
from pipeline.text.gguf_text import WORDS
from pipeline.text.tokenizer import Tokenizer as TextTokenizer
from pipeline.text.tokenizer import chat_templates, eos_ids, has_tokenizer, read_template
from protocol.messages import Sampling

# Pieces of this text tell the ways of cutting apart, as the converter of llama.cpp tells them by such a text.
PROBE = (
    "\n \n\n \t\t \n  x 3 33 333 3333 I've 'RE you'LL DON'T XyZABC émile É\u0301a\u0301b "
    "我想在apple工作1314天 カナ한국 русский نص .hello/World //x//\r\n\r\n --- "
    "''``!!?\u2019s ½ ٣٤٥ 🚀 👩\u200d👩 <|x|> a.b_c-d\u00a0e\u3000f  \n"
)


def llama3(folder: Path) -> Path:
    """Llama 3's, in which some tokens come from no merges."""
    cut = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    words = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(cut + r"|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = words
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(TEXTS, trainer)
    model = json.loads(trained.to_str())["model"]
    vocabulary = model["vocab"] | {"hello": len(model["vocab"])}
    merges = [tuple(pair) for pair in model["merges"]]
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    backend.pre_tokenizer, backend.decoder = words, decoders.ByteLevel()
    begin = "<|begin_of_text|>"
    names = (begin, "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    special = [(begin, backend.token_to_id(begin))]
    backend.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=special)
    backend.save(str(folder / "tokenizer.json"))
    ends = {
        "bos_token": begin,
        "eos_token": "<|eot_id|>",
        "chat_template": "{{ bos_token }}<|eot_id|><|eom_id|>",
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | ends)
    )
    return folder


def gemma4(folder: Path) -> Path:
    """Gemma's, by transformers' own class."""
    from transformers import GemmaTokenizer

    model = json.loads(sentence_pieces(TEXTS, vocab_size=330, limit_alphabet=70).to_str())["model"]
    names = ["<pad>", "<eos>", "<bos>", "<turn|>", "<mask>", *model["vocab"]]
    own = GemmaTokenizer(
        {name: number for number, name in enumerate(names)}, [tuple(m) for m in model["merges"]]
    )
    own.add_special_tokens({"additional_special_tokens": ["<turn|>"]})
    own.save_pretrained(folder)
    write_settings(
        folder, chat_template="{{ bos_token }}{% for m in messages %}{{ m.content }}<turn|>{% endfor %}"
    )
    return folder


# Folder -> kind and way of cutting of its file.
FOLDERS: dict[str, tuple[str, str]] = {
    "qwen2_moe": ("gpt2", "qwen2"),
    "olmoe": ("gpt2", "olmo"),
    "mixtral": ("llama", ""),
    "llama3": ("gpt2", "llama-bpe"),
    "gemma4": ("gemma4", ""),
}


@pytest.fixture(scope="module", params=FOLDERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """A folder's tokenizer, the one of the file that was made from it, and the file."""
    folder = tmp_path_factory.mktemp(request.param)
    own = {"llama3": llama3, "gemma4": gemma4}.get(request.param)
    folder = own(folder) if own else write_family(folder, request.param)
    path = write_gguf(folder / "model.gguf", folder, *FOLDERS[request.param])
    found = TextTokenizer.load(path)
    assert found is not None
    return loaded(folder), found, path


def test_texts_and_conversations_have_the_same_ids(pair: tuple[Any, Any, Path]) -> None:
    wanted, found, path = pair
    for text in (*FIXED, PROBE, "hello world", " hello", "日本  x  ", *TEXTS):
        ids = wanted.encode(text)
        assert found.encode(text) == ids, text
        assert found.encode_prompt(text) == wanted.encode_prompt(text), text
        assert found.decoder.decode(ids) == wanted.decoder.decode(ids)
    assert rendered(found, TALK) == rendered(wanted, TALK)
    assert found.decoder.eos_ids >= wanted.decoder.eos_ids
    assert has_tokenizer(path)


@settings(max_examples=40)
@given(text=TEXT)
def test_any_text_has_the_same_ids(pair: tuple[Any, Any, Path], text: str) -> None:
    wanted, found, _ = pair
    assert found.encode(text) == wanted.encode(text)


def test_words_are_cut_as_transformers_does_where_it_knows_how() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    same = WORDS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()
    assert same >= {"llama-bpe", "qwen2", "qwen35", "gpt-4o", "minimax-m2", "tekken"}
    assert {name: WORDS[name].cuts for name in same} == {n: (GGUF_PRE_TOKENIZER_SPLITS[n],) for n in same}


# Of the tokenizer.json of Llama 3.1, gpt-oss, Qwen3 and DeepSeek-V3; the others' are theirs by llama.cpp.
PIECES = {
    "llama-bpe": "b105e3d371c839b5",
    "glm4": "b105e3d371c839b5",
    "gpt-4o": "59d2759cc258319c",
    "qwen2": "bd11b25de642c941",
    "deepseek-v3": "af44be4a9a4f6221",
}
SHORT = "中文English混合 XyZ 1234 don't\n\n  x/ カナ"
SHORT_PIECES = {
    "kimi-k2": [
        "中文",
        "English",
        "混合",
        " Xy",
        "Z",
        " ",
        "123",
        "4",
        " don't",
        "\n\n",
        " ",
        " x",
        "/",
        " カナ",
    ],
    "deepseek-llm": [
        *(
            "中文",
            "English",
            "混合",
            " XyZ",
            " ",
            "1",
            "2",
            "3",
            "4",
            " don",
            "'",
            "t",
            "\n",
            "\n",
            " ",
            " x",
        ),
        *("/", " ", "カナ"),
    ],
}


def pieces(name: str, text: str, *more: pre_tokenizers.PreTokenizer) -> list[str]:
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in WORDS[name].cuts]
    return [piece for piece, _ in pre_tokenizers.Sequence([*cuts, *more]).pre_tokenize_str(text)]


def test_words_are_cut_as_the_models_do() -> None:
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = {name: repr(pieces(name, PROBE, bytewise)).encode() for name in PIECES}
    assert {name: hashlib.sha256(text).hexdigest()[:16] for name, text in found.items()} == PIECES
    assert {name: pieces(name, SHORT) for name in SHORT_PIECES} == SHORT_PIECES
    for name in WORDS:
        assert "".join(pieces(name, PROBE)) == PROBE


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("qwen"), "qwen2_moe")


def test_ends_are_the_files_and_those_of_a_text(tmp_path: Path, qwen: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", qwen, "gpt2", "qwen2", tokenizer__ggml__eot_token_id=7)
    found = TextTokenizer.load(path)
    assert found is not None
    names = ("<|im_end|>", "<|endoftext|>")
    wanted = {found.encode_prompt(name)[0] for name in names}
    assert found.decoder.eos_ids == wanted | {7}
    assert eos_ids(path) == {found.encode_prompt("<|im_end|>")[0], 7}


@pytest.mark.parametrize(
    ("template", "ends"), [("<|end|>", True), ("<|end|><|channel|><|start|>assistant", False)]
)
def test_the_end_of_a_turn_that_no_file_names(tmp_path: Path, template: str, ends: bool) -> None:
    """Phi's, and not Harmony's, which has it behind each part."""
    folder = write_family(tmp_path, "phimoe")
    write_settings(folder, chat_template=template)
    found = TextTokenizer.load(write_gguf(tmp_path / "a.gguf", folder, "llama"))
    assert found is not None
    assert (found.encode_prompt("<|end|>")[-1] in found.decoder.eos_ids) == ends


def test_templates_have_names(tmp_path: Path, qwen: Path) -> None:
    write_settings(
        qwen, chat_template=[{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "t"}]
    )
    path = write_gguf(tmp_path / "a.gguf", qwen, "gpt2", "qwen2")
    assert chat_templates(path) == {"default": CHATML, "tool_use": "t"}
    assert not read_template(path).thinks
    found, folder = TextTokenizer.load(path), loaded(qwen)
    assert found is not None
    assert rendered(found, TALK) == rendered(folder, TALK)
    write_settings(qwen, chat_template=CHATML)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, Sampling()),
        ({"temp": 0.6, "top_k": 20, "top_p": 0.95}, Sampling(temperature=0.6, top_k=20, top_p=0.95)),
        (
            {"min_p": 0.05, "penalty_repeat": 1.05},
            Sampling(temperature=1.0, min_p=0.05, repetition_penalty=1.05),
        ),
        ({"temp": 0.0, "top_k": 20}, Sampling()),
        ({"top_p": 7.0}, "top_p is 7.0"),
        ({"temp": "hot"}, "temperature is 'hot'"),
    ],
)
def test_sampling_settings_are_the_files(tmp_path: Path, qwen: Path, settings, wanted) -> None:
    more = {f"general__sampling__{name}": value for name, value in settings.items()}
    path = write_gguf(tmp_path / "a.gguf", qwen, "gpt2", "qwen2", **more)
    if isinstance(wanted, Sampling):
        assert sampling_defaults(path) == wanted
    else:
        with pytest.raises(ModelError, match=f"gguf: {wanted}"):
            sampling_defaults(path)


KEY = "tokenizer__ggml__"


@pytest.mark.parametrize(
    ("kind", "more", "words"),
    [
        ("gpt2", {KEY + "pre": "qwen9"}, "'qwen9', which is not known"),
        ("gpt2", {KEY + "pre": None}, "None, which is not known"),
        ("gpt2", {KEY + "model": "bert"}, "its kind is 'bert', and only gpt2, llama, gemma4"),
        ("gpt2", {KEY + "tokens": None}, "no tokens"),
        ("gpt2", {KEY + "tokens": [1, 2]}, "token"),
        ("gpt2", {KEY + "tokens": "abc"}, "no tokens"),
        ("gpt2", {KEY + "token_type": [1, 1, 1]}, "token_type"),
        ("gpt2", {KEY + "token_type": None}, ""),
        ("gpt2", {KEY + "merges": None}, "no merges"),
        ("gpt2", {KEY + "merges": ["ab"]}, "pairs"),
        ("gpt2", {KEY + "merges": ["no such"]}, "no"),
        ("gpt2", {KEY + "merges": [" "]}, "pairs"),
        ("gpt2", {KEY + "tokens": ["a", "a"], KEY + "token_type": None}, "twice"),
        ("gpt2", {KEY + "bos_token_id": 1 << 31}, "no id of a token"),
        ("gpt2", {KEY + "eos_token_id": True}, "no id of a token"),
        ("gpt2", {KEY + "bos_token_id": "<s>"}, "no id of a token"),
        ("llama", {KEY + "scores": None}, "no scores"),
        ("llama", {KEY + "scores": [1.0, 2.0]}, "scores"),
        ("gpt2", {"tokenizer__chat_template": "\x00{{"}, ""),
    ],
)
def test_what_makes_no_sense_is_one_line(
    tmp_path: Path, qwen: Path, kind: str, more: Any, words: str
) -> None:
    """With no words: it can be used all the same."""
    path = write_gguf(tmp_path / "a.gguf", qwen, kind, "qwen2", **more)
    if not words:
        assert TextTokenizer.load(path) is not None
        return
    with pytest.raises(ModelError, match=words) as caught:
        TextTokenizer.load(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


ODD: tuple[Any, ...] = (
    *(None, True, -1, 1 << 40, 1.5, float("nan"), "", "\x00", "<s>", [], [None], [""], [0, 1], ["a", 1]),
    *([True], [float("nan")] * 3, ["a b"] * 300, ["\ufffd"], [" " * 9], ["a" * 100_000], [1 << 40] * 300),
)


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_any_value_of_any_key_loads_or_is_one_line(tmp_path: Path, family: str, monkeypatch) -> None:
    kind, pre = FOLDERS[family]
    path = write_gguf(tmp_path / "a.gguf", write_family(tmp_path, family), kind, pre)
    whole = read_metadata(path)
    unsaid = ("tokenizer.chat_templates", "tokenizer.ggml.eot_token_id", "general.sampling.temp")
    keys = (
        (*whole, *unsaid) if kind == "gpt2" else ("tokenizer.ggml.scores", "tokenizer.ggml.add_space_prefix")
    )
    refused = []
    for key in keys:
        for value in ODD:
            changed = {**whole, key: value}
            monkeypatch.setattr(gguf_file, "read_metadata", lambda *_, changed=changed: changed)
            gguf_text._few.cache_clear()
            for read in (TextTokenizer.load, has_tokenizer, chat_templates, eos_ids, sampling_defaults):
                try:
                    read(path)
                except ModelError as e:
                    refused.append(str(e))
    gguf_text._few.cache_clear()
    assert refused
    assert not [line for line in refused if "\n" in line or len(line) > 500]


def test_tokens_without_scores_are_refused(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "mixtral")
    same = [-1000.0] * len(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab())
    with pytest.raises(ModelError, match="no scores"):
        TextTokenizer.load(write_gguf(tmp_path / "a.gguf", folder, "llama", **{KEY + "scores": same}))


def test_a_file_may_have_no_tokenizer(tmp_path: Path, qwen: Path) -> None:
    for kind in (None, "no_vocab", "none"):
        path = write_gguf(tmp_path / f"{kind}.gguf", qwen, "gpt2", "qwen2", **{KEY + "model": kind})
        assert not has_tokenizer(path)
        assert TextTokenizer.load(path) is None
