"""Leases of the disk cache's entries. `launch.py cache` removes no entry that an engine holds a lease of.

    <cache folder>/.locks/<key>.use    locked with flock, shared, by each engine that uses the entry; a line
                                       "<engine> <process>" for each. Removing the entry requires the
                                       exclusive lock.

`<key>` is the first 16 digits of the fingerprint of a store, a backbone or a calibration, which may not exist
yet, or the name of a costs file. The lock files are in the cache folder, so that all programs that see the
entries find them: engines of one user may have different runtime directories, and machines may share the
folder. The last user removes the file; that of a killed engine is not locked, and is removed by the next
start. A folder that cannot be written holds no leases; an error here never fails a start.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from protocol.errors import NotPrivate
from protocol.files import make_folders, private_directory
from shm.errors import ShmError
from shm.file_locks import try_lock, wait_lock

LOCK_FOLDER = ".locks"
KEY_DIGITS = 16  # of a fingerprint
WAIT_SECONDS = 10.0  # the exclusive lock is held only while an entry is removed
TRIES, PAUSE = 10, 0.02  # seconds; another program that tests a lock holds it for a moment
MAX_TEXT = 1 << 16  # bytes

log = logging.getLogger(__name__)


class CacheLease:
    """An engine's lease of entries, which may not exist yet."""

    def __init__(self, folder: Path, held: list[tuple[Path, int]]) -> None:
        """Hold locked files. Use `acquire`."""
        self._folder = folder
        self._held = held

    @classmethod
    def acquire(cls, folder: Path, keys: Iterable[str], engine: str) -> CacheLease:
        """Lease the entries of these keys, and remove the files of killed engines."""
        held: list[tuple[Path, int]] = []
        try:
            make_folders(folder)
            _sweep(folder)
            for key in keys:
                path, descriptor = _lock(folder, key, fcntl.LOCK_SH)
                held.append((path, descriptor))
                os.lseek(descriptor, 0, os.SEEK_END)
                os.write(descriptor, f"{engine} {os.getpid()}\n".encode())
        except (OSError, NotPrivate, ShmError) as e:
            log.debug(f"no lease of entries in {folder}: {e}")
        return cls(folder, held)

    def release(self) -> None:
        """Idempotent."""
        while self._held:
            path, descriptor = self._held.pop()
            _remove_if_unused(path, descriptor)
            os.close(descriptor)
        with contextlib.suppress(OSError):  # another engine's leases are in it
            (self._folder / LOCK_FOLDER).rmdir()


def lease_key(fingerprint: str) -> str:
    """Of a store, a backbone or a calibration."""
    return fingerprint[:KEY_DIGITS]


def users(folder: Path, key: str) -> str:
    """The engines that hold a lease of an entry, for a person; empty without one."""
    path = _path(folder, key)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return ""
    try:
        for _ in range(TRIES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(PAUSE)
            else:
                return ""
        lines = os.pread(descriptor, MAX_TEXT, 0).decode(errors="replace").splitlines()
    except OSError:
        return "an engine"
    finally:
        os.close(descriptor)
    names = {name for name, _, pid in (line.partition(" ") for line in lines) if Path("/proc", pid).exists()}
    return ", ".join(f"engine {name}" for name in sorted(names)) or "an engine"  # of another machine


@contextlib.contextmanager
def unused_entry(folder: Path, key: str) -> Iterator[bool]:
    """Whether no engine uses an entry; if so, none begins to before the end of the block. Raises OSError,
    ShmError."""
    if users(folder, key):
        yield False
        return
    try:
        path, descriptor = _lock(folder, key, fcntl.LOCK_EX)
    except NotPrivate as e:
        raise ShmError(str(e)) from None
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        with contextlib.suppress(OSError):
            (folder / LOCK_FOLDER).rmdir()


def _lock(folder: Path, key: str, operation: int) -> tuple[Path, int]:
    """The locked file of a key. Raises OSError, NotPrivate, ShmError after WAIT_SECONDS."""
    path = _path(folder, key)
    for _ in range(TRIES):
        with contextlib.suppress(FileNotFoundError):  # the last user of another entry removed the folder
            private_directory(path.parent)
            return path, wait_lock(path, operation, WAIT_SECONDS, None)
    raise ShmError(f"{path.parent} is removed again and again by another program")


def _sweep(folder: Path) -> None:
    """Remove the files of killed engines."""
    with contextlib.suppress(FileNotFoundError):  # the last user of an entry removed the folder
        for path in (folder / LOCK_FOLDER).iterdir():
            descriptor = try_lock(path, fcntl.LOCK_EX)
            if descriptor is not None:
                path.unlink(missing_ok=True)
                os.close(descriptor)


def _remove_if_unused(path: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):  # another engine holds a lease
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)


def _path(folder: Path, key: str) -> Path:
    return folder / LOCK_FOLDER / f"{key}.use"
