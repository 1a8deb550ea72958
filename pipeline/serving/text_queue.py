"""What waits for the text process: clients' messages with a text, and masks of answers that follow a grammar.

Clients take turns, one job each: many texts of one delay another by no more than one of them. A client's
masks come before its texts. Its messages stay in order, so also one without a text waits behind those with
one. Runs in the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeline.errors import PromptTooLong, RequestError
from pipeline.fairness import Held, Turns
from pipeline.serving.engine_inbox import LIMIT, held_bytes
from pipeline.serving.text_link import TextLink, TextProcessExited, limit_of
from pipeline.serving.text_messages import TextMessage, TextMessages, with_ids
from pipeline.text.grammar import MaskDropped, MaskRequest
from protocol.errors import MalformedMessage
from protocol.messages import (
    Allowed,
    Done,
    Encode,
    Encoded,
    Error,
    Follow,
    SetPolicy,
    Tokenize,
    Tokenized,
    Unfollow,
)

MOST_EXITS = 8  # of the process during one job, by signals from outside: the system may lack memory
QueuedMessage = TextMessage | SetPolicy


@dataclass(eq=False)
class _Waiting:
    message: QueuedMessage
    text: Encode | None  # None: it waits for an earlier message's text
    size: int
    exits: int = 0  # of the process during this text
    ended: bool = False  # answered or passed on; it may still be in its queue, and its text be encoded


@dataclass(eq=False)
class _Following:
    """An answer whose grammar is followed."""

    client: bytes
    asked: MaskRequest  # the latest
    generation: int = -1  # of the process that has its grammar
    known: int = 0  # tokens of the answer that this process has
    exits: int = 0  # of processes during one mask


class TextQueue:
    """`forward(client, message)` passes on a message without a text, `send(client, message)` answers, `wake`
    tells the engine's thread of a mask."""

    def __init__(
        self,
        texts: TextMessages,
        link: TextLink,
        forward: Callable[[bytes, QueuedMessage], None],
        send: Callable[[bytes, object], None],
        wake: Callable[[], None],
    ) -> None:
        self._texts = texts
        self._link = link
        self._forward = forward
        self._send = send
        self._wake = wake
        # By client, none of them empty: the first message of each has a text.
        self._queues: dict[bytes, deque[_Waiting]] = {}
        self._requests: dict[tuple[bytes, int], _Waiting] = {}  # that a Cancel ends, by client and request
        self._following: dict[int, _Following] = {}  # by answer
        self._masks: dict[bytes, deque[_Following]] = {}  # those whose mask is wanted, by client, none empty
        self._turns = Turns()
        self._held = Held()
        self._filled = asyncio.Event()
        self._stopped = False

    def put(self, client: bytes, message: QueuedMessage) -> bool:
        """Pass a message on, at once or after the texts before it; or refuse it. False after `stop`, and
        where this client's waiting messages are too many or too large."""
        text = None
        if not isinstance(message, SetPolicy):
            try:
                text = self._texts.to_encode(message)
            except RequestError as e:
                self._refuse(client, message, e)
                return True
        queue = self._queues.get(client)
        if self._stopped:
            return False
        if text is None and queue is None:
            self._forward(client, message)
            return True
        size = held_bytes(message)
        if not isinstance(message, SetPolicy) and (client, message.request) in self._requests:
            self._send(client, Error(message.request, f"request {message.request} is already being served"))
            return True
        if len(queue or ()) >= LIMIT or not self._held.take(client, size):
            return False
        waiting = _Waiting(message, text, size)
        if not isinstance(message, SetPolicy):
            self._requests[client, message.request] = waiting
        self._queues.setdefault(client, deque()).append(waiting)
        self._filled.set()
        return True

    def ask(self, wanted: MaskRequest | MaskDropped) -> None:
        """Have a mask made, or forget an answer's grammar."""
        if isinstance(wanted, MaskDropped):
            following = self._following.pop(wanted.answer, None)
            if following is not None and following.generation == self._link.generation:
                self._link.tell(Unfollow(wanted.answer))
            return
        following = self._following.setdefault(wanted.answer, _Following(wanted.client, wanted))
        following.asked, following.exits = wanted, 0
        self._masks.setdefault(wanted.client, deque()).append(following)
        self._filled.set()

    def cancel(self, client: bytes, request: int) -> None:
        """End this client's request, if it waits here."""
        waiting = self._requests.get((client, request))
        if waiting is not None:
            self._end(client, waiting)
            self._send(client, Done(request, "cancelled"))
            self._advance(client)

    def forget(self, client: bytes) -> None:
        """A client has disconnected. Its answers' grammars are dropped when the engine ends the answers."""
        for waiting in self._queues.pop(client, ()):
            self._end(client, waiting)
        self._masks.pop(client, None)

    def stop(self, refusal: str) -> None:
        """The engine is stopped: end all requests as cancelled, and refuse all calls."""
        self._stopped = True
        for client, queue in list(self._queues.items()):
            for waiting in queue:
                if not waiting.ended:
                    request = waiting.message.request
                    is_call = isinstance(waiting.message, SetPolicy)
                    self._send(client, Error(request, refusal) if is_call else Done(request, "cancelled"))
            self.forget(client)

    async def serve(self) -> None:
        """Have the process do one job after the other, until cancelled."""
        while True:
            while not (self._queues or self._masks):
                self._filled.clear()
                await self._filled.wait()
            await self._link.wait_up()
            if clients := [*self._masks, *self._queues]:
                client = self._turns.next(clients)
                if masks := self._masks.get(client):
                    following = masks.popleft()
                    if not masks:
                        del self._masks[client]
                    await self._follow(following)
                else:
                    await self._encode(client, self._queues[client][0])

    async def _follow(self, following: _Following) -> None:
        """Have an answer's mask made, by the whole answer where the process does not know it."""
        asked, answer = following.asked, following.asked.answer
        if answer not in self._following:
            return
        new = following.generation != self._link.generation
        start = asked.start + (0 if new else following.known)
        grammar = asked.grammar if new else ""
        following.generation, following.known = self._link.generation, len(asked.tokens) - asked.start
        wanted = Follow(answer, asked.vocabulary, tuple(asked.tokens[start:]), grammar)
        allowed: Allowed
        try:
            allowed = await self._link.ask(wanted)
        except (TextProcessExited, TimeoutError, MalformedMessage) as e:
            following.exits += 1
            if not (reason := _failure(e, "it", following.exits, limit_of(wanted))):
                self._masks.setdefault(following.client, deque()).appendleft(following)
                return
            allowed = Allowed(np.empty(0, np.int32), f"the grammar cannot be followed further: {reason}")
        asked.allowed = allowed
        self._wake()

    async def _encode(self, client: bytes, waiting: _Waiting) -> None:
        """Have the first message's text encoded, then pass it on."""
        message, text = waiting.message, waiting.text
        assert text is not None
        assert not isinstance(message, SetPolicy)
        try:
            answer: Encoded = await self._link.ask(text)
            failure = answer.error
        except (TextProcessExited, TimeoutError, MalformedMessage) as e:
            waiting.exits += 1
            what = "encoding this text" + " or checking its grammar" * bool(text.grammar)
            if not (failure := _failure(e, what, waiting.exits, limit_of(text))):
                return
        if waiting.ended:
            return
        self._end(client, waiting)
        if failure:
            self._refuse(client, message, RequestError(failure))
        elif isinstance(message, Tokenize):
            self._send(client, Tokenized(message.request, answer.ids, answer.text, answer.pieces))
        else:
            self._forward(client, with_ids(message, answer))
        self._advance(client)

    def _end(self, client: bytes, waiting: _Waiting) -> None:
        """A message was answered or passed on."""
        if not waiting.ended:
            waiting.ended = True
            self._held.give_back(client, waiting.size)
            if not isinstance(waiting.message, SetPolicy):
                del self._requests[client, waiting.message.request]

    def _advance(self, client: bytes) -> None:
        """Remove messages that have ended from a queue's head, and pass on those without a text."""
        queue = self._queues[client]
        while queue and (queue[0].ended or queue[0].text is None):
            waiting = queue.popleft()
            if not waiting.ended:
                self._end(client, waiting)
                self._forward(client, waiting.message)
        if not queue:
            del self._queues[client]

    def _refuse(self, client: bytes, message: TextMessage, failure: RequestError) -> None:
        stats = {"prompt_tokens": failure.tokens} if isinstance(failure, PromptTooLong) else {}
        self._send(client, Done(message.request, "error", str(failure), stats=stats, usage=True))


def _failure(error: Exception, what: str, exits: int, limit: float) -> str:
    """Why a job of the process has failed; "" where it is to be tried again, because the process was
    killed."""
    match error:
        case TextProcessExited() if not error.crashed and exits < MOST_EXITS:
            return ""
        case TextProcessExited():
            return f"{what} ended the text process" + f" {exits} times" * (exits > 1)
        case TimeoutError():
            return f"{what} took longer than {limit:.0f} s, and it was given up"
    return str(error)
