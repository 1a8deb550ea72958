"""A conversation with an engine, of which the oldest turns are dropped when the context leaves too little
room for an answer; and its file. It prints nothing: answers go to a `View`.

Lengths of turns are estimates: the engine's count for the whole prompt, divided by characters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta, Struct

from launch.chat.settings import AnswerSettings
from launch.command_line.checks import NO_TEMPLATE, NO_TOKENIZER, read_file
from launch.errors import AnswerLost, OutputFailed, WrongUsage
from launch.terminal.interrupts import Interrupts
from protocol.answer import Answer
from protocol.client import Client
from protocol.errors import MalformedMessage, RequestFailed
from protocol.messages import ChatMessage, Done
from shm.atomic_file import atomic_file

CHARACTERS = 4  # of a token, roughly
MARKUP = 12  # characters that count for what the chat template writes around a message
LARGEST_FILE = 16 << 20  # bytes of a saved conversation; one fits a model's context
KV_NAME = "chat"  # under which the engine keeps this client's KV between questions


class View(Protocol):
    """Receives an answer and its events as they arrive."""

    def queued(self, position: int) -> None:
        """The request is in the queue; position 1 is the next to start."""

    def append(self, text: str) -> None:
        """The next part of the answer, in whole characters."""

    def notice(self, text: str) -> None:
        """A message to show at once; the answer continues below it."""

    def cancelling(self) -> None:
        """Ctrl-C was pressed: the answer ends soon."""

    def ended(self) -> None:
        """The answer is complete."""


@dataclass(frozen=True)
class Reply:
    text: str
    tokens: int
    first_s: float | None  # seconds from the request to its first token, by the client's clock
    done: Done


class Conversation:
    """The turns so far, and the client that continues them. Between two requests the last turn is an answer.
    `settings` and `system`, the system message, may be changed at any time."""

    def __init__(self, client: Client, settings: AnswerSettings, system: str | None = None) -> None:
        """Raises WrongUsage for a model that cannot chat."""
        if not client.welcome.has_chat_template:
            without = f"{NO_TOKENIZER}: use `generate --prompt-tokens`"
            raise WrongUsage(NO_TEMPLATE if client.welcome.has_tokenizer else without)
        self.settings = settings
        self.system = system
        self._client = client
        self._turns: list[ChatMessage] = []
        self._dropping = False  # the last question dropped turns

    @property
    def turns(self) -> tuple[ChatMessage, ...]:
        """Questions and answers in alternation, without the system message."""
        return tuple(self._turns)

    def restore(self, turns: Sequence[ChatMessage]) -> None:
        """Replace the turns by these, questions and answers in pairs."""
        self._turns = list(turns)
        self._dropping = False

    async def ask(self, text: str, view: View, interrupts: Interrupts) -> Reply:
        """Ask a question. Raises AnswerLost where the engine shuts down meanwhile, EngineGone, and
        RequestFailed where it is refused even without earlier turns; the conversation is then unchanged."""
        return await self._continue([*self._turns, ChatMessage("user", text)], view, interrupts)

    async def ask_again(self, view: View, interrupts: Interrupts) -> Reply:
        """Replace the last answer. Raises WrongUsage before the first question, and what `ask` raises."""
        if not self._turns:
            raise WrongUsage("nothing has been asked yet")
        return await self._continue(self._turns[:-1], view, interrupts)

    async def _continue(self, turns: list[ChatMessage], view: View, interrupts: Interrupts) -> Reply:
        """The answer to `turns`, or to the newest of them where all leave too little room for an answer."""
        context = self._client.welcome.context
        room = answer_room(context, self.settings.max_tokens)
        kept = turns
        while True:
            # Where every turn drops one, beside a long system message, it is said once.
            notice = "" if self._dropping else _dropped((len(turns) - len(kept)) // 2, context)
            try:
                # A question alone may leave any room.
                reply = await self._answer(kept, room if len(kept) > 1 else 1, view, interrupts, notice)
            except _PromptTooLong as e:
                if len(kept) == 1:
                    raise  # self._turns is unchanged
                kept, room = trimmed(kept, self.system, tokens=e.tokens, context=context, room=room)
            else:
                self._turns = [*kept, ChatMessage("assistant", reply.text)]
                self._dropping = len(kept) < len(turns)
                return reply

    async def _answer(
        self, turns: list[ChatMessage], room: int, view: View, interrupts: Interrupts, notice: str
    ) -> Reply:
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
            with interrupts.handled_by(cancel):
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
        if first is None and notice:
            view.notice(notice)
        view.append(answer.done.text)
        view.ended()
        if answer.done.reason == "cancelled" and not cancelling:
            raise AnswerLost("the engine cancelled this answer; it is shutting down")
        return Reply(text + answer.done.text, tokens, first, answer.done)

    def _send(self, turns: list[ChatMessage], room: int) -> Answer:
        first = [] if self.system is None else [ChatMessage("system", self.system)]
        messages = [*first, *turns]
        settings: dict[str, Any] = vars(self.settings)
        try:
            return self._client.generate(messages=messages, conversation=KV_NAME, reserve=room, **settings)
        except MalformedMessage as e:  # larger than a message may be
            characters = sum(len(message.content) for message in messages)
            text = f"the prompt has {characters} characters, more than an engine accepts; shorten it"
            raise _PromptTooLong(text, characters // CHARACTERS) from e


def answer_room(context: int, max_tokens: int) -> int:
    """Tokens of the context that a prompt with earlier turns leaves for the answer: `max_tokens`, but at
    least a quarter of the context."""
    return max(1, context // 4, min(max_tokens, context))


def trimmed(
    turns: Sequence[ChatMessage], system: str | None, *, tokens: int, context: int, room: int
) -> tuple[list[ChatMessage], int]:
    """The newest of `turns` and the room for their answer, for a prompt of `tokens` tokens that left less
    than `room`. `turns`: questions and answers in pairs, and then the new question, which is always kept.

    Earlier turns may fill what system message, question and room leave of the context. So many are dropped
    at once that the others fill half of it (the last pair may fill all): the following prompts then only
    grow, and their KV is reused. Where nothing is left for earlier turns, the room is reduced to a quarter of
    the context. At least one pair is dropped, unless a reduced room suffices."""
    sizes = [MARKUP + len(turn.content) for turn in turns]
    whole = sum(sizes) + (0 if system is None else MARKUP + len(system))
    scale = tokens / whole  # tokens for each character
    history = scale * sum(sizes[:-1])
    free = context - room - (tokens - history)
    if free <= 0 and room > (least := max(1, context // 4)):
        free, room = free + room - least, least
        if history <= free:
            return list(turns), room
    question = len(turns) - 1
    first = question
    while first > 2:
        larger = scale * sum(sizes[first - 2 : question])
        if larger > (free if first == question else free / 2):
            break
        first -= 2
    return list(turns[first:]), room


class _PromptTooLong(RequestFailed):
    """The prompt leaves too little room. `tokens`: its length, or an estimate of a very long one."""

    def __init__(self, text: str, tokens: int) -> None:
        super().__init__(text, usage=True)
        self.tokens = tokens


def _dropped(turns: int, context: int) -> str:
    if turns == 0:
        return ""
    which = "oldest turn" if turns == 1 else f"{turns} oldest turns"
    room = f"the context of {context} tokens left too little room for an answer of max_tokens"
    return f"dropped the {which}: {room}"


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

    def save(self, path: Path) -> None:
        """Write the file, or replace it. Raises OutputFailed; an existing file is then unchanged."""
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
