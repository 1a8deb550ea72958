"""Ctrl-C, SIGTERM and a closed terminal: the first signal ends the command in order, the second at once. A
chat that is answering cancels the answer; all else is cancelled and its engine stopped. So the first signal
goes to the innermost handler."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

Handler = Callable[[], None]


class Interrupts:
    """The signals of one command. `received`: the name of the signal that has asked it to end, or ""."""

    def __init__(self) -> None:
        self.received = ""
        self._task = asyncio.current_task()
        self._handler: Handler | None = None
        self._depth = 0  # blocks of handled_by
        self._otherwise: Handler | None = None
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
        """The first SIGINT within the block calls `handler` instead of ending the command."""
        before, self._handler = self._handler, handler
        self._depth += 1
        try:
            yield
        finally:
            self._handler = before
            self._depth -= 1

    @contextmanager
    def otherwise(self, handler: Handler) -> Iterator[None]:
        """SIGINT outside of every `handled_by` calls `handler`: it was probably meant for an answer."""
        self._otherwise = handler
        try:
            yield
        finally:
            self._otherwise = None

    def at_once(self, handler: Handler) -> None:
        """Call `handler` when a second signal asks the command to end."""
        self._at_once.append(handler)

    def _on_interrupt(self) -> None:
        handler, self._handler = self._handler, None
        if handler is None and self._depth == 0:
            handler = self._otherwise
        if handler is not None and not self.received:
            handler()
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
