"""What a person sees while `bench` runs."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from launch.progress import PLAIN_INTERVAL

log = logging.getLogger("tandem")


class RunsBar:
    """Shows on stderr how many of `total` runs are over: a bar on a terminal, else a line now and then."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._said = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("[tandem] {task.description}", markup=False),
                BarColumn(bar_width=20),  # a line fits 80 columns, or it would wrap and scroll
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                redirect_stdout=False,
                redirect_stderr=False,
                transient=True,
            )
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> RunsBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, what: str) -> None:
        """The next run begins."""
        if self._bar is not None:
            self._bar.update(self._task, description=what)
        elif time.monotonic() - self._said >= PLAIN_INTERVAL:
            self._said = time.monotonic()
            log.info(f"bench: {self._done} of {self._total} runs done; {what}")

    def advance(self) -> None:
        """A run is over."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
