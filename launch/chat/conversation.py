"""A conversation with an engine: its turns, how it goes on, and what is dropped once the context is full.

Shows nothing itself: what comes goes to a `View`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from launch.chat.settings import AnswerSettings
from launch.errors import AnswerLost, WrongUsage
from launch.terminal.interrupts import Interrupts
from protocol.answer import Answer
from protocol.client import Client
from protocol.errors import MalformedMessage, RequestFailed
from protocol.messages import ChatMessage, Done

KV_NAME = "chat"  # of the KV that the engine keeps for this client between its questions


class View(Protocol):
    """Where an answer goes as it comes."""

    def waiting(self, position: int) -> None:
        """The question waits for room; position 1 is the next."""

    def piece(self, text: str) -> None:
        """The next part of the answer, in whole characters."""

    def forgot(self, turns: int, why: str) -> None:
        """The oldest turns, a question and its answer each, were dropped."""

    def cancelling(self) -> None:
        """Ctrl-C was pressed: the answer ends soon."""

    def ended(self) -> None:
        """No more of this answer comes."""


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    text: str
    tokens: int
    first_s: float | None  # seconds from the question to its first token, as seen from here
    done: Done


class Conversation:
    """The turns so far, and the client that continues them. Ends on an answer between two questions.
    `settings` and `system`, what the model is told first, may be changed at any time."""

    def __init__(self, client: Client, settings: AnswerSettings, system: str | None = None) -> None:
        """Raises WrongUsage for a model that cannot chat."""
        if not client.welcome.has_chat_template:
            lacks = "chat template" if client.welcome.has_tokenizer else "tokenizer"
            raise WrongUsage(f"this model has no {lacks}, so it cannot chat; use `generate`")
        self.settings = settings
        self.system = system
        self._client = client
        self._turns: list[ChatMessage] = []

    @property
    def turns(self) -> tuple[ChatMessage, ...]:
        """Question, answer, question, answer ..., without the system message."""
        return tuple(self._turns)

    def restore(self, turns: Sequence[ChatMessage]) -> None:
        """Go on from these turns, questions and answers in pairs."""
        self._turns = list(turns)

    async def say(self, text: str, view: View, interrupts: Interrupts) -> Reply:
        """Ask, and show the answer. Raises RequestFailed where the engine refuses even this question alone,
        or fails: the conversation is then as before; AnswerLost where it shuts down meanwhile; EngineGone."""
        return await self._ask([*self._turns, ChatMessage("user", text)], view, interrupts)

    async def say_again(self, view: View, interrupts: Interrupts) -> Reply:
        """Ask the last question again instead of keeping its answer. Raises WrongUsage where there is none,
        and what `say` does."""
        if not self._turns:
            raise WrongUsage("nothing has been asked yet")
        return await self._ask(self._turns[:-1], view, interrupts)

    async def _ask(self, turns: list[ChatMessage], view: View, interrupts: Interrupts) -> Reply:
        dropped, why = 0, ""
        while True:
            try:
                reply = await self._answer(turns, view, interrupts, dropped, why)
            except RequestFailed as e:
                if not e.usage or len(turns) == 1:
                    raise  # nothing was dropped: it may be the settings that are at fault
                turns, dropped, why = turns[2:], dropped + 1, str(e)
            else:
                break
        self._turns = [*turns, ChatMessage("assistant", reply.text)]
        if reply.done.reason == "length" and reply.tokens < self.settings.max_tokens:
            # the context ended this answer, and would end the next one at once
            del self._turns[:2]
            view.forgot(1, "the conversation has filled the context")
        return reply

    async def _answer(
        self, turns: list[ChatMessage], view: View, interrupts: Interrupts, dropped: int, why: str
    ) -> Reply:
        began = time.monotonic()
        answer = self._send(turns)
        answer.on_queued = view.waiting
        cancelling: set[asyncio.Task[None]] = set()  # kept, or it may be collected before it has run

        def cancel() -> None:
            cancelling.add(asyncio.ensure_future(answer.cancel()))
            view.cancelling()

        text, tokens, first = "", 0, None
        with interrupts.handled_by(cancel):
            async for token in answer:
                if first is None:
                    first = time.monotonic() - began
                    if dropped:
                        view.forgot(dropped, why)
                text, tokens = text + token.text, tokens + 1
                view.piece(token.text)
        assert answer.done is not None  # the loop above raises otherwise
        if first is None and dropped:
            view.forgot(dropped, why)
        view.piece(answer.done.text)
        view.ended()
        if answer.done.reason == "cancelled" and not cancelling:
            raise AnswerLost("the engine gave this answer up; it is shutting down")
        return Reply(text + answer.done.text, tokens, first, answer.done)

    def _send(self, turns: list[ChatMessage]) -> Answer:
        first = [] if self.system is None else [ChatMessage("system", self.system)]
        settings: dict[str, Any] = vars(self.settings)
        try:
            return self._client.generate(messages=[*first, *turns], conversation=KV_NAME, **settings)
        except MalformedMessage as e:  # more than a message may hold
            raise RequestFailed(str(e), usage=True) from e
