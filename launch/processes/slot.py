"""One of an engine's processes through all its incarnations, and how often it has exited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from launch.processes.children import Child, title
from protocol.sockets import Identity


@dataclass
class ProcessSlot:
    """One process through all its incarnations. `config`: makes the next one's configuration map."""

    role: str
    index: int
    config: Callable[[], dict[str, Any]]
    threads: int
    incarnation: int = -1
    child: Child | None = None
    ticks: int = 0  # of its line in the control segment, when the present incarnation was started
    early_exits: int = 0  # in a row: of processes that had not done any work
    futile_exits: int = 0  # of these, the last ones between which no worker made progress
    progress: int = 0  # of all workers, at the last one
    reported: str = ""  # the reason of the previous one
    exited_at: float | None = None  # the previous incarnation, until this one does its work
    ready: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def title(self) -> str:
        return title(Identity(self.role, self.index, 0))

    def fail(self, error: Exception) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # retrieved, also where no task waits for it any more

    def count_exit(self, early: bool, progress: int) -> None:
        """`early`: before it had done any work; `progress`: the workers' until now, a number that grows."""
        futile = self.futile_exits + 1 if progress == self.progress else 1
        self.early_exits, self.futile_exits = (self.early_exits + 1, futile) if early else (0, 0)
        self.progress = progress
