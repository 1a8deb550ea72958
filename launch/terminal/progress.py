"""Progress of a long work, on stderr: a line with a bar on a terminal, else log lines."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Literal, Self

from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Column

from launch.terminal.log import NOTICE, LogHandler
from launch.terminal.tables import VisibleConsole
from shm.segment import byte_size

log = logging.getLogger("tandem")

LINE_INTERVAL = 5.0  # seconds between log lines where stderr is no terminal
BAR_WIDTH = 8  # so that most lines fit 80 columns; others are cut off, and never wrap
DUMB_TERMINALS = ("", "dumb", "unknown")


def draws_bars() -> bool:
    """Returns whether stderr is a terminal that can draw a line again."""
    return sys.stderr.isatty() and os.environ.get("TERM", "") not in DUMB_TERMINALS


class ProgressDisplay:
    """Shows one stage after the other, of bytes or of items. The line of a terminal is cleared at the end. A
    context manager; draws nothing before the first `update`."""

    def __init__(self, unit: Literal["bytes", "items"]) -> None:
        self._unit = unit
        self._bars: Bars | None = None
        self._stage = ""
        self._began = 0.0  # the stage; monotonic seconds
        self._first = 0  # `done` when the stage began: another stage may have done part of it
        self._done, self._total = 0, 0
        self._last_line = time.monotonic()

    def update(self, stage: str, done: int = 0, total: int = 0, note: str = "") -> None:
        """`total`: 0 where it is not known. `note`: a warning that belongs to the stage, such as a count of
        failures."""
        now = time.monotonic()
        begins = stage != self._stage
        if begins:
            self._stage, self._began, self._first = stage, now, done
        self._done, self._total = done, total
        if draws_bars():
            self._draw(note, begins)
        elif now - self._last_line >= LINE_INTERVAL:
            self._last_line = now
            words = (stage, self.figures(), note)
            log.log(NOTICE, ", ".join(word for word in words if word))

    def figures(self) -> str:
        """Returns what is done of the stage, its rate, and the time that it still needs, as far as that is
        known."""
        seconds = time.monotonic() - self._began
        if not self._total:
            return f"{seconds:.0f} s"
        if self._unit == "items":
            return f"{self._done} of {self._total} done"
        words = [f"{byte_size(self._done)} of {byte_size(self._total)}"]
        if rate := (self._done - self._first) / max(seconds, 1e-3):
            words += [f"{byte_size(rate)}/s", f"{(self._total - self._done) / rate:.0f} s left"]
        return ", ".join(words)

    def close(self) -> None:
        """Clear the line; a later `update` draws it again."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            LogHandler.bar_drawn = False
        self._stage = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _draw(self, note: str, begins: bool) -> None:
        """`begins`: the stage does, and is drawn however short it is."""
        if self._bars is None:
            self._bars = Bars(
                SpinnerColumn("line"),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=BAR_WIDTH),
                TextColumn("{task.fields[figures]}", markup=False, table_column=Column(no_wrap=True)),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}", style="bold red", markup=False),
                console=VisibleConsole(stderr=True),
                redirect_stdout=False,
                redirect_stderr=False,
                transient=True,
            )
            self._bars.start()
            LogHandler.bar_drawn = True
        if begins:
            for task in self._bars.task_ids:
                self._bars.remove_task(task)
            # A total of None draws a bar that moves without end.
            self._bars.add_task(self._stage, total=self._total or None, note=note, figures="")
        figures = self.figures() if self._total else ""
        task = self._bars.task_ids[0]
        self._bars.update(task, completed=self._done, note=note, figures=figures, refresh=begins)


class ProgressCounter(ProgressDisplay):
    """Shows items that are counted one by one, from the begin of its block on."""

    def __init__(self, stage: str, total: int) -> None:
        super().__init__("items")
        self._counted, self._of, self._failed = stage, total, 0

    def start_stage(self, stage: str) -> None:
        self._counted = stage
        self.count(0)

    def count(self, items: int = 1, failed: bool = False) -> None:
        self._failed += failed
        note = f"{self._failed} bad" if self._failed else ""
        self.update(self._counted, self._done + items, self._of, note)

    def drop(self, count: int) -> None:
        self._of -= count
        self.count(0)

    def __enter__(self) -> Self:
        self.count(0)
        return self
