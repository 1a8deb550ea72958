"""A model's tokenizer, as the text process loads it, and what its files say without being loaded. A model is
a folder, or a GGUF file, which has all of this in its metadata."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.checkpoint.index import check_place, read_fields
from pipeline.errors import ModelError, RequestError
from pipeline.models.config_keys import MAX_INT
from pipeline.models.shapes import is_gguf
from pipeline.text.chat_format import ENDS, TemplateKind
from pipeline.text.chat_history import as_template_reads
from pipeline.text.detokenizer import Detokenizer
from pipeline.text.gguf_text import GgufText, unsaid_ends
from protocol.files import read_small
from protocol.messages import ChatMessage

# A directory with any of these has a tokenizer; settings alone are not a tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tiktoken.model")
SETTINGS, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
FOREIGN = "fast_tokenizer_files"  # the setting that makes the library read a file of any name
# What the library may open in the directory, whichever class of tokenizer it makes.
OPENED = ("*.json", "*.jinja", "*/*.jinja", "*.model", "*.spm", "*.codes", "*tiktoken*", "vocab*", "merges*")
LOAD_SECONDS = 20  # of the processor; the largest known one takes 3
MEMORY = (
    4 << 30
)  # bytes that the text process may allocate; the longest text that a message holds takes 1.2 GB
LOAD_FAILURES = {  # what an exit code of the process means while it loads
    -signal.SIGPROF: f"took longer than {LOAD_SECONDS} s to load",
    -signal.SIGABRT: f"failed to load, or needs more than {MEMORY >> 30} GB of memory",
}
MAX_TEMPLATE = 1 << 22  # bytes of a chat template
MAX_TOKENIZER_BYTES = 1 << 28  # of each file; the largest known one has an eighth
# Arguments of the library's function that are no variables of a template.
RESERVED = {
    *("conversation", "tokenize", "chat_template", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "messages"),
}


def has_tokenizer(model_dir: Path) -> bool:
    """Returns whether a model has a tokenizer, which may be unusable. Raises ModelError for a damaged GGUF
    file."""
    if is_gguf(model_dir):
        return GgufText(model_dir).has_tokenizer
    return any((model_dir / name).is_file() for name in TOKENIZER_FILES)


def chat_templates(model_dir: Path) -> dict[str, str]:
    """Returns the chat templates in a model's files by name, without loading the tokenizer; the one for
    conversations is "default". Raises ModelError where a file cannot be read."""
    if is_gguf(model_dir):
        return GgufText(model_dir).templates()
    check_files(model_dir)
    single, folder = model_dir / "chat_template.jinja", model_dir / "additional_chat_templates"
    paths = {path.stem: path for path in folder.glob("*.jinja")}
    if single.is_file():
        paths["default"] = single
    try:
        if paths:  # which then replace those of the settings
            return {name: read_small(p, MAX_TEMPLATE).decode(errors="replace") for name, p in paths.items()}
    except OSError as e:
        raise ModelError(f"a chat template of {model_dir} cannot be read: {e.strerror}") from None
    given = _fields(model_dir / SETTINGS).get("chat_template")
    if given is None:  # older models for pictures have it in a file of its own
        given = _fields(model_dir / "chat_template.json").get("chat_template")
    entries = given if isinstance(given, list) else [{"name": "default", "template": given}]
    named = {str(e.get("name")): e.get("template") for e in entries if isinstance(e, dict)}
    return {name: text for name, text in named.items() if isinstance(text, str)}


def has_chat_template(model_dir: Path) -> bool:
    """Returns whether a model's files have a template for conversations. Raises ModelError."""
    return bool(chat_templates(model_dir).get("default"))


def read_template(model_dir: Path) -> TemplateKind:
    """Returns what the templates in a model's directory can do; nothing where none can be read."""
    try:
        return TemplateKind.of_text("\n".join(chat_templates(model_dir).values()))
    except (ModelError, OSError):
        return TemplateKind()


def eos_ids(model_dir: Path) -> frozenset[int]:
    """Returns the ids that end an answer, from the GGUF file, or generation_config.json, else config.json;
    empty where neither has any. Raises ModelError where a file is damaged."""
    if is_gguf(model_dir):
        return GgufText(model_dir).eos_ids()
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        if not path.exists():
            continue
        value = read_fields(path).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and abs(i) < MAX_INT for i in ids):
            raise ModelError(f"{path}: eos_token_id must be an id or a list of ids")
        return frozenset(ids)
    return frozenset()


class Tokenizer:
    """One model's tokenizer, made by `load`; `decoder` is its other half. Immutable."""

    def __init__(self, tokenizer: Any, model_dir: Path) -> None:
        """`tokenizer`: a transformers tokenizer backed by the `tokenizers` library."""
        self._tokenizer = tokenizer
        own, given = tokenizer.eos_token_id, tokenizer.chat_template
        eos = eos_ids(model_dir) or frozenset(() if own is None else (own,))
        texts = given.values() if isinstance(given, dict) else [given]
        self._template = "\n".join(text for text in texts if isinstance(text, str))
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder().items()
        special = {token.content: number for number, token in added if token.special}
        eos |= {special[end] for end in ENDS if end in special and end in self._template}
        if is_gguf(model_dir):
            eos |= {special[end] for end in unsaid_ends(self._template) if end in special}
        marks = {special[mark] for mark in TemplateKind.of_text(self._template).marks if mark in special}
        try:
            self.decoder = Detokenizer(tokenizer.backend_tokenizer, eos, marks)
        except ModelError as e:
            raise ModelError(f"{model_dir}: {e}") from None

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer | None:
        """Returns the tokenizer of a model, None where it has none. Reads local files only and runs no code
        from them. Raises ModelError where the files are unusable."""
        check_files(model_dir)
        if not has_tokenizer(model_dir):
            return None
        try:
            tokenizer = GgufText(model_dir, tokens=True).load() if is_gguf(model_dir) else _read(model_dir)
            if tokenizer.chat_template is None:
                tokenizer.chat_template = chat_templates(model_dir) or None
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # damaged files raise any; the library's panics are no Exception
            raise ModelError(f"cannot load the tokenizer in {model_dir}: {one_line(error)}") from error
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(
                f"the tokenizer in {model_dir} has no tokenizer.json and cannot be made into one"
            )
        return cls(tokenizer, model_dir)

    @property
    def has_chat_template(self) -> bool:
        """Returns whether there is a template for conversations; some models have only others, for tools or
        documents."""
        template = self._tokenizer.chat_template
        return bool(template.get("default") if isinstance(template, dict) else template)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, with the special tokens that the model's tokenizer adds (bos, mostly).
        Raises RequestError where the text is not valid Unicode."""
        ids: list[int] = self._tokenizer.encode(_valid(text), verbose=False)
        return ids

    def for_grammars(self, vocabulary: int) -> Any:
        """Returns llguidance's form of this tokenizer, for logits of this size; takes up to a second."""
        from llguidance.hf import from_tokenizer

        ends = sorted(self.decoder.eos_ids)
        return from_tokenizer(self._tokenizer, n_vocab=vocabulary, eos_token=ends or None)

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the ids of a text that a template has written, with its special tokens. Raises
        RequestError."""
        ids: list[int] = self._tokenizer.encode(_valid(text), add_special_tokens=False, verbose=False)
        return ids

    def prompt(self, messages: Sequence[ChatMessage], template: str = "") -> str:
        """Returns the text of a conversation up to the beginning of the model's answer. `template`: as in
        Generate. Raises RequestError where the model has no chat template, or the template refuses the
        conversation."""
        if not self.has_chat_template:
            raise RequestError("this model has no chat template; send a plain prompt instead")
        if not messages:
            raise RequestError("the conversation is empty; send at least one message")
        turns = [{"role": m.role, "content": m.content} | _json_object(m.extra) for m in messages]
        variables = {"add_generation_prompt": True} | _json_object(template)
        if reserved := variables.keys() & RESERVED:
            raise RequestError(f"{min(reserved)} is no variable of a chat template")
        try:
            turns = as_template_reads(turns, self._template, variables.get("tools") or [])
            text: str = self._tokenizer.apply_chat_template(turns, tokenize=False, **variables)
        except Exception as error:  # a template is a program, which may raise anything
            raise RequestError(f"the model's chat template refuses this: {one_line(error)}") from error
        return text


def check_files(model_dir: Path) -> None:
    """Raises ModelError for a file that the library would wait for, read without an end, or
    in another folder."""
    for path in (path for pattern in OPENED for path in model_dir.glob(pattern)):
        check_place(path, model_dir)
        if path.is_file() and path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise ModelError(f"{path} cannot be read: it is larger than {MAX_TOKENIZER_BYTES >> 20} MB")
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ModelError(f"{path} cannot be read: it is not a file")


def _read(model_dir: Path) -> Any:
    """Load a tokenizer. tokenizer.json describes it completely, so where a model has it, no class is chosen:
    several of transformers' classes replace parts of the file by the family's defaults, and AutoTokenizer
    chooses a class by `model_type`, `tokenizer_class` and `auto_map`. It also takes a second to import."""
    settings = _fields(model_dir / SETTINGS)
    if FOREIGN in settings:
        raise ModelError(f"{SETTINGS} has {FOREIGN}, which is not supported: remove it")
    # The library prints the unknown ones.
    if not all(name.isprintable() for name in _names([settings, _fields(model_dir / SPECIAL)])):
        raise ModelError(f"a name in {SETTINGS} or {SPECIAL} has control characters")
    if not (model_dir / "tokenizer.json").is_file():
        return _of_class(model_dir, settings)
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model_dir), local_files_only=True)
    tokenizer.model_max_length = MAX_INT  # the settings may hold anything; contexts have a limit of their own
    if _wants_bos(settings) and tokenizer.bos_token_id not in (None, *tokenizer.encode("")):
        tokenizer.add_bos_token = True
    return tokenizer


def _of_class(model_dir: Path, settings: dict[str, Any]) -> Any:
    """Load a tokenizer without tokenizer.json by its class. Raises ModelError where the class is a program in
    the folder, or needs a package."""
    own = "AutoTokenizer" in (settings.get("auto_map") or {})
    ranks = (model_dir / "tiktoken.model").is_file()  # which have no meaning without the program
    try:
        if own and ranks:
            raise ValueError
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        if own:
            name = str(settings.get("tokenizer_class"))[:40]
            raise ModelError(
                f"it is a program of the model's makers ({name}), which is not run here; put a tokenizer.json"
                " into the folder, as converted copies of the model have"
            ) from error
        package = "tiktoken" if ranks else "sentencepiece"
        if list(model_dir.glob("*.model")) and find_spec(package) is None:
            raise ModelError(f"it needs the Python package {package}: pip install {package}") from error
        raise


def _wants_bos(settings: dict[str, Any]) -> bool:
    """Returns whether the settings add bos to every text: DeepSeek's tokenizer.json leaves only this to the
    class, as transformers up to version 4 did."""
    name = str(settings.get("tokenizer_class")).removesuffix("Fast")
    return settings.get("add_bos_token") is True and name in ("LlamaTokenizer", "GPTNeoXTokenizer")


def _fields(path: Path) -> dict[str, Any]:
    return read_fields(path, MAX_TOKENIZER_BYTES) if path.exists() else {}


def _names(value: Any) -> Iterator[str]:
    """Yields the keys of all maps in a JSON value."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from _names(inner)


def _valid(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text is no valid Unicode at character {error.start}") from error
    return text


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError("what the chat template is given must be a JSON object")
    return value


def one_line(error: BaseException) -> str:
    """Returns an error's text without line breaks, or its kind."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:200]
