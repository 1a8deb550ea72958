"""The answers to a Generate, token by token, fed by the client, and to a Score, block by block, on a
connection of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from msgspec import structs

from protocol.connection import ConnectOptions, Link
from protocol.errors import ProtocolError, RequestFailed
from protocol.messages import Done, Error, Queued, Score, Scores, Token, Waiting, Welcome

SCORES_HWM = 4  # blocks of Scores that may wait to be read


@dataclass(frozen=True)
class Result:
    """A whole answer. `text` is "" where the engine has no tokenizer."""

    tokens: tuple[int, ...]
    text: str
    done: Done


class Answer:
    """The answer to a Generate: `async for token in answer` yields each Token from the first; a second loop
    without the best tokens of its step.

    Leaving the loop before the end, in any way, cancels the request. The loop ends at Done, or raises
    RequestFailed with the engine's reason, or the error that ended the client (EngineGone). If the engine was
    restarted meanwhile, `done.stats` are those of the last engine alone.
    """

    def __init__(self, request: int, cancel: Callable[[int], None]) -> None:
        """`cancel` sends a Cancel for the request of this number."""
        self.request = request
        self.done: Done | None = None  # set on arrival, even if tokens before it are still unread
        self.on_queued: Callable[[int], None] | None = None
        """Called in the event loop with the request's position while it is queued: 1 is the next."""
        self.on_waiting: Callable[[str], None] | None = None
        """Called in the event loop with the machine that this waits for, and why; "" or a token ends that."""
        self._cancel = cancel
        self._tokens: list[Token] = []
        self._failure: ProtocolError | None = None
        self._changed = asyncio.Event()

    async def __aiter__(self) -> AsyncGenerator[Token, None]:
        position = 0
        try:
            while True:
                while position < len(self._tokens):
                    token = self._tokens[position]
                    if token.top_tokens:  # by far its largest part, which nobody reads again
                        self._tokens[position] = structs.replace(token, top_tokens=(), top_logprobs=())
                    yield token
                    position += 1
                if self._over:
                    break
                self._changed.clear()
                await self._changed.wait()
        finally:
            await self.cancel()
        if self._failure is not None:
            raise self._failure

    async def cancel(self) -> None:
        """Ask the engine to end this request; its Done follows. Does nothing after the end."""
        if not self._over:
            self._cancel(self.request)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens received so far."""
        return tuple(token.token for token in self._tokens)

    async def result(self) -> Result:
        """Wait for the end and return the whole answer. Raises as the loop does."""
        async for _ in self:
            pass
        assert self.done is not None  # the loop ends without an exception only at Done
        text = "".join(token.text for token in self._tokens) + self.done.text
        return Result(self.token_ids, text, self.done)

    @property
    def _over(self) -> bool:
        return self.done is not None or self._failure is not None

    def feed(self, message: Queued | Waiting | Token | Done | ProtocolError) -> None:
        """Gives the client's receiver the next message of this request, or the error that ended it."""
        match message:
            case Queued():
                if self.on_queued is not None:
                    asyncio.get_running_loop().call_soon(self.on_queued, message.position)
                return
            case Waiting():
                if self.on_waiting is not None:
                    asyncio.get_running_loop().call_soon(self.on_waiting, message.why)
                return
            case Token():
                self._tokens.append(message)
            case Done(reason="error"):
                self.done = message
                self._failure = RequestFailed(message.error, message.usage)
            case Done():
                self.done = message
            case ProtocolError():
                self._failure = message
        self._changed.set()


async def score_blocks(
    asked: Score, options: ConnectOptions, known: Welcome, on_waiting: Callable[[str], None]
) -> AsyncGenerator[Scores, None]:
    """Yield each row once, in order, even if the engine is restarted and sends all of them again. `known`:
    the engine that the caller is connected to; `on_waiting`: as of an Answer. Leaving the loop before the
    end cancels the request. Raises RequestFailed, EngineGone, MalformedMessage."""
    rows = 0  # received

    def on_lost(lost: ProtocolError) -> None:
        """The request is sent again, as long as an engine comes."""

    async def on_reconnected() -> None:
        link.send(asked)

    own = replace(options, name=f"{options.name}/score", receive_hwm=SCORES_HWM)
    link = Link(own, on_lost, on_reconnected, known)
    await link.open()
    try:
        link.send(asked)
        while True:
            match await link.receive():
                case Scores(request=its) as block if its == asked.request:
                    end = block.start + len(block.tokens)
                    if end > rows:
                        new = _without(block, rows - block.start)
                        rows = end
                        yield new
                case Waiting(request=its, why=why) if its == asked.request:
                    on_waiting(why)
                case Done(request=its, reason=reason) as done if its == asked.request:
                    if reason == "error":
                        raise RequestFailed(done.error, done.usage)
                    if reason == "cancelled":
                        raise RequestFailed("the engine cancelled this request; it is shutting down")
                    return
                case Error(request=its, text=error) if its == asked.request:
                    raise RequestFailed(error, usage=True)
    except ProtocolError:
        raise  # the request has ended, or the engine has
    except BaseException:  # the caller left the loop or was cancelled
        link.cancel(asked.request)
        raise
    finally:
        await link.close()


def _without(block: Scores, count: int) -> Scores:
    """The block without its first rows."""
    if count <= 0:
        return block
    return structs.replace(
        block,
        start=block.start + count,
        tokens=block.tokens[count:],
        chosen=block.chosen[count:],
        logprobs=block.logprobs[count:],
        top_tokens=block.top_tokens[count:],
        top_logprobs=block.top_logprobs[count:],
    )
