"""What a person sees on stderr while a command goes through many requests or runs."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from launch.terminal.load_progress import PLAIN_INTERVAL

log = logging.getLogger("tandem")


class Counter:
    """How many of `total` are done: a bar on a terminal, else a line every few seconds."""

    def __init__(self, title: str, total: int, bar: Bar | None) -> None:
        self._title, self._total, self._done, self._bad = title, total, 0, 0
        self._bar = bar
        self._task = None if bar is None else bar.add_task(title, total=total, bad="")
        self._said = time.monotonic()

    def name(self, title: str) -> None:
        """What is being done now."""
        self._title = title
        self._show()

    def count(self, bad: bool = False) -> None:
        """One more is done."""
        self._done += 1
        self._bad += bad
        self._show()

    def drop(self, count: int) -> None:
        """So many will not come."""
        self._total -= count
        self._show()

    def _show(self) -> None:
        faults = f"{self._bad} bad" if self._bad else ""
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task, description=self._title, completed=self._done, total=self._total, bad=faults
            )
        elif (now := time.monotonic()) - self._said >= PLAIN_INTERVAL:
            self._said = now
            log.info(f"{self._title}, {self._done} of {self._total} done{faults and ', ' + faults}")


@contextmanager
def counted(title: str, total: int) -> Iterator[Counter]:
    """A Counter for the length of the block; its bar goes with it."""
    if not sys.stderr.isatty():
        yield Counter(title, total, None)
        return
    columns = (
        TextColumn("[tandem] {task.description}", markup=False),
        BarColumn(bar_width=20),  # a line fits 80 columns, or it would wrap and scroll
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[bad]}", style="bold red", markup=False),
    )
    console = Console(stderr=True)
    with Bar(*columns, console=console, redirect_stdout=False, redirect_stderr=False, transient=True) as bar:
        yield Counter(title, total, bar)
