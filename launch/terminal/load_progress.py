"""What a person sees while a model loads."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar

from protocol.messages import Progress

log = logging.getLogger("tandem")

PLAIN_INTERVAL = 5.0  # seconds between lines where stderr is no terminal


@dataclass
class LoadingBar:
    """Shows the loader's Progress messages on stderr: a bar on a terminal, else a line every few seconds."""

    _bar: Bar | None = None
    _tasks: dict[str, TaskID] = field(default_factory=dict)
    _stage: str = ""
    _began: float = 0.0  # when the stage was first heard of,
    _first: int = 0  # and the bytes that were done by then
    _said: float = field(default_factory=time.monotonic)

    def update(self, progress: Progress) -> None:
        if sys.stderr.isatty():
            self._draw(progress)
            return
        now = time.monotonic()
        if progress.stage != self._stage:
            self._stage, self._began, self._first = progress.stage, now, progress.done
        if now - self._said >= PLAIN_INTERVAL:
            self._said = now
            rate = (progress.done - self._first) / max(now - self._began, 1e-3)
            line = f"store: {progress.stage}, {progress.done / 1e6:.0f} of {progress.total / 1e6:.0f} MB"
            if rate:
                left = (progress.total - progress.done) / rate
                line += f", {rate / 1e6:.0f} MB/s, {left:.0f} s left"
            log.info(line)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _draw(self, progress: Progress) -> None:
        if self._bar is None:
            self._bar = Bar(
                TextColumn("[tandem] {task.description}", markup=False),
                BarColumn(bar_width=16),  # a line fits 80 columns, or it would wrap and scroll
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bar.start()
        task = self._tasks.get(progress.stage)
        if task is None:
            task = self._tasks[progress.stage] = self._bar.add_task(progress.stage, total=progress.total)
        self._bar.update(task, completed=progress.done)
