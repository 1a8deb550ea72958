"""Reads one socket of clients, within a share of the time: the engine's thread needs the interpreter, too.
Runs in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import thread_time

from pipeline.rate_limit import TimeShare
from pipeline.serving.client_sockets import ClientSocket

SHARE = 0.15  # of one core's time, for the messages of each socket
SHARE_BURST = 0.01  # seconds of it at once
MESSAGE_SECONDS = 60e-6  # to receive a message and to send its answer, beside the time to handle it
BYTE_SECONDS = 2e-9  # to receive a byte
FRAME_SECONDS = 2e-6  # to drop a frame


class Listener:
    """`handle` takes a sender's routing id, a message's frames and the number of those that were dropped, and
    returns the client's name, empty for none; `charge` counts the seconds that the client's message took."""

    def __init__(
        self,
        socket: ClientSocket,
        handle: Callable[[bytes, list[bytes], int], bytes],
        charge: Callable[[bytes, float], None],
    ) -> None:
        self._socket = socket
        self._handle = handle
        self._charge = charge

    async def serve(self) -> None:
        """Until cancelled."""
        share = TimeShare(SHARE, SHARE_BURST)
        while True:
            sender, frames, dropped = await self._socket.receive()
            began = thread_time()
            name = self._handle(sender, frames, dropped)
            size = sum(map(len, frames))
            seconds = thread_time() - began + MESSAGE_SECONDS + BYTE_SECONDS * size
            # Other tasks ran while frames were dropped: only the sender pays for it.
            self._charge(name, seconds + FRAME_SECONDS * dropped)
            share.spend(seconds)
            # Receiving a message that has arrived does not suspend: without this, a client that floods the
            # socket would block every other task, the heartbeats too. Clients are read in turn, so
            # during a pause each waits for at most one message of each other client.
            await asyncio.sleep(share.wait)
