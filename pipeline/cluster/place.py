"""An expert host's place on its machine: a runtime directory as engines have (`launch/runtime.py`), so that
what a killed host leaves is swept by the next start of an engine or a host.

    $XDG_RUNTIME_DIR/tandem/<name>/     or /tmp/tandem-<uid>/<name>/, 0700
        lock            flocked exclusively by the host as long as it runs
        host.json       what it says about itself: HostPlace
        host-<pid>.log  its log
        work.sock       its expert workers"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from protocol.errors import NotPrivate
from protocol.files import private_directory, read_small
from protocol.sockets import runtime_root
from shm.atomic_file import atomic_file
from shm.locks import is_locked, leads_to, try_lock
from shm.segment import engine_prefix, is_segment, segment_path, shm_names

LOCK, INFO = "lock", "host.json"
MAX_INFO = 1 << 16  # bytes
POLL_SECONDS = 0.02
LOCK_TRIES = 10  # a process that looks whether a host runs holds its lock for a moment


@dataclass(frozen=True)
class HostPlace:
    """What an expert host says about itself."""

    name: str
    pid: int
    setting: str  # digest of its configuration: a host with another one is not adopted
    state: str  # loading | ready | failed
    endpoint: str  # tcp://ADDRESS:PORT
    key: str  # its public CURVE key
    lanes: tuple[int, ...]
    log: str  # path
    error: str = ""  # why it has failed


def folder_of(name: str) -> Path:
    """Returns the directory of a host, which need not exist. Raises NotPrivate."""
    return runtime_root() / name


def claim(name: str) -> tuple[Path, int] | None:
    """Make a host's directory and take its lock; returns its path and the lock's descriptor, or None where a
    host of this name runs. What an earlier one has left is removed. Raises NotPrivate, OSError."""
    path = folder_of(name)
    for _ in range(LOCK_TRIES):
        with suppress(FileNotFoundError):  # a host that ends, or another start's sweep, has just removed it
            lock = try_lock(_made(path) / LOCK, fcntl.LOCK_EX)
            if lock is not None:
                _clear(path)
                return path, lock
        time.sleep(POLL_SECONDS)
    return None


def _made(path: Path) -> Path:
    """Make a host's directory. Raises FileNotFoundError where another process removes it meanwhile,
    NotPrivate."""
    try:
        return private_directory(path)
    except NotPrivate as e:
        if isinstance(e.__cause__, FileNotFoundError):
            raise FileNotFoundError(path) from None
        raise


def log_of(path: Path) -> Path:
    """Returns the log of the host that this process is: each has one of another name."""
    return path / f"host-{os.getpid()}.log"


def logs(name: str) -> list[Path]:
    """Returns the logs of the latest host of this name: one, or none before it runs."""
    return list(folder_of(name).glob("host-*.log"))


def publish(path: Path, place: HostPlace) -> None:
    """Write host.json, whole or not at all."""
    with atomic_file(path / INFO, sync=False) as file:
        file.write(msgspec.json.encode(asdict(place)))


def remove(path: Path, lock: int) -> None:
    """Remove a host's segments and directory, and release its lock. After another program had removed the
    directory, as at a logout, one of that name is another host's, and stays."""
    if leads_to(path / LOCK, lock):
        _clear(path)
        (path / LOCK).unlink(missing_ok=True)
        with suppress(OSError):
            path.rmdir()
    os.close(lock)


def runs(name: str) -> bool:
    """Returns whether a host of this name runs."""
    return is_locked(folder_of(name) / LOCK, fcntl.LOCK_SH)


def read(name: str) -> HostPlace | None:
    """Returns what the latest host of this name has said, whether it runs or not; None of none."""
    try:
        return msgspec.json.decode(read_small(folder_of(name) / INFO, MAX_INFO), type=HostPlace)
    except (OSError, msgspec.DecodeError):
        return None


def wait_exit(name: str, seconds: float) -> bool:
    """Wait until no host of this name runs; False where one still does after so many seconds."""
    until = time.monotonic() + seconds
    while runs(name):
        if time.monotonic() > until:
            return False
        time.sleep(POLL_SECONDS)
    return True


def remove_segments(path: Path) -> None:
    """Remove a host's own segments; its store is none of them."""
    own = re.compile(rf"{re.escape(engine_prefix(path)[1:])}[a-z]+-[0-9]+")
    for name in shm_names(own):
        if is_segment(segment_path(name)):
            segment_path(name).unlink(missing_ok=True)


def _clear(path: Path) -> None:
    """Remove a host's segments, and all files in its directory but the lock."""
    remove_segments(path)
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            entry.unlink(missing_ok=True)
