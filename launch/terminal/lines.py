"""Lines from stdin without a thread: the event loop waits for input along with signals and the engine."""

from __future__ import annotations

import asyncio
import codecs
import os

CHUNK = 65536


class Lines:
    """The lines of a terminal, pipe or file, by its descriptor. UTF-8; invalid bytes are replaced."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._at_end = False

    async def next(self) -> str | None:
        """The next line without its end, or None after the last."""
        while "\n" not in self._text and not self._at_end:
            await self._readable()
            data = os.read(self._fd, CHUNK)
            self._text += self._decoder.decode(data, final=not data)
            self._at_end = not data
        if not self._text:
            return None
        line, _, self._text = self._text.partition("\n")
        return line

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        blocking = os.get_blocking(self._fd)
        try:
            loop.add_reader(self._fd, lambda: None if ready.done() else ready.set_result(None))
        except PermissionError:
            return  # a file on disk: always ready, and epoll refuses it
        try:
            await ready
        finally:
            loop.remove_reader(self._fd)
            # libuv made it non-blocking, for all processes that share this terminal or pipe.
            os.set_blocking(self._fd, blocking)
