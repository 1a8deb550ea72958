"""The messages that wait to be sent to one client. Runs in the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import zmq
from msgspec.structs import replace

from pipeline.rate_limit import SparseLog
from protocol.codec import encode
from protocol.errors import MalformedMessage
from protocol.messages import Done, Error

log = logging.getLogger(__name__)

RETRY = 0.005  # seconds until a full socket is tried again
OVERHEAD = 4096  # bytes counted for a message beside its own: 16384 small messages are a congestion
LONGEST_ERROR = 1000  # characters

Frames = list[bytes | memoryview]


class Outbox:
    """A queue of messages and the task that sends it, so that a client that does not read delays no other."""

    def __init__(self, send: Callable[[Frames], None]) -> None:
        """`send` raises zmq.Again where the socket is full, another ZMQError after a disconnect."""
        self.queued_bytes = 0
        self.full_since: float | None = None  # time at which the socket became full
        self._send = send
        self._queue: asyncio.Queue[tuple[Frames, int]] = asyncio.Queue()  # messages and their sizes

    def __len__(self) -> int:
        return self._queue.qsize()

    def put(self, message: object) -> None:
        """Queue a message."""
        frames = frames_of(message)
        size = OVERHEAD + sum(memoryview(frame).nbytes for frame in frames)
        self.queued_bytes += size
        self._queue.put_nowait((frames, size))

    async def pump(self) -> None:
        """Send the queue, trying again while the socket is full, until the client has disconnected."""
        while True:
            frames, size = await self._queue.get()
            while True:
                try:
                    self._send(frames)
                except zmq.Again:
                    self.full_since = self.full_since or time.monotonic()
                    await asyncio.sleep(RETRY)
                    continue
                except zmq.ZMQError:
                    return
                self.full_since = None
                break
            self.queued_bytes -= size
            self._queue.task_done()

    async def empty(self) -> None:
        """Wait until all queued messages were handed to the socket."""
        await self._queue.join()


def frames_of(message: object) -> Frames:
    """Encode a message to a client; where that fails, an Error for the same request. Errors quote the
    client's own text, which may be megabytes, so they are cut."""
    if isinstance(message, Error) and len(message.text) > LONGEST_ERROR:
        message = replace(message, text=message.text[:LONGEST_ERROR] + "...")
    elif isinstance(message, Done) and len(message.error) > LONGEST_ERROR:
        message = replace(message, error=message.error[:LONGEST_ERROR] + "...")
    try:
        return encode(message)
    except MalformedMessage as e:
        _log.warning(f"an answer could not be encoded: {e}")
        return encode(Error(getattr(message, "request", -1), f"the engine's answer cannot be sent: {e}"))


_log = SparseLog(log)
