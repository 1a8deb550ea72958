"""Clients' messages that wait until the tokenizer process has encoded a text: that of the message itself, or
of an earlier one of the same client, because each client's messages stay in order. Clients take turns, one
text each: many texts of one delay another by no more than one of them.
Runs in the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.errors import PromptTooLong, RequestError
from pipeline.fairness import Held, Turns
from pipeline.serving.encoder_link import EncoderExited, EncoderLink, limit_of
from pipeline.serving.engine_inbox import LIMIT, held_bytes
from pipeline.serving.text_messages import TextMessage, TextMessages, with_ids
from protocol.errors import MalformedMessage
from protocol.messages import Done, Encode, Error, SetPolicy, Tokenize, Tokenized

MOST_CRASHES = 2  # of the process while it encoded one text
MOST_EXITS = 8  # the same by any cause: the system may kill it when memory is short
QueuedMessage = TextMessage | SetPolicy


@dataclass(eq=False)
class _Waiting:
    message: QueuedMessage
    text: Encode | None  # None: it waits for an earlier message's text
    size: int
    crashes: int = 0  # of the process during this text
    exits: int = 0
    ended: bool = False  # answered or passed on; it may still be in its queue, and its text be encoded


class TextQueue:
    """`forward(client, message)` passes on a message without a text, `send(client, message)` answers."""

    def __init__(
        self,
        texts: TextMessages,
        link: EncoderLink,
        forward: Callable[[bytes, QueuedMessage], None],
        send: Callable[[bytes, object], None],
    ) -> None:
        self._texts = texts
        self._link = link
        self._forward = forward
        self._send = send
        # By client, none of them empty: the first message of each has a text.
        self._queues: dict[bytes, deque[_Waiting]] = {}
        self._requests: dict[tuple[bytes, int], _Waiting] = {}  # that a Cancel ends, by client and request
        self._turns = Turns()
        self._held = Held()
        self._jobs = itertools.count()
        self._filled = asyncio.Event()
        self._stopped = False

    def put(self, client: bytes, message: QueuedMessage) -> bool:
        """Pass a message on, at once or after the texts before it; or refuse it. False after `stop`, and
        where this client's waiting messages are too many or too large."""
        text = None
        if not isinstance(message, SetPolicy):
            try:
                text = self._texts.to_encode(message, next(self._jobs))
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

    def cancel(self, client: bytes, request: int) -> None:
        """End this client's request, if it waits here."""
        waiting = self._requests.get((client, request))
        if waiting is not None:
            self._end(client, waiting)
            self._send(client, Done(request, "cancelled"))
            self._advance(client)

    def forget(self, client: bytes) -> None:
        """A client has disconnected."""
        for waiting in self._queues.pop(client, ()):
            self._end(client, waiting)

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
        """Have the texts encoded, until cancelled."""
        while True:
            while not self._queues:
                self._filled.clear()
                await self._filled.wait()
            await self._link.wait_up()
            if self._queues:
                client = self._turns.next(self._queues)
                await self._encode(client, self._queues[client][0])

    async def _encode(self, client: bytes, waiting: _Waiting) -> None:
        """Have the first message's text encoded, then pass it on and give the next client its turn."""
        message, text = waiting.message, waiting.text
        assert text is not None
        assert not isinstance(message, SetPolicy)
        failure = ""
        try:
            answer = await self._link.encode(text)
            failure = answer.error
        except EncoderExited as e:
            waiting.exits += 1
            waiting.crashes += e.crashed
            if waiting.crashes < MOST_CRASHES and waiting.exits < MOST_EXITS:
                return
            failure = f"encoding this text ended the tokenizer {waiting.exits} times"
        except TimeoutError:
            failure = f"encoding this text took longer than {limit_of(text):.0f} s, and it was given up"
        except MalformedMessage as e:
            failure = str(e)
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
