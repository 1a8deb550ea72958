"""The answer to a Score, block by block, on a connection of its own; `client.py` offers it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

from msgspec import structs

from protocol.connection import ConnectOptions
from protocol.errors import ProtocolError, RequestFailed
from protocol.link import Link, RetryBudget
from protocol.messages import Done, Error, Score, Scores, Welcome

SCORES_HWM = 4  # blocks of Scores that may wait to be read


async def score_blocks(asked: Score, options: ConnectOptions, known: Welcome) -> AsyncGenerator[Scores, None]:
    """Yield each row once, in order, even if the engine is restarted and sends all of them again. `known`:
    the engine that the caller is connected to. Leaving the loop before the end cancels the request. Raises
    RequestFailed, EngineGone, MalformedMessage."""
    rows = 0  # received
    retries = RetryBudget()

    def on_lost(lost: ProtocolError) -> None:
        failure = retries.count_loss(rows)
        if failure is not None:
            raise failure

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
