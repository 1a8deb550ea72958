"""What a GGUF file's metadata says of text: the tokenizer, chat templates, the tokens that end an answer, and
sampling settings. The tokenizer is made as the tokenizer.json of the model that the file was converted from
describes it, so that a text has the same ids.

transformers' converter of such files is not used: it knows half of the names of WORDS below, and cuts
otherwise for the rest; it leaves out Unicode's form, and tokens that no merges make; its Llama tokenizer is
not Mixtral's; and it maps the file, which may be cut short meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import ModelError
from pipeline.models.config_keys import shown
from pipeline.text.chat_format import ENDS, TemplateKind

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

KEYS = "tokenizer.ggml."
TEMPLATE, NAMES = "tokenizer.chat_template", "tokenizer.chat_templates"
KINDS = ("gpt2", "llama", "gemma4")  # bytes; pieces with scores; pieces with merges
INSTEAD = ": use the model's folder with safetensors instead"
# Types of tokens. UNUSED: fills up the rows of the embedding, and is no token.
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5
ENDING = ("eos_token_id", "eot_token_id", "eom_token_id")  # of a text, of a turn, of a turn that goes on
# Ends of a text, which a file leaves out where turns have an end of their own, and an end of turns that files
# do not name: generation_config.json has them all. In Harmony's form <|end|> is behind each part of a turn.
TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<eos>")
TURN_END = "<|end|>"
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
SAMPLING = {
    "temp": "temperature",
    "penalty_repeat": "repetition_penalty",
    **{name: name for name in ("top_k", "top_p", "min_p")},
}
SPACE = "▁"  # as pieces of SentencePiece have it


def unsaid_ends(template: str) -> tuple[str, ...]:
    """Returns the tokens that end an answer of a model with this chat template, whatever its file says."""
    ends_turn = TURN_END in template and TemplateKind.of_text(template).calls != "harmony"
    return (*TEXT_ENDS, TURN_END) if ends_turn else TEXT_ENDS


class GgufText:
    """The metadata of one file. Its methods raise ModelError, one line, for what cannot be used."""

    def __init__(self, path: Path, *, tokens: bool = False) -> None:
        """`tokens`: with the lists of tokens, which only `load` needs. Raises ModelError."""
        self._path = path
        changed = path.stat().st_mtime_ns if path.exists() else 0
        self._fields = _metadata(path) if tokens else _few(path, changed)

    @property
    def has_tokenizer(self) -> bool:
        return self._fields.get(KEYS + "model") not in (None, "none", "no_vocab")

    def templates(self) -> dict[str, str]:
        """Returns the chat templates by name; the one for conversations is "default"."""
        names = self._fields.get(NAMES, [])
        keys = {str(name): f"{TEMPLATE}.{name}" for name in (names if isinstance(names, list) else ())}
        found = {name: self._fields.get(key) for name, key in (keys | {"default": TEMPLATE}).items()}
        return {name: text for name, text in found.items() if isinstance(text, str)}

    def eos_ids(self) -> frozenset[int]:
        """Returns the ids that the file says end an answer."""
        ids = (self._id(name) for name in ENDING)
        return frozenset(id for id in ids if id is not None)

    def sampling(self) -> dict[str, Any]:
        """Returns the settings that the file recommends, by the names of generation_config.json. They are not
        checked."""
        given = {ours: self._fields.get(f"general.sampling.{name}") for name, ours in SAMPLING.items()}
        found = {name: value for name, value in given.items() if value is not None}
        return found | {"do_sample": bool(found) and found.get("temperature") != 0}

    def load(self) -> Any:
        """Returns transformers' tokenizer."""
        from transformers import PreTrainedTokenizerFast

        kind = self._fields.get(KEYS + "model")
        if kind not in KINDS:
            raise ModelError(f"its kind is {shown(kind)}, and only {', '.join(KINDS)} are read{INSTEAD}")
        tokens, types = self._tokens()
        vocabulary = {token: id for id, token in enumerate(tokens) if types[id] != UNUSED}
        if kind == "gpt2":
            backend, begins = self._byte_level(vocabulary)
        else:
            scores = self._list("scores", len(tokens)) if kind == "llama" else None
            unknown = tokens[types.index(UNKNOWN)] if UNKNOWN in types else None
            backend, begins = self._pieces(vocabulary, scores, unknown), True
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
                f"it cuts texts into words as {shown(name)}, which is not known, and another way gives other"
                f" tokens{INSTEAD}"
            )
        backend = Tokenizer(models.BPE(vocabulary, self._merges(), ignore_merges=words.whole))
        if words.composed:
            backend.normalizer = normalizers.NFC()
        cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in words.cuts]
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytewise])
        backend.decoder = decoders.ByteLevel()
        return backend, words.begins

    def _pieces(self, vocabulary: dict[str, int], scores: list[Any] | None, unknown: str | None) -> Backend:
        """Returns a tokenizer of SentencePiece's kind. `scores`: of the tokens by id, where the file has no
        merges: the better one is merged first."""
        from tokenizers import Tokenizer, decoders, models, normalizers
        from transformers.tokenization_utils_base import generate_merges

        if scores is None:
            merges = self._merges()
        elif len(set(scores)) > 1:
            merges = generate_merges(vocabulary, {token: scores[id] for token, id in vocabulary.items()})
        else:
            raise ModelError(f"its tokens have no scores, so it is not known what to merge first{INSTEAD}")
        model = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        backend = Tokenizer(model)
        prefix = scores is not None and self._fields.get(KEYS + "add_space_prefix", True) is True
        spaces = normalizers.Replace(" ", SPACE)
        before = [normalizers.Prepend(SPACE), spaces] if prefix else [spaces]
        backend.normalizer = normalizers.Sequence(before)
        after = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*after, decoders.Strip(" ", 1, 0)] if prefix else after)
        return backend

    def _tokens(self) -> tuple[list[str], list[int]]:
        """Returns the tokens by id, and their types."""
        tokens = self._list("tokens")
        types = (
            self._list("token_type", len(tokens))
            if KEYS + "token_type" in self._fields
            else [1] * len(tokens)
        )
        used = {token: kind for token, kind in zip(tokens, types, strict=True) if kind != UNUSED}
        if not all(isinstance(token, str) for token in used):
            raise ModelError("its tokens are no texts: the file is damaged")
        if len(used) + types.count(UNUSED) < len(tokens):
            raise ModelError("it has a token twice: the file is damaged")
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
        if not isinstance(values, list) or length not in (None, len(values)):
            raise ModelError(f"it has no {name}, or not one of each token: the file is damaged")
        return values

    def _id(self, name: str) -> int | None:
        id = self._fields.get(KEYS + name)
        if id is not None and (not isinstance(id, int) or isinstance(id, bool) or not 0 <= id < 1 << 31):
            raise ModelError(f"{self._path}: {KEYS}{name} is {shown(id)}, which is no id of a token")
        return id


def _metadata(path: Path, long_arrays: bool = True) -> Mapping[str, Any]:
    # Imported here: the package that it needs takes a moment, and few models are such files.
    from pipeline.checkpoint.gguf_file import read_metadata

    return read_metadata(path, long_arrays)


@lru_cache(maxsize=2)
def _few(path: Path, changed: int) -> Mapping[str, Any]:
    """The metadata without lists. A start asks for it several times, and a header has megabytes."""
    return _metadata(path, long_arrays=False)


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


# ----------------------------------------------------------------------------------------------------------
# How the byte-level tokenizers of GGUF files cut a text into words, by `tokenizer.ggml.pre`: a file has
# only this name, and the regular expressions are in the tokenizer.json of the models that it stands for.


@dataclass(frozen=True)
class Words:
    """`cuts`: regular expressions, one after the other, each of which cuts the pieces that it matches out of
    the text; tokens are merged within a piece. `composed`: the text is brought into Unicode's form NFC first.
    `whole`: a piece that is a token is never merged from smaller ones. `begins`: bos begins a text, where the
    file does not say."""

    cuts: tuple[str, ...]
    composed: bool = False
    whole: bool = False
    begins: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")  # each digit is a word
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KIMI = (  # && is the intersection of two classes
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_LLM = (
    "[\r\n]",
    # Letters with a case, of the scripts that have one. Those with \u look like others.
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
    "\u1f5f-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌ\u1fd0-\u1fd3\u1fd6-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-\u212dℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄ"
    "Ⰰ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-\ud7ff]+",
    r"\p{N}",
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

WORDS = {
    "gpt-2": Words((_GPT2,)),
    "olmo": Words((_GPT2,), composed=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), Words((_LLAMA3,), whole=True, begins=True)),
    "tekken": Words((_TEKKEN,), whole=True, begins=True),
    "qwen2": Words((_QWEN2,), composed=True),
    "qwen35": Words((_QWEN35,), composed=True),
    **dict.fromkeys(("gpt-4o", "minimax-m2"), Words((_GPT4O,))),
    **dict.fromkeys(("glm4", "chatglm-bpe"), Words((_LLAMA3,))),
    "kimi-k2": Words((_KIMI,), whole=True),
    "deepseek-llm": Words(_DEEPSEEK_LLM),
    "deepseek-v3": Words(_DEEPSEEK3),
}
