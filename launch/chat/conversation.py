"""A conversation with an engine, of which the older half is dropped when the context leaves too little room
for an answer; its settings, and its file. Answers go to a `View`."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from launch.command_line.checks import NO_TEMPLATE, NO_TOKENIZER, check_new_file, read_file
from launch.command_line.options import SAMPLING_FIELDS
from launch.command_line.table import TABLE
from launch.errors import AnswerLost, OutputFailed, WrongUsage
from launch.terminal.format import count
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import notice
from launch.terminal.output import show
from pipeline.errors import RequestError
from pipeline.policies.options import did_you_mean
from pipeline.text.chat_output import PARSER, ChatOutput, Part, opens_reasoning
from pipeline.text.generation_defaults import validate
from pipeline.text.tokenizer import read_template
from protocol.answer import Answer
from protocol.client import Client
from protocol.errors import MalformedMessage, RequestFailed
from protocol.messages import ChatMessage, Done, Sampling
from protocol.program import visible
from shm.atomic_file import atomic_file

log = logging.getLogger("tandem")

LARGEST_FILE = 16 << 20  # bytes of a saved conversation; one fits a model's context

Settings = dict[str, Any]  # the arguments of Client.generate but the prompt, and the fields of Sampling
# What /set changes.
KEYS = {
    option.key: option
    for option in (*TABLE["answer"], *TABLE["engine"])
    if option.key in SAMPLING_FIELDS | {"max_tokens"}
}


def change(settings: Settings, text: str, defaults: Settings) -> Settings:
    """Returns the settings after `key=value ...`; an empty value restores the default. Raises WrongUsage."""
    changed = dict(settings)
    for word in text.split():
        key, equals, value = word.partition("=")
        if key not in KEYS:
            raise WrongUsage(f"unknown setting {key[:40]!r}{did_you_mean(key, KEYS)} ({', '.join(KEYS)})")
        if not equals:
            raise WrongUsage(f"{key}: write it as {key}=value")
        read = KEYS[key].value
        assert callable(read)
        try:
            changed[key] = read(value) if value else defaults[key]
        except argparse.ArgumentTypeError as e:
            raise WrongUsage(f"{key}: {e}") from None
    try:
        validate(sampling(changed))
    except RequestError as e:
        raise WrongUsage(str(e)) from e
    return changed


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

    def reason(self, text: str) -> None:
        """Show the next part of the model's reasoning, apart from the answer: here on stderr."""
        print(visible(text), end="", file=sys.stderr, flush=True)

    def reasoned(self) -> None:
        """Note that this reasoning has ended."""
        print(file=sys.stderr, flush=True)

    def notice(self, text: str) -> None:
        """Show a message at once; the answer continues below it."""
        log.warning(text)

    def ended(self) -> None:
        """Note that the answer is complete."""
        show("\n")


@dataclass(frozen=True)
class Reply:
    text: str
    tokens: int  # with those of the reasoning
    first_s: float | None  # seconds from the request to its first token, by the client's clock
    done: Done
    reasoning: str = ""


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
        self._template = read_template(Path(client.welcome.model))
        self._opened: bool | None = None  # whether prompts end within reasoning, once that is known

    async def ask(self, text: str | None, view: View) -> Reply:
        """Ask a question, or the last one again. Raises AnswerLost where the engine shuts down meanwhile,
        EngineGone, and RequestFailed where it is refused even without earlier turns, WrongUsage where there
        is no last one; the conversation is then unchanged."""
        if text is None and not self.turns:
            raise WrongUsage("nothing has been asked yet")
        turns = self.turns[:-1] if text is None else (*self.turns, ChatMessage("user", text))
        context, notice = self._client.welcome.context, ""
        kept: Sequence[ChatMessage] = turns
        room = max(1, min(self.settings["max_tokens"], context // 2))  # for an answer to several turns
        while True:
            try:
                # A question alone may leave any room.
                reply = await self._answer(kept, room if len(kept) > 1 else 1, view, notice)
            except _PromptTooLong:
                if len(kept) == 1:
                    raise
                kept = kept[-1 - len(kept) // 4 * 2 :]
                dropped = count((len(turns) - len(kept)) // 2, "old turn")
                notice = f"dropped {dropped}: the context of {context} tokens left too little room"
            else:
                thoughts = json.dumps({"reasoning_content": reply.reasoning}) if reply.reasoning else ""
                self.turns = (*kept, ChatMessage("assistant", reply.text, thoughts))
                return reply

    async def _answer(self, turns: Sequence[ChatMessage], room: int, view: View, notice: str) -> Reply:
        """Send `turns`, show the answer. Raises _PromptTooLong where they leave less than `room` tokens."""
        opened = self._template.thinks and await self._opens_reasoning()
        began = time.monotonic()
        answer = self._send(turns, room)
        answer.on_queued = view.queued
        answer.on_waiting = lambda why: view.notice(f"waiting for {why}" if why else "the engine goes on")
        cancelling: set[asyncio.Task[None]] = set()  # references, or tasks may be collected before they run

        def cancel() -> None:
            cancelling.add(asyncio.ensure_future(answer.cancel()))

        tokens, first = 0, None
        try:
            with self._interrupts.handled_by(cancel):
                if self._template.thinks:
                    await asyncio.to_thread(__import__, PARSER)  # while the engine reads the prompt
                shown = _Shown(ChatOutput(self._template, {}, thinking=opened), view)
                async for token in answer:
                    if first is None:
                        first = time.monotonic() - began
                        if notice:
                            view.notice(notice)
                    tokens += 1
                    shown.feed(token.text)
        except RequestFailed as e:
            if answer.done is not None and "prompt_tokens" in answer.done.stats and first is None:
                raise _PromptTooLong(str(e), usage=True) from e
            raise
        assert answer.done is not None  # the loop above raises otherwise
        shown.feed(answer.done.text)
        shown.end()
        if answer.done.reason == "cancelled" and not cancelling:
            raise AnswerLost("the engine cancelled this answer; it is shutting down")
        return Reply(shown.texts["content"], tokens, first, answer.done, shown.texts["reasoning"])

    async def _opens_reasoning(self) -> bool:
        if self._opened is None:
            asked = await self._client.tokenize(messages=(ChatMessage("user", "x"),))
            self._opened = opens_reasoning(asked.ending)
        return self._opened

    def _send(self, turns: Sequence[ChatMessage], room: int) -> Answer:
        first = [] if self.system is None else [ChatMessage("system", self.system)]
        messages = [*first, *turns]
        settings = {key: value for key, value in self.settings.items() if key not in SAMPLING_FIELDS}
        settings |= {"sampling": sampling(self.settings), "reserve": room}
        if self._template.marks:
            settings["marks"] = True
        try:
            return self._client.generate(messages=messages, **settings)
        except MalformedMessage as e:  # larger than a message may be
            characters = sum(len(message.content) for message in messages)
            text = f"the prompt has {characters} characters, more than an engine accepts; shorten it"
            raise _PromptTooLong(text, usage=True) from e


class _Shown:
    """Shows an answer as it is taken apart, and adds up its `texts`: the content and the reasoning."""

    def __init__(self, output: ChatOutput, view: View) -> None:
        self._output = output
        self._view = view
        self._kind = "content"
        self.texts = {"content": "", "reasoning": ""}

    def feed(self, text: str) -> None:
        """Show what more of the answer makes certain."""
        self._show(self._output.feed(text))

    def end(self) -> None:
        """Show the rest."""
        self._show(self._output.finish())
        self._turn("content")
        self._view.ended()

    def _show(self, parts: Iterator[Part]) -> None:
        for part in parts:
            self._turn(part.kind)
            self.texts[part.kind] += part.text
            (self._view.reason if part.kind == "reasoning" else self._view.append)(part.text)

    def _turn(self, kind: str) -> None:
        if self._kind == "reasoning" and kind != "reasoning":
            self._view.reasoned()
        self._kind = kind


class _PromptTooLong(RequestFailed):
    """The prompt leaves too little room."""


def save(path: Path, system: str | None, turns: Sequence[ChatMessage]) -> None:
    """Write a conversation into a new file of mode 0600: a JSON list of messages, each a role and a content.
    Raises OutputFailed, or WrongUsage where there is one."""
    check_new_file("/save", path, replace=False)
    messages = [*([] if system is None else [ChatMessage("system", system)]), *turns]
    content = msgspec.json.encode([{"role": one.role, "content": one.content} for one in messages])
    try:
        with atomic_file(path) as file:
            file.write(msgspec.json.format(content, indent=1) + b"\n")
    except OSError as e:
        raise OutputFailed(f"cannot write {path}: {e.strerror}") from e


def load(path: Path) -> tuple[str | None, tuple[ChatMessage, ...]]:
    """Returns the system message and the turns of a file that `save` wrote. Raises WrongUsage, one line, for
    any other."""
    try:
        messages = msgspec.json.decode(read_file(path, LARGEST_FILE), type=tuple[ChatMessage, ...])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise WrongUsage(f"{path} is not a saved conversation: {' '.join(str(e).split())}") from None
    system = messages[0].content if messages and messages[0].role == "system" else None
    turns = messages[system is not None :]
    if [turn.role for turn in turns] != ["user", "assistant"] * (len(turns) // 2):
        raise WrongUsage(f"{path} is not a saved conversation: questions and answers must alternate")
    return system, turns
