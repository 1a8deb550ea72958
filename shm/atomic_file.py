"""Files that are complete or absent: written under a temporary name, then renamed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PRIVATE, SHARED = 0o600, 0o666  # modes; the umask applies


@contextmanager
def atomic_file(path: Path, mode: int = PRIVATE, *, sync: bool = False) -> Iterator[BinaryIO]:
    """A new file that replaces `path` when the block ends without an exception; otherwise it is removed, and
    `path` stays as it was. `sync`: the bytes are on the disk before the rename. Raises OSError."""
    descriptor, temporary = _create_beside(path, mode)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def check_creatable(path: Path) -> None:
    """Raises OSError unless `atomic_file` can create a file there."""
    descriptor, temporary = _create_beside(path, PRIVATE)
    os.close(descriptor)
    temporary.unlink()


def _create_beside(path: Path, mode: int) -> tuple[int, Path]:
    temporary = path.with_name(f".{path.name[:40]}.{secrets.token_hex(4)}")
    return os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), temporary
