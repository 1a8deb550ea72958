"""How far a long work has come, on stderr: a bar on a terminal, else a log line every few seconds."""

from __future__ import annotations

import logging
import sys
import time
from typing import Literal, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars

log = logging.getLogger("tandem")

LINE_INTERVAL = 5.0  # seconds between log lines where stderr is no terminal


class ProgressDisplay:
    """Shows one stage after the other: of bytes with a bar each, a rate and the time that remains; of items
    in one bar that is cleared at the end. A context manager; draws nothing before the first `update`."""

    def __init__(self, unit: Literal["bytes", "items"], prefix: str = "") -> None:
        """`prefix`: written before the stage in log lines, for which a bar has no space."""
        self._unit = unit
        self._prefix = prefix
        self._bars: Bars | None = None
        self._stage: str | None = None
        self._stage_began = 0.0
        self._stage_first = 0  # `done` when the stage began: another stage may have done part of it
        self._last_line = time.monotonic()

    def update(self, stage: str, done: int, total: int, note: str = "") -> None:
        """`note`: a warning that belongs to the stage, such as a count of failures."""
        now = time.monotonic()
        new = stage != self._stage
        if new:
            self._stage, self._stage_began, self._stage_first = stage, now, done
        if sys.stderr.isatty():
            self._draw(stage, done, total, note, new)
        elif now - self._last_line >= LINE_INTERVAL:
            self._last_line = now
            log.info(self._line(done, total, note, now))

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, done: int, total: int, note: str, now: float) -> str:
        words = [f"{self._prefix}{self._stage}"]
        if self._unit == "items":
            words.append(f"{done} of {total} done")
        else:
            words.append(f"{done / 1e6:.0f} of {total / 1e6:.0f} MB")
            if rate := (done - self._stage_first) / max(now - self._stage_began, 1e-3):
                words += [f"{rate / 1e6:.0f} MB/s", f"{(total - done) / rate:.0f} s left"]
        return ", ".join([*words, *[note] * bool(note)])

    def _draw(self, stage: str, done: int, total: int, note: str, new: bool) -> None:
        if self._bars is None:
            self._bars = self._new_bars()
            self._bars.start()
        if not self._bars.tasks or (new and self._unit == "bytes"):
            self._bars.add_task(stage, note=note)
        task = self._bars.tasks[-1].id
        self._bars.update(task, description=stage, completed=done, total=total, note=note)

    def _new_bars(self) -> Bars:
        columns: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), TimeElapsedColumn())
        if self._unit == "bytes":
            columns = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        return Bars(
            TextColumn("[tandem] {task.description}", markup=False),
            BarColumn(bar_width=16),  # the line fits 80 columns: it would wrap and scroll
            *columns,
            TextColumn("{task.fields[note]}", style="bold red", markup=False),
            console=Console(stderr=True),
            redirect_stdout=False,
            redirect_stderr=False,
            transient=self._unit == "items",
        )


class ProgressCounter:
    """A ProgressDisplay of items that are counted one by one. A context manager."""

    def __init__(self, stage: str, total: int) -> None:
        self._display = ProgressDisplay("items")
        self._stage, self._total, self._done, self._failed = stage, total, 0, 0

    def start_stage(self, stage: str) -> None:
        self._stage = stage
        self._show()

    def count(self, failed: bool = False) -> None:
        self._done += 1
        self._failed += failed
        self._show()

    def drop(self, count: int) -> None:
        self._total -= count
        self._show()

    def __enter__(self) -> Self:
        self._show()
        return self

    def __exit__(self, *_: object) -> None:
        self._display.close()

    def _show(self) -> None:
        note = f"{self._failed} bad" if self._failed else ""
        self._display.update(self._stage, self._done, self._total, note)
