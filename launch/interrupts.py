"""Ctrl-C and SIGTERM: the first asks for an orderly end, the second ends at once.

What "orderly" means changes while a command runs: a chat that is answering gives up the answer, everything
else is cancelled and stops its engine. So the first signal goes to the innermost handler.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Handler = Callable[[], None]


class Interrupts:
    """The signals of one command. `received` says whether the command was asked to end."""

    def __init__(self) -> None:
        self.received = False
        self._task = asyncio.current_task()
        self._handler: Handler | None = None
        self._at_once: list[Handler] = []

    @contextmanager
    def installed(self) -> Iterator[Interrupts]:
        """Handle SIGINT and SIGTERM while the calling task runs."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)
        loop.add_signal_handler(signal.SIGTERM, self._end)
        try:
            yield self
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            loop.remove_signal_handler(signal.SIGTERM)

    @contextmanager
    def handled_by(self, handler: Handler) -> Iterator[None]:
        """A SIGINT within the block calls `handler` instead of ending the command."""
        before, self._handler = self._handler, handler
        try:
            yield
        finally:
            self._handler = before

    def at_once(self, handler: Handler) -> None:
        """What the second signal of an end does."""
        self._at_once.append(handler)

    def _on_interrupt(self) -> None:
        if self._handler is not None and not self.received:
            self._handler()
        else:
            self._end()

    def _end(self) -> None:
        if self.received:
            for handler in self._at_once:
                handler()
        else:
            self.received = True
            if self._task is not None:
                self._task.cancel()
