"""Tokenizers as the model families publish them, trained on a few sentences: their kinds, special tokens and
tokenizer_config.json, each in a model directory of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from pipeline.text.detokenizer import DECODER, Detokenizer
from pipeline.text.tokenizer import Tokenizer as TextTokenizer

TEXTS = [
    "The generator yields 1234 values, one at a time; the caller decides when it goes on.",
    "Größere Mengen: für je 100 Stück ein Block. naïve café, e\u0301clair, \u0915\u094d\u0937",
    "def generate(values):\n    for value in values:\n        yield value\n",
    "日本語の文章と中文句子，한국어 문장 😀👩‍👩‍👧 привет мир",
] * 2
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _special(content: str, **how: bool) -> AddedToken:
    return AddedToken(content, special=True, normalized=False, **how)


def _train_bytes(backend: Tokenizer) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.decoder = decoders.ByteLevel()


def _begins_with(backend: Tokenizer, token: str) -> None:
    backend.post_processor = processors.TemplateProcessing(
        single=f"{token}:0 $A:0", special_tokens=[(token, backend.token_to_id(token))]
    )


def qwen() -> tuple[Tokenizer, dict[str, Any]]:
    """Qwen1.5-MoE, Qwen2-57B-A14B, Qwen3-MoE."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    _train_bytes(backend)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    backend.add_special_tokens([_special(name) for name in names])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return backend, {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_prefix_space": False,
        "chat_template": CHATML,
        "errors": "replace",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    }


def deepseek() -> tuple[Tokenizer, dict[str, Any]]:
    """DeepSeek-V2 and V2-Lite: byte-level, although its class is Llama's."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence([])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[\r\n]"), "isolated"),
            pre_tokenizers.Split(Regex(r"\s?\p{L}+"), "isolated"),
            pre_tokenizers.Split(Regex(r"\s?\p{P}+"), "isolated"),
            pre_tokenizers.Split(Regex("[一-龥ࠀ-一가-퟿]+"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    _train_bytes(backend)
    backend.add_special_tokens([_special("<｜begin▁of▁sentence｜>"), _special("<｜end▁of▁sentence｜>")])
    backend.add_tokens([AddedToken("<｜User｜>", normalized=False)])
    backend.post_processor = processors.ByteLevel(trim_offsets=False)  # the settings add bos
    return backend, {
        "tokenizer_class": "LlamaTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": _as_json("<｜begin▁of▁sentence｜>"),
        "eos_token": _as_json("<｜end▁of▁sentence｜>"),
        "pad_token": _as_json("<｜end▁of▁sentence｜>"),
        "legacy": True,
        "sp_model_kwargs": {},
        "unk_token": None,
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }


def olmoe() -> tuple[Tokenizer, dict[str, Any]]:
    """OLMoE: GPT-NeoX's tokenizer; its runs of spaces are added tokens."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True)
    _train_bytes(backend)
    backend.post_processor = processors.TemplateProcessing(single="$A:0", special_tokens=[])
    backend.add_special_tokens([_special("<|endoftext|>"), _special("<|padding|>")])
    backend.add_tokens([AddedToken(" " * count, normalized=True) for count in range(24, 1, -1)])
    backend.add_tokens([AddedToken("|||IP_ADDRESS|||", normalized=False)])
    return backend, {
        "tokenizer_class": "GPTNeoXTokenizer",
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|padding|>",
        "unk_token": None,
        "chat_template": (
            "{{ eos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
        ),
    }


def sentence_pieces(texts: Sequence[str], **limits: int) -> Tokenizer:
    """SentencePiece: pieces of text, and byte tokens for text without a piece."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(show_progress=False, **limits)
    trained.train_from_iterator(texts, trainer)
    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁▁", "▁"]
    names += [piece for piece in model["vocab"] if piece not in names]
    backend = Tokenizer(
        models.BPE(
            vocab={name: index for index, name in enumerate(names)},
            merges=[tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = trained.normalizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def mixtral() -> tuple[Tokenizer, dict[str, Any]]:
    backend = sentence_pieces(TEXTS, vocab_size=330, limit_alphabet=70)
    backend.add_special_tokens([_special("<unk>"), _special("<s>"), _special("</s>")])
    _begins_with(backend, "<s>")
    return backend, {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "legacy": True,
        "sp_model_kwargs": {},
        "spaces_between_special_tokens": False,
        "use_default_system_prompt": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": (
            "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
            "[INST] {{ m['content'] }} [/INST]"
            "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
        ),
    }


def phimoe() -> tuple[Tokenizer, dict[str, Any]]:
    """Phi-3.5-MoE: its special tokens strip the white space behind them."""
    backend = sentence_pieces(TEXTS, vocab_size=330, limit_alphabet=70)
    backend.add_special_tokens([_special("<unk>"), _special("<s>"), _special("</s>", rstrip=True)])
    names = ("<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>")
    backend.add_special_tokens([_special(name, rstrip=name != "<|endoftext|>") for name in names])
    backend.add_tokens([AddedToken("<tool>", rstrip=True, lstrip=True, normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="$A:0", special_tokens=[])
    return backend, {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": "<s>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<unk>",
        "legacy": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": (
            "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
        ),
    }


# model_type -> its tokenizer
FAMILIES = {
    "mixtral": mixtral,
    "phimoe": phimoe,
    "qwen2_moe": qwen,
    "deepseek_v2": deepseek,
    "olmoe": olmoe,
}


def write_family(folder: Path, model_type: str) -> Path:
    """A directory with config.json and the tokenizer's files."""
    backend, settings = FAMILIES[model_type]()
    backend.save(str(folder / "tokenizer.json"))
    added = {number: _fields(token) for number, token in backend.get_added_tokens_decoder().items()}
    settings |= {"added_tokens_decoder": added, "model_max_length": 4096}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def write_settings(folder: Path, **changed: Any) -> None:
    """Change entries of tokenizer_config.json; None removes an entry."""
    file = folder / "tokenizer_config.json"
    whole = json.loads(file.read_text()) | changed
    file.write_text(json.dumps({name: value for name, value in whole.items() if value is not None}))


def loaded(folder: Path) -> TextTokenizer:
    """A folder's tokenizer, with its decoder as the coordinator reads it."""
    tokenizer = TextTokenizer.load(folder)
    assert tokenizer is not None
    tokenizer.decoder.write(folder / DECODER)
    tokenizer.decoder = Detokenizer.read(folder / DECODER)
    return tokenizer


def _fields(token: AddedToken) -> dict[str, Any]:
    names = ("content", "lstrip", "rstrip", "normalized", "single_word", "special")
    return {name: getattr(token, name) for name in names}


def _as_json(content: str) -> dict[str, Any]:
    return _fields(_special(content)) | {"__type": "AddedToken"}
