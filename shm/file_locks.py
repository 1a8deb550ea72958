"""Lock files: flock, which the kernel releases when a process exits for any reason, on removable files.

The holder of a file's exclusive lock may remove it. So after locking, these functions check that the name
still leads to the locked file, and otherwise start again.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from protocol.errors import NotPrivate
from protocol.files import check_unshared
from shm.errors import ShmError

POLL_SECONDS = 0.05


def try_lock(path: Path, operation: int) -> int | None:
    """The descriptor of the file, created if missing, with this flock; None if another process holds a
    conflicting lock. Raises OSError if the file cannot be opened, ShmError if others could write it, too."""
    while True:
        descriptor = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600
        )
        try:
            check_unshared(os.fstat(descriptor))
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
            if leads_to(path, descriptor):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except NotPrivate as e:
            os.close(descriptor)
            raise ShmError(f"the lock {path} {e}") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last holder has just removed it: lock the new file


def wait_lock(path: Path, operation: int, seconds: float, waiting: Callable[[], None] | None) -> int:
    """Take a lock as `try_lock`, trying for up to so many seconds; `waiting` is called in between. Raises
    ShmError after them."""
    deadline = time.monotonic() + seconds
    while (descriptor := try_lock(path, operation)) is None:
        if time.monotonic() > deadline:
            raise ShmError(f"the lock {path} has been held by another process for {seconds:.0f} s")
        if waiting is not None:
            waiting()
        time.sleep(POLL_SECONDS)
    return descriptor


def is_locked(path: Path, operation: int) -> bool:
    """Tells whether a process holds a lock on the file that conflicts with this flock; False without the
    file. Raises OSError if it cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def leads_to(path: Path, descriptor: int) -> bool:
    """Tells whether the name still leads to the open file, and not to none: another user may have put a loop
    of links, a file or a closed directory in the place of ours."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False
