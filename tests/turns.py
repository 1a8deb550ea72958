"""Tests that need the machine, or what all of a user's programs share, to themselves, among tests that run in
several processes."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from shm.file_locks import wait_lock

LIMIT = 3600.0  # seconds; consecutive tests take minutes, on a busy machine many


class Turns:
    """The turn of one of several processes. All may have one at once, except while a test marked `alone` has
    it. Consecutive tests with that mark share a turn."""

    def __init__(self, folder: Path) -> None:
        """The same folder for all processes."""
        self._gate, self._room = folder / "gate.lock", folder / "room.lock"
        self._held: int | None = None

    def take(self, item: pytest.Item) -> None:
        """Wait until this test may run. Raises ShmError after the limit."""
        if self._held is not None:
            return
        # Who waits for the room holds the gate, so that the others' next tests cannot pass it by for ever.
        gate = wait_lock(self._gate, fcntl.LOCK_EX, LIMIT, None)
        try:
            self._held = wait_lock(self._room, fcntl.LOCK_EX if alone(item) else fcntl.LOCK_SH, LIMIT, None)
        finally:
            os.close(gate)

    def give(self, item: pytest.Item, following: pytest.Item | None) -> None:
        """The test has ended."""
        if self._held is None or (alone(item) and following is not None and alone(following)):
            return
        os.close(self._held)
        self._held = None


def alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None
