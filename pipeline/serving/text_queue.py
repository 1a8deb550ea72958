"""Jobs of the text process: clients' messages with a text, and masks of answers that follow a grammar.

Clients take turns, one job each: many texts of one delay another by no more than one of them. Grammars are
compiled among the texts, a client's before its own; masks of a grammar that the process has are made beside
that, in turns of their own. A message of token ids passes at once. A text that can never be served is refused
before it is encoded. Runs in the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from pipeline.errors import PromptTooLong, RequestError
from pipeline.fairness import MOST_WAITING, Held, Turns, held_bytes
from pipeline.serving.text_link import TextLink, TextProcessExited, limit_of
from pipeline.text.detokenizer import Detokenizer
from pipeline.text.generation_defaults import check_size
from pipeline.text.grammar import MaskDropped, MaskRequest
from protocol.errors import MalformedMessage
from protocol.messages import (
    Allowed,
    Calibrate,
    Done,
    Encode,
    Encoded,
    Error,
    Follow,
    Generate,
    Score,
    Tokenize,
    Tokenized,
    Unfollow,
)

MOST_EXITS = 8  # of the process during one job, by signals from outside: the system may lack memory
ROLE_LIMIT = 256  # characters of a turn's role

Request = Generate | Score | Calibrate  # what the engine's thread serves
TextMessage = Request | Tokenize
GIVEN = {Generate: "prompt, token_ids and messages", Tokenize: "text and messages"}


class TextMessages:
    """Texts to be encoded of messages to one model. Immutable."""

    def __init__(self, tokenizer: Detokenizer | None, context: int) -> None:
        """`tokenizer`: for the least length of a text, not to encode; `context`: tokens of prompt and answer
        together."""
        self._tokenizer = tokenizer
        self._context = context

    def to_encode(self, message: TextMessage) -> Encode | None:
        """Returns what has to be encoded, None for a message of token ids. Raises RequestError, one line."""
        text = message.prompt if isinstance(message, Generate) else message.text
        messages = message.messages if isinstance(message, Generate | Tokenize) else None
        ids = None if isinstance(message, Tokenize) else message.token_ids
        if (text is not None) + (ids is not None) + (messages is not None) != 1:
            raise RequestError(f"give exactly one of {GIVEN.get(type(message), 'text and token_ids')}")
        grammar = message.shaping.grammar if isinstance(message, Generate) else ""
        check_size(grammar)
        if ids is not None and not grammar:
            return None
        if self._tokenizer is None:
            raise RequestError("a text or grammar needs a tokenizer, and this model has none; give token ids")
        if isinstance(message, Generate | Tokenize) and messages is not None:
            if any(len(turn.role) > ROLE_LIMIT for turn in messages):
                raise RequestError(f"a turn's role has {ROLE_LIMIT} characters at most")
            if len(messages) > self._context:  # each is a token at least
                reason = f"{len(messages)} turns do not fit the context of {self._context}"
                raise PromptTooLong(reason, len(messages))
            self._check_length(sum(len(turn.content) for turn in messages), self._tokenizer)
            return Encode(messages=messages, template=message.template, grammar=grammar)
        if text is not None and isinstance(message, Generate | Score):  # others may read a longer one
            self._check_length(len(text), self._tokenizer)
        return Encode(text, grammar=grammar)

    def _check_length(self, characters: int, tokenizer: Detokenizer) -> None:
        """Refuse a text far beyond the context before it is encoded, which would delay other texts."""
        least = tokenizer.min_tokens(characters)
        if least > self._context:
            raise PromptTooLong(
                f"the prompt has {characters} characters, at least {least} tokens, the context is"
                f" {self._context}, including the answer; shorten it",
                least,
            )


def with_ids(message: Request, answer: Encoded) -> Request:
    """Returns the message with the ids of its text."""
    ids = tuple(answer.ids.tolist())
    match message:
        case Generate(token_ids=given) if given is not None:  # only its grammar was checked
            return message
        case Generate():
            return replace(message, prompt=None, messages=None, token_ids=ids)
        case Score() | Calibrate():
            return replace(message, text=None, token_ids=ids)


@dataclass(eq=False)
class _Waiting:
    message: TextMessage
    text: Encode
    size: int
    exits: int = 0  # of the process during this text
    suspect: bool = False  # the process may have crashed by it


@dataclass(eq=False)
class _Following:
    """An answer whose grammar is followed."""

    client: bytes
    asked: MaskRequest  # the latest
    generation: int = -1  # of the process that has its grammar
    known: int = 0  # tokens of the answer that this process has
    exits: int = 0  # of processes during one mask
    suspect: bool = False  # a process may have crashed by it


class TextQueue:
    """`forward(client, message)` passes on a message without a text, `send(client, message)` answers, `wake`
    tells the engine's thread of a mask."""

    def __init__(
        self,
        texts: TextMessages,
        link: TextLink,
        forward: Callable[[bytes, Request], None],
        send: Callable[[bytes, object], None],
        wake: Callable[[], None],
    ) -> None:
        self._texts = texts
        self._link = link
        self._forward = forward
        self._send = send
        self._wake = wake
        self._queues: dict[bytes, dict[int, _Waiting]] = {}  # by client and request, no client's empty
        self._following: dict[int, _Following] = {}  # by answer
        self._masks: dict[bytes, deque[_Following]] = {}  # those whose mask is wanted, by client, none empty
        self._new_masks: dict[bytes, deque[_Following]] = {}  # the same, with a grammar to be compiled before
        self._turns, self._mask_turns = Turns(), Turns()
        self._job, self._mask = asyncio.Lock(), asyncio.Lock()
        self._job_waits, self._mask_waits = asyncio.Event(), asyncio.Event()
        self._held = Held()
        self._stopped = False

    def put(self, client: bytes, message: TextMessage) -> bool:
        """Pass a message on, at once or with the ids of its text; or refuse it. Returns False after `stop`,
        and where this client's waiting messages are too many or too large."""
        try:
            text = self._texts.to_encode(message)
        except RequestError as e:
            self._refuse(client, message, e)
            return True
        if self._stopped:
            return False
        if text is None:
            assert not isinstance(message, Tokenize)
            self._forward(client, message)
            return True
        queue = self._queues.get(client, {})
        if message.request in queue:
            self._send(client, Error(message.request, f"request {message.request} is already being served"))
            return True
        size = held_bytes(message)
        if len(queue) >= MOST_WAITING or not self._held.take(client, size):
            return False
        queue[message.request] = _Waiting(message, text, size)
        self._queues[client] = queue
        self._job_waits.set()
        return True

    def ask(self, wanted: MaskRequest | MaskDropped) -> None:
        """Have a mask made, or forget an answer's grammar."""
        if isinstance(wanted, MaskDropped):
            following = self._following.pop(wanted.answer, None)
            if following is not None and following.generation == self._link.generation:
                self._link.tell(Unfollow(wanted.answer))
            return
        following = self._following.setdefault(wanted.answer, _Following(wanted.client, wanted))
        following.asked, following.exits, following.suspect = wanted, 0, False
        known = following.generation == self._link.generation
        queues, waits = (self._masks, self._mask_waits) if known else (self._new_masks, self._job_waits)
        queues.setdefault(wanted.client, deque()).append(following)
        waits.set()

    def cancel(self, client: bytes, request: int) -> None:
        """End this client's request, if it waits here."""
        if self._remove(client, request):
            self._send(client, Done(request, "cancelled"))

    def forget(self, client: bytes) -> None:
        """Drop what waits of a client that has disconnected. Its answers' grammars are dropped when the
        engine ends the answers."""
        for request in list(self._queues.get(client, ())):
            self._remove(client, request)
        self._masks.pop(client, None)
        self._new_masks.pop(client, None)

    def stop(self) -> None:
        """End all requests as cancelled, and take no more: the engine is stopped."""
        self._stopped = True
        for client, queue in list(self._queues.items()):
            for request in list(queue):
                self.cancel(client, request)

    async def serve(self) -> None:
        """Have the process do what waits, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._serve_jobs())
            group.create_task(self._serve_masks())

    async def _serve_jobs(self) -> None:
        """Have the process encode texts and compile grammars, one after the other."""
        while True:
            while not (self._queues or self._new_masks):
                self._job_waits.clear()
                await self._job_waits.wait()
            client = self._turns.next([*self._new_masks, *self._queues])
            if client in self._new_masks:
                await self._follow(_take(self._new_masks, client), self._job)
            else:
                await self._encode(client, next(iter(self._queues[client].values())))

    async def _serve_masks(self) -> None:
        """Have the process make masks of grammars that it has, one after the other."""
        while True:
            while not self._masks:
                self._mask_waits.clear()
                await self._mask_waits.wait()
            client = self._mask_turns.next(self._masks)
            await self._follow(_take(self._masks, client), self._mask)

    @asynccontextmanager
    async def _process(self, turn: asyncio.Lock, suspect: bool) -> AsyncIterator[None]:
        """The process, once it is there, for a job or for a mask; nothing else runs beside a suspect."""
        async with AsyncExitStack() as held:
            for lock in (self._job, self._mask) if suspect else (turn,):
                await held.enter_async_context(lock)
            await self._link.wait_up()
            yield

    async def _follow(self, following: _Following, turn: asyncio.Lock) -> None:
        """Have an answer's mask made, by the whole answer where the process does not know it."""
        asked, answer = following.asked, following.asked.answer
        async with self._process(turn, following.suspect):
            new = following.generation != self._link.generation
            if answer not in self._following:
                return
            if new and turn is self._mask:  # it was restarted meanwhile
                self._compile(following)
                return
            start = asked.start + (0 if new else following.known)
            grammar = asked.grammar if new else ""
            following.generation, following.known = self._link.generation, asked.end - asked.start
            client = following.client if new else b""
            tokens = tuple(asked.tokens[start : asked.end])
            wanted = Follow(
                answer, asked.vocabulary, tokens, grammar, client, asked.ahead, tuple(asked.guesses)
            )
            try:
                asked.give(await self._link.ask(wanted))
            except (TextProcessExited, TimeoutError, MalformedMessage) as e:
                following.exits += 1
                following.suspect |= _doubtful(e)
                if not (reason := _failure(e, "it", following.exits, limit_of(wanted))):
                    self._compile(following)
                    return
                reason = f"the grammar cannot be followed further: {reason}"
                asked.give(Allowed(answer, np.empty(0, np.int32), reason))
        self._wake()

    def _compile(self, following: _Following) -> None:
        """Have an answer's grammar compiled again, before the client's others."""
        self._new_masks.setdefault(following.client, deque()).appendleft(following)
        self._job_waits.set()

    async def _encode(self, client: bytes, waiting: _Waiting) -> None:
        """Have a message's text encoded, then pass it on."""
        message, text = waiting.message, waiting.text
        async with self._process(self._job, waiting.suspect):
            try:
                answer: Encoded = await self._link.ask(text)
                failure = answer.error
            except (TextProcessExited, TimeoutError, MalformedMessage) as e:
                waiting.exits += 1
                waiting.suspect |= _doubtful(e)
                what = "encoding this text" + " or checking its grammar" * bool(text.grammar)
                if not (failure := _failure(e, what, waiting.exits, limit_of(text))):
                    return  # it is still the client's first
        if self._queues.get(client, {}).get(message.request) is not waiting:
            return  # it was cancelled
        self._remove(client, message.request)
        if failure:
            self._refuse(client, message, RequestError(failure))
        elif isinstance(message, Tokenize):
            self._send(client, Tokenized(message.request, answer.ids, answer.ending))
        else:
            self._forward(client, with_ids(message, answer))

    def _remove(self, client: bytes, request: int) -> bool:
        """Removes what waits; returns False where nothing does."""
        queue = self._queues.get(client, {})
        waiting = queue.pop(request, None)
        if waiting is None:
            return False
        if not queue:
            del self._queues[client]
        self._held.give_back(client, waiting.size)
        return True

    def _refuse(self, client: bytes, message: TextMessage, failure: RequestError) -> None:
        stats = {"prompt_tokens": failure.tokens} if isinstance(failure, PromptTooLong) else {}
        self._send(client, Done(message.request, "error", str(failure), stats=stats, usage=True))


def _take(queues: dict[bytes, deque[_Following]], client: bytes) -> _Following:
    """Removes and returns the first of a client's queue."""
    queue = queues[client]
    first = queue.popleft()
    if not queue:
        del queues[client]
    return first


def _doubtful(error: Exception) -> bool:
    """Returns whether the process crashed during two jobs, so that either may have done it."""
    return isinstance(error, TextProcessExited) and error.crashed and not error.alone


def _failure(error: Exception, what: str, exits: int, limit: float) -> str:
    """Returns why a job of the process has failed; "" where it is to be tried again, because the process was
    killed, or crashed during two."""
    match error:
        case TextProcessExited() if not (error.crashed and error.alone) and exits < MOST_EXITS:
            return ""
        case TextProcessExited():
            return f"{what} ended the text process" + f" {exits} times" * (exits > 1)
        case TimeoutError():
            return f"{what} took longer than {limit:.0f} s, and it was given up"
    return str(error)
