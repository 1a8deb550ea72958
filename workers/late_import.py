"""torch in a worker, which computes few rows without it."""

from __future__ import annotations

import threading

from shm.control import ControlLine
from shm.slot import Slot
from workers.kernels.host import UNLIMITED, HostKernel, most_rows

IMPORT_AFTER = 1.0  # seconds that a restarted worker lives before the import, unless a Work needs it


class LateImport:
    """torch, imported by a thread so that few rows do not wait for it. `line.rows` says when it is there; a
    Work that needs it sooner waits."""

    def __init__(self, kernel: HostKernel, line: ControlLine, restarted: bool) -> None:
        self._kernel = kernel
        self._line = line
        self._delay = IMPORT_AFTER if restarted else 0.0
        self._wanted = threading.Event()
        self._cancelled = False
        self._thread: threading.Thread | None = None
        line.rows = kernel.rows_without_torch
        if line.rows == 0:
            self._wanted.set()

    def begin(self) -> None:
        """Import it soon; once."""
        if self._thread is None and self._line.rows < UNLIMITED:
            self._thread = threading.Thread(target=self._run, name="torch", daemon=True)
            self._thread.start()

    def prepare(self, slot: Slot) -> None:
        """Wait for it where the Work in this slot needs it: the wait does not count as computing."""
        rows = self._line.rows
        if slot.x_rows > rows and most_rows(slot) > rows:
            self._wanted.set()
            self._kernel.prepare()
            self._line.rows = UNLIMITED

    def cancel(self) -> None:
        """Do not begin the import any more; wait for one that has begun, as an exit within it could crash."""
        self._cancelled = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        self._wanted.wait(self._delay)
        if not self._cancelled:
            self._kernel.prepare()
            self._line.rows = UNLIMITED
