"""Small tokenizers of the kinds that real models have, each in its own model directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from family_tokenizers import loaded, sentence_pieces
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from pipeline.text.tokenizer import Tokenizer

TEXTS = [
    "The generator yields one value at a time, and the caller decides when it goes on.",
    "Die Erzeugung liefert jeweils einen Wert; für größere Mengen wählt man Blöcke.",
    "def generate(values):\n    for value in values:\n        yield value\n",
    "le générateur rend une valeur à la fois… naïve café 日本語 привет",
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('no such role: ' + m['role']) }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_model(folder: Path, backend: Backend, config: dict[str, object]) -> Path:
    """Write a model directory's tokenizer files, with a chat template and end tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    return folder


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<s>", "</s>", "<|assistant|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    # added tokens of plain text: of byte letters, of other letters, and with a space
    backend.add_tokens([AddedToken("<tool>"), AddedToken("日本 go"), AddedToken("Ġé")])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def llama_style() -> Backend:
    backend = sentence_pieces(TEXTS, vocab_size=300)
    backend.add_special_tokens(["<s>", "</s>", "<unk>"])
    backend.add_tokens([AddedToken("<tool>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def unigram() -> Backend:
    pieces = ["<unk>", "<s>", "</s>", "▁", "▁the", "▁value", "s", "▁▁"]
    pieces += sorted({c for t in TEXTS for c in t if c > " "})
    backend = Backend(models.Unigram([(piece, -1.0 * len(piece)) for piece in pieces], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


FAMILIES = {
    "byte-level": (byte_level, {}),
    "llama-style": (llama_style, {}),
    "llama-class": (llama_style, {"tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>"}),
    "unigram": (unigram, {}),
}


@pytest.fixture(scope="session", params=FAMILIES)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make, config = FAMILIES[request.param]
    return write_model(tmp_path_factory.mktemp(request.param), make(), config)


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return loaded(model_dir)
