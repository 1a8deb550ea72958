"""Lines from stdin without a thread: the event loop waits for input, beside the engine's life and Ctrl-C."""

from __future__ import annotations

import asyncio
import codecs
import os

CHUNK = 65536


class Lines:
    """The lines of a file descriptor: a terminal, a pipe or a file. UTF-8; what is not is replaced."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._over = False

    async def next(self) -> str | None:
        """The next line without its end, or None after the last."""
        while "\n" not in self._text and not self._over:
            await self._readable()
            data = os.read(self._fd, CHUNK)
            self._text += self._decoder.decode(data, final=not data)
            self._over = not data
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
            return  # a file on disk is always ready, and cannot be waited for
        try:
            await ready
        finally:
            loop.remove_reader(self._fd)
            # libuv has changed it, for everybody who shares this terminal or pipe
            os.set_blocking(self._fd, blocking)
