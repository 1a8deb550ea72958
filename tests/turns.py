"""A pytest plugin for tests that run in several processes: those marked `alone`, which measure, exclude all
others."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from pathlib import Path

import pytest

from shm.file_locks import wait_lock

# When this is imported, a test process still has the environment of the process that started it.
FOLDER = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
LIMIT = 3600.0  # seconds; consecutive exclusive tests take minutes, on a busy machine many


class Turns:
    """One process's lock on the machine: shared during ordinary tests, exclusive during tests marked `alone`.
    Consecutive exclusive tests keep the lock."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the same for all processes of the session."""
        self._gate, self._machine = folder / "gate.lock", folder / "machine.lock"
        self._held: int | None = None

    def take(self, exclusive: bool) -> None:
        """Wait until the next test may run. Raises ShmError after the limit."""
        if self._held is not None:
            return
        # A process that waits for the machine holds the gate, so that the others' next tests queue behind it.
        gate = wait_lock(self._gate, fcntl.LOCK_EX, LIMIT, None)
        try:
            self._held = wait_lock(self._machine, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH, LIMIT, None)
        finally:
            os.close(gate)

    def give(self, keep: bool = False) -> None:
        """Release the lock after a test, or `keep` it for an exclusive test that follows an exclusive one. A
        session releases it when it stops, whatever was to follow: its process stays until the others have
        stopped."""
        if self._held is not None and not keep:
            os.close(self._held)
            self._held = None


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside the test's time limit
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    turns = item.config.stash.get(_TURNS, None)
    if turns is None:
        return (yield)
    turns.take(alone(item))
    try:
        return (yield)
    finally:
        turns.give(keep=alone(item) and alone(nextitem))


def pytest_sessionstart(session: pytest.Session) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        session.config.stash[_TURNS] = Turns(FOLDER)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (turns := session.config.stash.get(_TURNS, None)) is not None:
        turns.give()


def alone(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("alone") is not None


_TURNS = pytest.StashKey[Turns]()
