"""Lock files: flock, which the kernel gives back however a process ends, on files that come and go.

A lock file is removed by a holder of its exclusive lock. Whoever locks a file therefore makes sure afterwards
that the name still leads to it, and otherwise starts again.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from protocol.errors import NotPrivate
from protocol.private_files import private_directory
from shm.errors import ShmError

POLL_SECONDS = 0.05


def try_lock(path: Path, operation: int) -> int | None:
    """The descriptor of the file, which is made if it is missing, with this flock; None where others hold
    one. Raises OSError where the file cannot be opened."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
            if leads_to(path, descriptor):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last holder removed it just now: there is a new file, or none


def wait_lock(path: Path, operation: int, seconds: float, waiting: Callable[[], None] | None) -> int:
    """As `try_lock`, for so many seconds; `waiting` is called in between. Raises ShmError after them."""
    deadline = time.monotonic() + seconds
    while (descriptor := try_lock(path, operation)) is None:
        if time.monotonic() > deadline:
            raise ShmError(f"the lock {path} has been held by another process for {seconds:.0f} s")
        if waiting is not None:
            waiting()
        time.sleep(POLL_SECONDS)
    return descriptor


def leads_to(path: Path, descriptor: int) -> bool:
    """Whether the name still stands for the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def private_folder(folder: Path) -> Path:
    """`private_directory`, but raises ShmError."""
    try:
        return private_directory(folder)
    except NotPrivate as e:
        raise ShmError(str(e)) from None
