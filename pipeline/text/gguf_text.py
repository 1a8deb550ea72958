"""What a GGUF file's metadata says of text: the tokenizer, chat templates, the tokens that end an answer, and
sampling settings. The tokenizer is made as the tokenizer.json of the model that the file was converted from
describes it, so that a text has the same ids.

transformers' converter of such files is not used: it knows few names of `gguf_words.py`, and takes another
tokenizer for the rest; it leaves out Unicode's form, and tokens that no merges make; its Llama tokenizer is not
Mixtral's; and it maps the file, which may be cut short meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.gguf_file import read_metadata
from pipeline.errors import ModelError
from pipeline.models.config_keys import shown
from pipeline.text.chat_format import ENDS
from pipeline.text.gguf_words import WORDS

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

KEYS = "tokenizer.ggml."
TEMPLATE, NAMES = "tokenizer.chat_template", "tokenizer.chat_templates"
# Types of tokens. UNUSED: fills up the rows of the embedding, and is no token.
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5
ENDING = ("eos_token_id", "eot_token_id", "eom_token_id")  # of a text, of a turn, of a turn that goes on
# Ends of a text, which a file leaves out where turns have an end of their own.
TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<eos>")
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
SAMPLING = {
    "temp": "temperature",
    "penalty_repeat": "repetition_penalty",
    **{name: name for name in ("top_k", "top_p", "min_p")},
}
SPACE = "▁"  # as pieces of SentencePiece have it


class GgufText:
    """The metadata of one file. Its methods raise ModelError, one line, for what cannot be used."""

    def __init__(self, path: Path, *, tokens: bool = False) -> None:
        """`tokens`: with the lists of tokens, which only `ends` and `load` need. Raises ModelError."""
        self._path = path
        self._fields: Mapping[str, Any] = read_metadata(path, long_arrays=tokens)

    @property
    def has_tokenizer(self) -> bool:
        return self._fields.get(KEYS + "model") not in (None, "none", "no_vocab")

    def templates(self) -> dict[str, str]:
        """Returns the chat templates by name; the one for conversations is "default"."""
        names = self._fields.get(NAMES)
        found = {str(name): self._fields.get(f"{TEMPLATE}.{name}") for name in names or ()}
        found["default"] = self._fields.get(TEMPLATE)
        return {name: text for name, text in found.items() if isinstance(text, str)}

    def eos_ids(self) -> frozenset[int]:
        """Returns the ids that the file says end an answer."""
        ids = (self._id(name) for name in ENDING)
        return frozenset(id for id in ids if id is not None)

    def sampling(self) -> dict[str, Any]:
        """Returns the settings that the file recommends, by the names of generation_config.json. They are not
        checked."""
        given = {ours: self._fields.get(f"general.sampling.{name}") for name, ours in SAMPLING.items()}
        # A float32 by its shortest decimal number: 0.6, and not 0.6000000238418579.
        short = {k: float(f"{v:.7g}") if isinstance(v, float) else v for k, v in given.items() if v is not None}
        return short | {"do_sample": short.get("temperature", bool(short)) != 0}

    def load(self) -> Any:
        """Returns transformers' tokenizer."""
        from transformers import PreTrainedTokenizerFast

        tokens, types = self._tokens()
        kind = self._fields.get(KEYS + "model")
        makers = {"gpt2": self._byte_level, "llama": self._pieces, "gemma4": self._pieces}
        if not isinstance(kind, str) or kind not in makers:
            raise ModelError(
                f"its kind is {shown(kind)}, and only {', '.join(makers)} are read: use the model's folder of"
                " safetensors instead"
            )
        backend, begins = makers[kind]({token: id for id, token in enumerate(tokens) if types[id] != UNUSED})
        _add_special(backend, tokens, types)
        special: dict[str, Any] = {}
        for name, field in SPECIAL.items():
            id = self._id(f"{field}_token_id")
            special[name] = tokens[id] if id is not None and id < len(tokens) else None
        # The template of Gemma 4 writes bos, and its own tokenizer adds none, whatever the file says.
        begins = kind != "gemma4" and self._fields.get(KEYS + "add_bos_token", begins) is True
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            add_bos_token=begins and special["bos_token"] is not None,
            clean_up_tokenization_spaces=False,
            chat_template=self.templates() or None,
            **special,
        )

    def _byte_level(self, vocabulary: dict[str, int]) -> tuple[Backend, bool]:
        """Returns a tokenizer whose tokens are bytes, and whether bos begins its texts by default."""
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

        name = self._fields.get(KEYS + "pre")
        words = WORDS.get(name) if isinstance(name, str) else None
        if words is None:
            raise ModelError(
                f"it cuts texts into words in the way {shown(name)}, which is not known, and another one gives"
                " other tokens: use the model's folder of safetensors instead"
            )
        merges = self._merges()
        backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=words.whole))
        if words.composed:
            backend.normalizer = normalizers.NFC()
        cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in words.cuts]
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytewise])
        backend.decoder = decoders.ByteLevel()
        return backend, words.begins

    def _pieces(self, vocabulary: dict[str, int]) -> tuple[Backend, bool]:
        """Returns a tokenizer of SentencePiece's kind, whose texts begin with bos by default."""
        from tokenizers import Tokenizer, decoders, models, normalizers
        from transformers.tokenization_utils_base import generate_merges

        if KEYS + "merges" in self._fields:
            merges = self._merges()
        else:
            scores = self._list("scores", len(vocabulary))
            merges = generate_merges(vocabulary, {token: scores[id] for token, id in vocabulary.items()})
        unknown = next((token for token, kind in zip(*self._tokens(), strict=True) if kind == UNKNOWN), None)
        model = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        backend = Tokenizer(model)
        prefix = self._fields.get(KEYS + "add_space_prefix", True) is True
        spaces = normalizers.Replace(" ", SPACE)
        before = [normalizers.Prepend(SPACE), spaces] if prefix else [spaces]
        backend.normalizer = normalizers.Sequence(before)
        after = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*after, decoders.Strip(" ", 1, 0)] if prefix else after)
        return backend, True

    def _tokens(self) -> tuple[list[str], list[int]]:
        """Returns the tokens by id, and their types."""
        tokens = self._list("tokens")
        types = self._list("token_type", len(tokens)) if KEYS + "token_type" in self._fields else [1] * len(tokens)
        used = [token for token, kind in zip(tokens, types, strict=True) if kind != UNUSED]
        if not all(isinstance(token, str) for token in used) or len(set(used)) < len(used):
            raise ModelError("its tokens are not all texts, or one is there twice: the file is damaged")
        return tokens, types

    def _merges(self) -> list[tuple[str, str]]:
        merges = self._list("merges")
        # A part is never empty, and may be a space of its own.
        ends = [merge.find(" ", 1) if isinstance(merge, str) else -1 for merge in merges]
        if min(ends, default=1) < 1:
            raise ModelError("its merges are not pairs of tokens: the file is damaged")
        return [(merge[:end], merge[end + 1 :]) for merge, end in zip(merges, ends, strict=True)]

    def _list(self, name: str, length: int | None = None) -> list[Any]:
        values = self._fields.get(KEYS + name)
        found = None if values is None or isinstance(values, (str, int, float)) else list(values)
        if found is None or length not in (None, len(found)):
            raise ModelError(f"it has no {name}, or not one of each token: the file is damaged")
        return found

    def _id(self, name: str) -> int | None:
        id = self._fields.get(KEYS + name)
        if id is not None and (not isinstance(id, int) or isinstance(id, bool) or not 0 <= id < 1 << 31):
            raise ModelError(f"{self._path}: {KEYS}{name} is {shown(id)}, which is no id of a token")
        return id


def _add_special(backend: Backend, tokens: list[str], types: list[int]) -> None:
    """Make the tokens that the file marks found as a whole in texts, and those that end an answer special."""
    from tokenizers import AddedToken

    special, plain = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (UNKNOWN, CONTROL) or (kind == USER_DEFINED and token in ENDS):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(token, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)
