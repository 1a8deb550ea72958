"""Files that are complete or absent, also after a power failure: written under a temporary name, synced and
renamed, and then their folder is synced."""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from protocol.errors import NotPrivate
from protocol.files import check_private, make_folders, read_small, sync_folder

Parsed = TypeVar("Parsed")
PRIVATE, SHARED = 0o600, 0o666  # modes; the umask applies


@contextmanager
def atomic_file(path: Path, mode: int = PRIVATE, *, sync: bool = True) -> Iterator[BinaryIO]:
    """A new file that replaces `path` when the block ends without an exception; otherwise it is removed, and
    `path` stays as it was. `sync` False: for a folder that is in memory. Raises OSError."""
    descriptor, temporary = _create_beside(path, mode)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            if sync:
                put_in_place(descriptor, temporary, path)
            else:
                temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def put_in_place(descriptor: int, temporary: Path, path: Path) -> None:
    """Give the open file `temporary` its final name, in the same folder. Raises OSError."""
    os.fsync(descriptor)
    os.replace(temporary, path)
    sync_folder(path.parent)


def warn_unkept(log: logging.Logger, what: str, error: OSError) -> None:
    """Log that something could not be kept in the user's cache. A full disk is one fact, which the first
    process of an engine tells (`workers/lifetime.py`)."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    place = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    more = "; nor can anything else be kept there" if full else ""
    fact = {"fact": "full-disk"} if full else None
    log.warning(f"{what}: {place}{error.strerror or error}{more}", extra=fact)


def keep(path: Path, content: bytes, log: logging.Logger, unkept: str) -> bool:
    """Write a file of the user's cache. Tells whether it is there; else `unkept`, and why, is logged."""
    try:
        make_folders(path.parent)
        with atomic_file(path) as file:
            file.write(content)
    except OSError as e:
        warn_unkept(log, unkept, e)
        return False
    return True


def read_kept(
    path: Path, limit: int, parse: Callable[[bytes], Parsed], log: logging.Logger, instead: str
) -> Parsed | None:
    """Returns what `parse` makes of a file of the user's cache with at most so many bytes; None without one.
    A file that another user can have written, or for which `parse` raises ValueError, is removed, and a line
    says so and what is done instead."""
    try:
        return parse(read_small(path, limit, flags=os.O_NOFOLLOW, check=check_private))
    except FileNotFoundError:
        return None
    except (OSError, NotPrivate, ValueError, RecursionError) as e:
        log.warning(f"{path} is not used, {instead}: {' '.join(str(e).split())[:100]}")
        with suppress(OSError):
            path.unlink()
        return None


def check_creatable(path: Path, room: int = 0) -> None:
    """Raises OSError unless `atomic_file` can create a file there, with room for so many bytes."""
    descriptor, temporary = _create_beside(path, PRIVATE)
    try:
        if room:
            os.posix_fallocate(descriptor, 0, room)
    finally:
        os.close(descriptor)
        temporary.unlink()


def _create_beside(path: Path, mode: int) -> tuple[int, Path]:
    temporary = path.with_name(f".{path.name[:40]}.{secrets.token_hex(4)}")
    return os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), temporary
