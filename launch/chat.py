"""`launch.py` without a command: a plain chat, line by line, in a terminal or on piped stdin.

On a terminal Ctrl-C gives up the answer that is being written, and ends the chat where there is none;
Ctrl-D ends it. From a pipe every line is a turn, stdout holds the answers alone, and the end of the input is
the end of the chat. The conversation is kept; when it no longer fits the context, its oldest turns go.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

from launch.errors import AnswerLost, WrongUsage
from launch.generate import answer_settings
from launch.interrupts import Interrupts
from launch.lines import Lines
from launch.options import RANDOM_OPTIONS, Options
from launch.output import show
from launch.session import connected
from protocol.client import Client
from protocol.errors import RequestFailed
from protocol.messages import ChatMessage

log = logging.getLogger("tandem")

LONGEST_ANSWER = 512  # tokens, unless --max-tokens says otherwise; at most half the context


class Conversation:
    """The turns so far, and the client that continues them."""

    def __init__(self, client: Client, settings: dict[str, Any]) -> None:
        if not client.welcome.has_chat_template:
            lacks = "chat template" if client.welcome.has_tokenizer else "tokenizer"
            raise WrongUsage(f"this model has no {lacks}, so it cannot chat; use `generate`")
        self._client = client
        self._settings = {"max_tokens": min(LONGEST_ANSWER, client.welcome.context // 2)} | settings
        self._turns: list[ChatMessage] = []

    async def say(self, text: str, interrupts: Interrupts) -> None:
        """Show the answer to one turn. Raises RequestFailed where the engine refuses even this turn alone, or
        fails: the turn is then forgotten; AnswerLost where it shuts down meanwhile."""
        self._turns.append(ChatMessage("user", text))
        while True:
            try:
                await self._answer(interrupts)
            except RequestFailed as e:
                if not e.usage or len(self._turns) == 1:
                    self._turns.pop()
                    raise
                self._forget_oldest(str(e))
            else:
                return

    async def _answer(self, interrupts: Interrupts) -> None:
        answer = self._client.generate(messages=self._turns, **self._settings)
        cancelling: set[asyncio.Task[None]] = set()  # kept, or it may be collected before it has run
        text, tokens = "", 0
        with interrupts.handled_by(lambda: cancelling.add(asyncio.ensure_future(answer.cancel()))):
            async for token in answer:
                text, tokens = text + token.text, tokens + 1
                show(token.text)
        assert answer.done is not None  # the loop above raises otherwise
        show(answer.done.text + "\n")
        if answer.done.reason == "cancelled" and not cancelling:
            raise AnswerLost("the engine gave this answer up; it is shutting down")
        self._turns.append(ChatMessage("assistant", text + answer.done.text))
        if answer.done.reason == "length" and tokens < self._settings["max_tokens"]:
            self._forget_oldest(
                "the conversation has filled the context"
            )  # the context ended this answer, and would end the next one at once

    def _forget_oldest(self, why: str) -> None:
        del self._turns[:2]  # a question and its answer
        log.warning(f"the oldest turn was dropped: {why}")


async def chat(options: Options, interrupts: Interrupts) -> int:
    """0 at the end of the input; 1 where an answer of piped input failed."""
    terminal = sys.stdin.isatty()
    failed = False
    async with connected(options, interrupts) as client:
        settings = answer_settings(options, client.welcome.sampling)
        if settings["sampling"].temperature == 0 and RANDOM_OPTIONS & options.written.keys():
            log.warning("note: this model's answers are greedy without a --temperature; only that has effect")
        conversation = Conversation(client, settings)
        if terminal:
            log.info(f"chat with {client.welcome.model}: Ctrl-C gives up an answer, Ctrl-D ends")
        lines = Lines(sys.stdin.fileno())
        while True:
            if terminal:
                show("> ")
            line = await lines.next()
            if line is None:
                break
            if not line.strip():
                continue
            try:
                await conversation.say(line, interrupts)
            except RequestFailed as e:
                print(f"launch.py: {e}", file=sys.stderr)
                failed = not terminal
        if terminal:
            show("\n")
    return 1 if failed else 0
