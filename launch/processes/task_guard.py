"""A block of code and the tasks beside it: when one fails, the block is cancelled and the failure raised."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class TaskGuard:
    """A helper of an asynchronous context manager: `enter` at its start, `raise_failure` at its end."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._body: asyncio.Task[Any] | None = None
        self._cancels = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def enter(self) -> None:
        """The calling task runs the block from here on."""
        self._body = asyncio.current_task()
        self._cancels = self._body.cancelling() if self._body else 0

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task beside the block; its exception is the block's failure."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def fail(self, failure: BaseException) -> None:
        """Cancel the block; of several failures the first is raised."""
        if self.failure is None:
            self.failure = failure
            if self._body is not None:
                self._body.cancel()

    def raise_failure(self, error: BaseException | None) -> None:
        """Raise the failure, if there is one, unless the block was cancelled from outside as well: then that
        cancellation continues. `error`: the exception that ends the block."""
        if self.failure is None:
            return
        if self._body is not None and self._body.uncancel() > self._cancels:
            return
        raise self.failure from error

    async def end_tasks(self) -> None:
        """Cancel the tasks that still run beside the block."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await work that a cancellation must not interrupt: it is raised when the work is done."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
