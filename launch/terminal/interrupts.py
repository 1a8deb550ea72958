"""Input of a command from its terminal: lines of stdin, and Ctrl-C, SIGTERM and a closed terminal. The first
signal ends the command in order, the second at once. A chat that is answering cancels the answer; all else is
cancelled and its engine stopped. So a Ctrl-C goes to the innermost handler."""

from __future__ import annotations

import asyncio
import codecs
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

Handler = Callable[[], None]
CHUNK = 65536  # bytes of stdin that are read at once


class Interrupts:
    """The signals of one command. `received`: the name of the signal that has asked it to end, or ""."""

    def __init__(self) -> None:
        self.received = ""
        self._task = asyncio.current_task()
        self._handlers: list[Handler] = []  # of the blocks of handled_by
        self._at_once: list[Handler] = []

    @contextmanager
    def installed(self) -> Iterator[Interrupts]:
        """Handle SIGINT, SIGTERM and, unless nohup has it ignored, SIGHUP while the calling task runs."""
        loop = asyncio.get_running_loop()
        handlers: dict[signal.Signals, Handler] = {
            signal.SIGINT: self._on_interrupt,
            signal.SIGTERM: partial(self._end, signal.SIGTERM),
        }
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            handlers[signal.SIGHUP] = partial(self._end, signal.SIGHUP)
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield self
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    @contextmanager
    def handled_by(self, handler: Handler) -> Iterator[None]:
        """Let SIGINT within the block call `handler` instead of ending the command."""
        self._handlers.append(handler)
        try:
            yield
        finally:
            self._handlers.pop()

    def at_once(self, handler: Handler) -> None:
        """Call `handler` when a second signal asks the command to end."""
        self._at_once.append(handler)

    def _on_interrupt(self) -> None:
        if self._handlers and not self.received:
            self._handlers[-1]()
        else:
            self._end(signal.SIGINT)

    def _end(self, number: signal.Signals) -> None:
        if self.received:
            for handler in self._at_once:
                handler()
        else:
            self.received = number.name
            if self._task is not None:
                self._task.cancel()


class Lines:
    """The lines of a terminal, pipe or file, by its descriptor, without a thread: the event loop waits for
    them along with signals and the engine. UTF-8; invalid bytes are replaced."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._at_end = False

    async def next(self) -> str | None:
        """Returns the next line without its end, or None after the last."""
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
