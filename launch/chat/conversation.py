"""A conversation with an engine, of which the oldest turns are dropped when the context leaves too little
room for an answer; its settings, and its file. Answers go to a `View`.

Lengths of turns are estimates: the engine's count for the whole prompt, divided by characters."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from launch.command_line.checks import NO_TEMPLATE, NO_TOKENIZER, read_file
from launch.command_line.options import SAMPLING_FIELDS
from launch.command_line.table import TABLE
from launch.errors import AnswerLost, OutputFailed, WrongUsage
from launch.terminal.format import count
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import notice
from launch.terminal.output import show
from pipeline.errors import RequestError
from pipeline.policies.options import did_you_mean
from pipeline.text.generation_defaults import validate
from protocol.answer import Answer
from protocol.client import Client
from protocol.errors import MalformedMessage, RequestFailed
from protocol.messages import ChatMessage, Done, Sampling
from shm.atomic_file import atomic_file

log = logging.getLogger("tandem")

CHARACTERS = 4  # of a token, roughly
MARKUP = 12  # characters that count for what the chat template writes around a message
LARGEST_FILE = 16 << 20  # bytes of a saved conversation; one fits a model's context
KV_NAME = "chat"  # under which the engine keeps this client's KV between questions

Settings = dict[str, Any]  # a value for each of KEYS
KEYS = {
    option.key: option
    for option in (*TABLE["answer"], *TABLE["engine"])
    if option.key in SAMPLING_FIELDS | {"max_tokens", "stop", "ignore_eos"}
}
NONE = "none"  # as a value of `stop` and `seed`
SWITCH = {"on": True, "off": False}


def change(settings: Settings, text: str, defaults: Settings) -> Settings:
    """Returns the settings after `key=value ...`; an empty value restores the default. Raises WrongUsage."""
    try:
        words = [word.partition("=") for word in shlex.split(text)]
    except ValueError:
        raise WrongUsage("a quotation mark is not closed; write \\' for a literal one") from None
    changed = dict(settings)
    for key, equals, value in words:
        if key not in KEYS:
            raise WrongUsage(f"unknown setting {key[:40]!r}{did_you_mean(key, KEYS)} ({', '.join(KEYS)})")
        if not equals:
            raise WrongUsage(f"{key}: write it as {key}=value")
        changed[key] = _value(key, value) if value else defaults[key]
    if several := [_stop(value) for key, _, value in words if key == "stop" and value not in ("", NONE)]:
        changed["stop"] = tuple(several)
    try:
        validate(sampling(changed))
    except RequestError as e:
        raise WrongUsage(str(e)) from e
    return changed


def _value(key: str, text: str) -> Any:
    read = KEYS[key].value
    if key == "stop":
        return () if text == NONE else (_stop(text),)
    if key == "seed" and text == NONE:
        return None
    if callable(read):
        try:
            return read(text)
        except argparse.ArgumentTypeError as e:
            raise WrongUsage(f"{key}: {e}") from None
    if text not in SWITCH:
        raise WrongUsage(f"{key}: must be on or off, not {text}")
    return SWITCH[text]


def _stop(text: str) -> str:
    return text.replace("\\n", "\n").replace("\\t", "\t")


def value_text(value: Any) -> str:
    """Returns the value of a setting as /set takes it."""
    if value is None or value == ():
        return NONE
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(shlex.quote(text.replace("\n", "\\n").replace("\t", "\\t")) for text in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def sampling(settings: Settings) -> Sampling:
    return Sampling(**{key: settings[key] for key in SAMPLING_FIELDS})


class View:
    """Shows an answer and its events as they arrive: here its text on stdout, messages on stderr."""

    def queued(self, position: int) -> None:
        """Show that the request is in the queue; position 1 is the next to start."""
        notice(f"queued, position {position}")

    def append(self, text: str) -> None:
        """Show the next part of the answer, in whole characters."""
        show(text)

    def notice(self, text: str) -> None:
        """Show a message at once; the answer continues below it."""
        log.warning(text)

    def cancelling(self) -> None:
        """Note that Ctrl-C was pressed: the answer ends soon."""

    def ended(self) -> None:
        """Note that the answer is complete."""
        show("\n")


@dataclass(frozen=True)
class Reply:
    text: str
    tokens: int
    first_s: float | None  # seconds from the request to its first token, by the client's clock
    done: Done


class Conversation:
    """The turns so far, and the client that continues them. Between two requests the last turn is an answer.
    `settings` and `system`, the system message, may be changed at any time."""

    def __init__(
        self, client: Client, settings: Settings, interrupts: Interrupts, system: str | None = None
    ) -> None:
        """Raises WrongUsage for a model that cannot chat."""
        if not client.welcome.has_chat_template:
            without = f"{NO_TOKENIZER}: use `generate --prompt-tokens`"
            raise WrongUsage(NO_TEMPLATE if client.welcome.has_tokenizer else without)
        self.settings = settings
        self.system = system
        self.turns: tuple[ChatMessage, ...] = ()  # questions and answers in alternation
        self._client = client
        self._interrupts = interrupts

    async def ask(self, text: str | None, view: View) -> Reply:
        """Ask a question, or the last one again. Raises AnswerLost where the engine shuts down meanwhile,
        EngineGone, and RequestFailed where it is refused even without earlier turns, WrongUsage where there
        is no last one; the conversation is then unchanged."""
        if text is None and not self.turns:
            raise WrongUsage("nothing has been asked yet")
        turns = self.turns[:-1] if text is None else (*self.turns, ChatMessage("user", text))
        context, notice = self._client.welcome.context, ""
        kept: Sequence[ChatMessage] = turns
        room = answer_room(context, self.settings["max_tokens"])
        while True:
            try:
                # A question alone may leave any room.
                reply = await self._answer(kept, room if len(kept) > 1 else 1, view, notice)
            except _PromptTooLong as e:
                if len(kept) == 1:
                    raise
                kept = trimmed(kept, self.system, tokens=e.tokens, free=context - room)
                dropped = count((len(turns) - len(kept)) // 2, "old turn")
                notice = f"dropped {dropped}: the context of {context} tokens left too little room"
            else:
                self.turns = (*kept, ChatMessage("assistant", reply.text))
                return reply

    async def _answer(self, turns: Sequence[ChatMessage], room: int, view: View, notice: str) -> Reply:
        """Send `turns`, show the answer. Raises _PromptTooLong where they leave less than `room` tokens."""
        began = time.monotonic()
        answer = self._send(turns, room)
        answer.on_queued = view.queued
        cancelling: set[asyncio.Task[None]] = set()  # references, or tasks may be collected before they run

        def cancel() -> None:
            cancelling.add(asyncio.ensure_future(answer.cancel()))
            view.cancelling()

        text, tokens, first = "", 0, None
        try:
            with self._interrupts.handled_by(cancel):
                async for token in answer:
                    if first is None:
                        first = time.monotonic() - began
                        if notice:
                            view.notice(notice)
                    text, tokens = text + token.text, tokens + 1
                    view.append(token.text)
        except RequestFailed as e:
            if answer.done is not None and "prompt_tokens" in answer.done.stats and first is None:
                raise _PromptTooLong(str(e), answer.done.stats["prompt_tokens"]) from e
            raise
        assert answer.done is not None  # the loop above raises otherwise
        view.append(answer.done.text)
        view.ended()
        if answer.done.reason == "cancelled" and not cancelling:
            raise AnswerLost("the engine cancelled this answer; it is shutting down")
        return Reply(text + answer.done.text, tokens, first, answer.done)

    def _send(self, turns: Sequence[ChatMessage], room: int) -> Answer:
        first = [] if self.system is None else [ChatMessage("system", self.system)]
        messages = [*first, *turns]
        settings = {key: value for key, value in self.settings.items() if key not in SAMPLING_FIELDS}
        settings |= {"sampling": sampling(self.settings), "conversation": KV_NAME, "reserve": room}
        try:
            return self._client.generate(messages=messages, **settings)
        except MalformedMessage as e:  # larger than a message may be
            characters = sum(len(message.content) for message in messages)
            text = f"the prompt has {characters} characters, more than an engine accepts; shorten it"
            raise _PromptTooLong(text, characters // CHARACTERS) from e


def answer_room(context: int, max_tokens: int) -> int:
    """Returns the tokens of the context that a prompt with earlier turns leaves for the answer."""
    return max(1, min(max_tokens, context // 2))


def trimmed(
    turns: Sequence[ChatMessage], system: str | None, *, tokens: int, free: int
) -> Sequence[ChatMessage]:
    """Returns the newest of `turns`, for a prompt of `tokens` tokens of which `free` have room. `turns`:
    questions and answers in pairs, and then the new question, which is always kept.

    So many pairs are dropped at once, one at least, that the others fill half of what system message and
    question leave: the following prompts then only grow, and their KV is reused."""
    sizes = [MARKUP + len(turn.content) for turn in turns]
    whole = sum(sizes) + (0 if system is None else MARKUP + len(system))
    scale = tokens / whole  # tokens for each character
    left = free - tokens + scale * sum(sizes[:-1])
    first = 2
    while first < len(turns) - 1 and scale * sum(sizes[first:-1]) > left / 2:
        first += 2
    return turns[first:]


class _PromptTooLong(RequestFailed):
    """The prompt leaves too little room. `tokens`: its length, or an estimate of a very long one."""

    def __init__(self, text: str, tokens: int) -> None:
        super().__init__(text, usage=True)
        self.tokens = tokens


class _Turn(Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    content: str


class Transcript(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation as a file of JSON, mode 0600. Questions and answers alternate, from the first question
    to the last answer."""

    model: str = ""
    system: Annotated[str, Meta(min_length=1)] | None = None
    messages: list[_Turn]

    @classmethod
    def of(cls, model: str, system: str | None, turns: Sequence[ChatMessage]) -> Transcript:
        messages = [_Turn(turn.role, turn.content) for turn in turns]  # type: ignore[arg-type]
        return cls(model=model, system=system, messages=messages)

    @property
    def turns(self) -> tuple[ChatMessage, ...]:
        return tuple(ChatMessage(turn.role, turn.content) for turn in self.messages)

    def save(self, path: Path, replace: bool = True) -> None:
        """Write the file. Raises OutputFailed, or WrongUsage where one exists that it may not replace."""
        if not replace and os.path.lexists(path):
            raise WrongUsage(f"{path} exists; choose another name")
        try:
            if path.is_dir():
                raise OutputFailed(f"{path} is a directory")
            with atomic_file(path) as file:
                file.write(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        except OSError as e:
            raise OutputFailed(f"cannot write {path}: {e.strerror}") from e

    @classmethod
    def load(cls, path: Path) -> Transcript:
        """Read a file. Raises WrongUsage, one line, for another format."""
        try:
            read = msgspec.json.decode(read_file(path, LARGEST_FILE), type=cls)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
            raise WrongUsage(f"{path} is not a saved conversation: {' '.join(str(e).split())}") from None
        if [turn.role for turn in read.messages] != ["user", "assistant"] * (len(read.messages) // 2):
            raise WrongUsage(f"{path} is not a saved conversation: questions and answers must alternate")
        return read
