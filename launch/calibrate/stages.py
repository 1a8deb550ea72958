"""What a person sees on stderr while a model is calibrated."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from launch.terminal.load_progress import PLAIN_INTERVAL
from protocol.messages import Calibrating

log = logging.getLogger("tandem")


@contextmanager
def stages() -> Iterator[Callable[[Calibrating], None]]:
    """Shows what it is called with for the length of the block: a bar on a terminal, else a line every few
    seconds."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    columns = (
        TextColumn("[tandem] {task.description}", markup=False),
        BarColumn(bar_width=20),  # a line fits 80 columns, or it would wrap and scroll
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Bar(*columns, console=console, redirect_stdout=False, redirect_stderr=False, transient=True) as bar:
        task = bar.add_task("calibrate")

        def show(far: Calibrating) -> None:
            bar.update(task, description=f"calibrate: {far.stage}", completed=far.done, total=far.total)

        yield show


def _lines() -> Callable[[Calibrating], None]:
    said = time.monotonic()

    def show(far: Calibrating) -> None:
        nonlocal said
        if (now := time.monotonic()) - said >= PLAIN_INTERVAL:
            said = now
            log.info(f"calibrate: {far.stage}, {far.done} of {far.total}")

    return show
