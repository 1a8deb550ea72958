"""The bodies of requests as structs, and how they are decoded: OpenAI's chat and completions, and Anthropic's
messages; those of responses are in response_items.py. null counts as not given everywhere."""

from __future__ import annotations

import codecs
import logging
import re
import zlib
from importlib.util import find_spec
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from pipeline.fairness import RateLimiter
from pipeline.gateway.errors import ApiError, bad
from protocol.files import is_nested

log = logging.getLogger(__name__)
T = TypeVar("T")

MOST_SEED = (1 << 63) - 1
MOST_TOKENS = 1 << 31
MOST_CHOICES = 16
MOST_TOP = 20
MOST_PROMPTS = 512

# Whole numbers, of which some clients write 5 as 5.0
Tokens = Annotated[float, Meta(ge=1, le=MOST_TOKENS, multiple_of=1)]
TokensOrNone = Annotated[float, Meta(ge=0, le=MOST_TOKENS, multiple_of=1)]
TopK = Annotated[float, Meta(ge=-1, le=1 << 31, multiple_of=1)]
Choices = Annotated[float, Meta(ge=1, le=MOST_CHOICES, multiple_of=1)]
Top = Annotated[float, Meta(ge=0, le=MOST_TOP, multiple_of=1)]
Seed = Annotated[int, Meta(ge=-MOST_SEED, le=MOST_SEED)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Object = dict[str, Any]
ToolObjects = Annotated[list[Object], Meta(max_length=512)]
OpenAiEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(Struct):
    include_usage: bool | None = None


class SchemaObject(Struct):
    schema: Object


class Format(Struct):
    """Form that an answer has to follow, by one of its fields, as `type` says."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaObject | None = None
    schema: Object | None = None


class Common(Struct, kw_only=True):
    """Fields of all endpoints with an answer: how tokens are chosen, where it ends, what it follows."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: TopK | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


# --- OpenAI's chat and completions ----------------------------------------------------------------------


UNREAD = "[{} left out: only texts can be read here]"
TEXTS = ("text", "input_text", "output_text", "refusal", "encrypted_content")


class TextPart(Struct):
    """A part of a message's content, of which only texts can be read."""

    type: str
    text: str = ""
    refusal: str = ""

    def shown(self) -> str:
        """Returns the text that the model reads; of what is none, that it was there."""
        if self.type in TEXTS:
            return self.text or self.refusal
        kind = self.type[:40]
        note_once(f"parts of the type {kind!r} are left out, and named in the prompt", logging.WARNING)
        return UNREAD.format("image" if "image" in kind else kind)


Content = str | list[TextPart] | None


class CalledFunction(Struct):
    name: str
    arguments: str | Object


class CalledCustom(Struct):
    name: str
    input: str


class CallPart(Struct):
    """A tool's call in a conversation so far: one of `function` and `custom`, as `type` says."""

    function: CalledFunction | None = None
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    custom: CalledCustom | None = None


class ChatTurn(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    tool_calls: list[CallPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_call_id: str | None = None
    name: str | None = None


Turns = Annotated[list[ChatTurn], Meta(min_length=1, max_length=4096)]


class Function(Struct):
    name: str
    description: str | None = None
    parameters: Object | None = None


class ToolGrammar(Struct):
    syntax: str = ""
    definition: str = ""


class ToolFormat(ToolGrammar, kw_only=True):
    """What a tool's text follows. Chats have the grammar in a field of its own."""

    type: str
    grammar: ToolGrammar | None = None


class FreeTool(Struct):
    """A tool whose input is a text of any form."""

    name: str
    description: str | None = None
    format: ToolFormat | None = None


class FunctionTool(Struct, tag_field="type", tag="function"):
    function: Function


class TextTool(Struct, tag_field="type", tag="custom"):
    custom: FreeTool


class ChatBody(Common, kw_only=True):
    messages: Turns
    tools: ToolObjects | None = None  # as the template reads them; each is a FunctionTool or TextTool
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: OpenAiEffort | None = None
    stop: str | list[str] | None = None
    n: Choices | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    response_format: Format | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None


class CompletionBody(Common, kw_only=True):
    prompt: str | list[str | int | list[int]]
    stop: str | list[str] | None = None
    n: Choices | None = None
    max_tokens: TokensOrNone | None = None
    echo: bool | None = None
    logprobs: Top | None = None
    response_format: Format | None = None


# --- Anthropic's messages -------------------------------------------------------------------------------


class ThinkingBlock(Struct):
    thinking: str = ""


class UseBlock(Struct):
    name: str
    id: str = ""
    input: Object | None = None


class ResultBlock(Struct):
    tool_use_id: str
    content: str | list[Object] | None = None


class MessageTurn(Struct):
    """`content`: blocks, by their `type`, of which newer programs have ever new ones."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Object] | None = None


class CustomTool(Struct):
    """A tool that the client runs. `defer_loading`: the model is told of it where the conversation names
    it."""

    name: str
    input_schema: Object
    description: str | None = None
    defer_loading: bool | None = None


class ToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct):
    type: str  # disabled, or a way of thinking


class OutputConfig(Struct):
    effort: str | None = None
    format: Format | None = None


class CountBody(Common, kw_only=True):
    """Body of POST /v1/messages/count_tokens: all but the answer's length."""

    messages: Annotated[list[MessageTurn], Meta(min_length=1, max_length=4096)]
    system: str | list[Object] | None = None
    stop_sequences: str | list[str] | None = None
    tools: ToolObjects | None = None  # each by its `type`; without one it is a CustomTool
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None


class MessagesBody(CountBody, kw_only=True):
    max_tokens: Tokens


# --- decoding -------------------------------------------------------------------------------------------

MOST_NESTING = 200  # values in each other; schemas need some dozens
# Of a body, told by single characters of it: nothing else runs in this process while a body becomes
# objects, and they take far more memory than its bytes.
MOST_VALUES = 1 << 18
MOST_CONTAINERS = 1 << 16
MOST_KEYS = 1 << 16
MOST_EXPONENTS = 1 << 12  # each may take msgspec 0.01 ms
# Of JSON, one after the other; the group is half of a UTF-16 pair
ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_PLACE = re.compile(r"^(.*?)(?: - at (?:`key` in )?`\$(.*)`)?$", re.DOTALL)
_FIELD = re.compile(r"(required|unknown) field `(.{1,80})")

# Fields that would change the answer, and the values that do not. An endpoint may have one as its own field.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("functions", "function_call", "audio"), ([],)),
    **dict.fromkeys(("stop_token_ids", "bad_words", "allowed_token_ids", "prompt_logprobs"), ([], 0)),
    **dict.fromkeys(("truncate_prompt_tokens", "documents", "chat_template"), ([],)),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_grammar", "guided_choice"), ()),
    "structured_outputs": (),
    **dict.fromkeys(("use_beam_search", "include_stop_str_in_output", "return_token_ids"), (False,)),
    # of responses, where nothing is kept between requests
    **dict.fromkeys(("previous_response_id", "conversation", "prompt"), ()),
    "background": (False,),
    **dict.fromkeys(("n", "best_of"), (1,)),
    "top_logprobs": (0,),
    "suffix": ("",),
    "modalities": (["text"],),
    "truncation": ("disabled",),
    "length_penalty": (1, 1.0),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "typical_p": (1, 1.0),
    "mirostat": (0,),
}
NOTES = 5  # a second
MOST_NOTES = 1024  # different ones; their words are of clients, so there could be any number
_noted: set[str] = set()
_rate = RateLimiter(NOTES)


def note_once(text: str, level: int = logging.INFO) -> None:
    """Write a line into the log, the first time: programs send what it is about with every request. Of many
    at once, some are left to later requests."""
    if text not in _noted and len(_noted) < MOST_NOTES and _rate.spend():
        _noted.add(text)
        log.log(level, "%s", text)


def decoded(raw: bytes, kind: type[T], endpoint: str) -> T:
    """Returns the struct of a body. Fields of other servers are accepted, as clients send them by habit, and
    named in the log, but not those that change answers. Raises ApiError, which names the field."""
    given = parse_json(raw.removeprefix(codecs.BOM_UTF8))  # which some programs write before all
    body = fitting(given, kind, "")
    fields = set(kind.__struct_fields__)  # type: ignore[attr-defined]  # all kinds are structs
    for name, value in given.items():
        if value is None or name in fields:
            continue
        if name not in UNSUPPORTED:
            note_once(f"{endpoint}: the field {name[:40]!r} has no meaning here")
        elif value not in UNSUPPORTED[name]:
            raise bad(name, "is not supported here")
    return body


def parse_json(text: str | bytes, name: str = "") -> dict[str, Any]:
    """Returns the object of a JSON text: a body, or a field of this name. Raises ApiError, also for what the
    engine's libraries cannot write, values nested too deeply, and for too many of them."""
    raw = text.encode("utf-8", "replace") if isinstance(text, str) else text
    if too_many := _excess(raw) and _excess(_without_strings(raw)):
        raise ApiError(413, f"{name or 'the body'} has more than {too_many}")
    try:
        try:
            value: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, Any])
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            if raw.count(b"\\") > MOST_VALUES:  # a piece of memory for each
                raise
            value = msgspec.json.decode(ESCAPES.sub(_paired, raw), type=dict[str, Any])
        if raw.count(b"[") + raw.count(b"{") > MOST_NESTING and is_nested(value, MOST_NESTING):
            raise RecursionError
        return value
    except msgspec.ValidationError as e:
        raise misfit(e, name) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as e:
        reason = "nested too deeply" if isinstance(e, RecursionError) else str(e)[:200]
        error = f"is no valid JSON: {reason}"
        raise bad(name, error) if name else ApiError(400, f"the body {error}") from None


def _excess(raw: bytes) -> str:
    """Returns of what a JSON text has too much, by the characters that tell; "" where it has not."""
    containers = raw.count(b"[") + raw.count(b"{")
    exponents = raw.count(b"e") + raw.count(b"E") - raw.count(b"true") - raw.count(b"false")
    for found, most, what in (
        (containers, MOST_CONTAINERS, "objects and arrays"),
        (raw.count(b":"), MOST_KEYS, "fields"),
        (exponents, MOST_EXPONENTS, "numbers with exponents"),
        (raw.count(b",") + containers, MOST_VALUES, "values"),
    ):
        if found > most:
            return f"{most} {what}"
    return ""


def _without_strings(raw: bytes) -> bytes:
    """Returns a JSON text without what is in its strings; of more strings than a text may have, only the
    beginning."""
    bare = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    parts = bare.split(b'"', 4 * MOST_VALUES)
    return b"".join(parts[::2])


def _paired(escape: re.Match[bytes]) -> bytes:
    """Returns an escape of JSON; for half of a pair, by which a program has cut a text, the sign of that."""
    return b"\\ufffd" if escape[1] else escape[0]


def fitting(value: object, kind: type[T], name: str) -> T:
    """Returns a field's value as this type. Raises ApiError, which names the place in it."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        raise misfit(e, name) from None


def misfit(error: msgspec.ValidationError, name: str) -> ApiError:
    """Returns what a client is told of a value of another type or outside its limits, with the field's place
    in the body. `name`: of the field that was decoded; "" for the whole body."""
    match = _PLACE.match(str(error))
    assert match is not None
    text, place = match[1], name + (match[2] or "").replace("[...]", "")
    if field := _FIELD.search(text):
        place = f"{place}.{field[2].rstrip('`')}"
        text = "is required" if field[1] == "required" else "is not supported here"
    place = place.lstrip(".")[:200]
    text = text[:1].lower() + text[1:300]
    return bad(place, text) if place else ApiError(400, f"the body: {text}")


# ----------------------------------------------------------------------------------------------------------
# Bodies that a client has compressed. What comes out of one is bounded, whatever it claims.


CODINGS = ("gzip", "deflate", "zstd")
ALIASES = {"x-gzip": "gzip"}  # RFC 9110
EITHER = 32 + zlib.MAX_WBITS  # gzip's head or zlib's
MOST_MEMBERS = 64  # of a gzip body, each with a head of its own
MOST_WINDOW = 8 << 20  # bytes that a zstd frame may look back on, as RFC 9659 has it


def inflated(raw: bytes, coding: str, most: int) -> bytes:
    """Returns the plain bytes of a body. Raises ApiError for another coding (415), a damaged body (400) and
    one of more than `most` bytes (413), of which no more are decoded."""
    coding = ALIASES.get(coding, coding)
    if coding not in CODINGS:
        raise ApiError(
            415, f"the body's coding {coding[:40]!r} is not read; send {', '.join(CODINGS)} or plain"
        )
    if coding == "zstd" and find_spec("zstandard") is None:
        raise ApiError(415, "bodies in zstd need the Python package zstandard: pip install '.[serve]'")
    try:
        plain = _zstd(raw, most + 1) if coding == "zstd" else _zlib(raw, most + 1)
    except (ValueError, zlib.error) as e:
        raise ApiError(400, f"the body is no valid {coding}: {str(e)[:200]}") from None
    if len(plain) > most:
        raise ApiError(413, f"the body has more than {most >> 20} MB when it is decoded")
    return plain


def _zlib(raw: bytes, most: int) -> bytes:
    plain = b""
    for _ in range(MOST_MEMBERS):
        reader = zlib.decompressobj(EITHER)
        plain += reader.decompress(raw, most - len(plain))
        if len(plain) == most or (reader.eof and not reader.unused_data):
            return plain
        if not reader.eof:
            raise ValueError("it does not end where the body ends")
        raw = reader.unused_data
    raise ValueError(f"it has more than {MOST_MEMBERS} members")


def _zstd(raw: bytes, most: int) -> bytes:
    import zstandard

    reader = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW)
    try:
        plain: bytes = reader.stream_reader(raw, read_across_frames=True).read(most)
    except zstandard.ZstdError as e:
        raise ValueError(str(e)) from None
    return plain
