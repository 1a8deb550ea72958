"""The tokenizer of a folder in a GGUF file, as llama.cpp's converter writes it, by the gguf package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, SpecialVocab, TokenType

PADDING = 5  # rows of the embedding behind the last token


def add_tokenizer(writer: GGUFWriter, folder: Path, kind: str, pre: str = "") -> None:
    """Add what a folder's tokenizer.json and settings say. `kind`: tokenizer.ggml.model; `pre`: how a
    byte-level one cuts words."""
    fields = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = dict(fields["model"]["vocab"])
    added = {token["content"]: token for token in fields["added_tokens"]}
    vocabulary |= {content: token["id"] for content, token in added.items()}
    named = {number: token for token, number in vocabulary.items()}
    tokens, types = [], []
    for number in range(max(named) + 1 + PADDING * (kind == "gpt2")):
        token = named.get(number, f"[PAD{number}]")
        tokens.append(token)
        if number not in named:
            types.append(TokenType.UNUSED)
        elif token == "<unk>":
            types.append(TokenType.UNKNOWN)
        elif token in added:
            types.append(TokenType.CONTROL if added[token]["special"] else TokenType.USER_DEFINED)
        elif kind != "gpt2" and token.startswith("<0x"):
            types.append(TokenType.BYTE)
        else:
            types.append(TokenType.NORMAL)
    writer.add_tokenizer_model(kind)
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if kind == "llama":
        writer.add_token_scores(_scores(tokens, fields["model"]["merges"]))
    special = SpecialVocab(folder, load_merges=kind != "llama")
    special.add_to_gguf(writer, quiet=True)


def _scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """SentencePiece's: what is merged first has the best one, and what is never merged none."""
    ranks = {"".join(pair): float(-rank) for rank, pair in reversed(list(enumerate(merges)))}
    return [ranks.get(token, -1e9) for token in tokens]


def write_gguf(path: Path, folder: Path, kind: str = "gpt2", pre: str = "", **more: Any) -> Path:
    """Write a file with a folder's tokenizer, without tensors. `more`: settings by their keys, with a dot for
    each two underscores, instead of what the folder says; None leaves one out."""
    writer = GGUFWriter(path, "qwen3moe")
    add_tokenizer(writer, folder, kind, pre)
    for name, value in more.items():
        for settings in writer.kv_data:
            settings.pop(name.replace("__", "."), None)
        if value is not None:
            _add(writer, name.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)
