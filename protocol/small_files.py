"""Reads files that may be anything: a pipe that blocks for ever, a device without an end, terabytes, or JSON
nested so deeply that the stack ends where it is walked."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_SETTINGS = 1 << 22  # bytes of a file of settings; the largest known config.json has a fiftieth
MAX_NESTING = 64  # levels of maps and lists

Check = Callable[[os.stat_result], None]


def open_regular(path: Path, *, flags: int = 0, check: Check | None = None) -> int:
    """A descriptor to read a regular file. `flags`: beside O_RDONLY; `check`: of its status, and what that
    raises. Raises OSError whose `strerror` says what is wrong, also for a name that no file can have."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    except ValueError as e:  # a NUL
        raise OSError(errno.EINVAL, str(e)) from None
    try:
        status = os.fstat(descriptor)
        if check is not None:
            check(status)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_small(path: Path, limit: int, *, flags: int = 0, check: Check | None = None) -> bytes:
    """The content of a regular file of at most `limit` bytes. Raises as `open_regular`, and OSError for a
    larger file."""
    with os.fdopen(open_regular(path, flags=flags, check=check), "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit / (1 << 20):g} MB")
    return content


def read_json(path: Path, limit: int = MAX_SETTINGS) -> Any:
    """The value in a JSON file, nested at most MAX_NESTING levels. Raises OSError as `read_small`, and
    ValueError where it is no such value."""
    try:
        value = json.loads(read_small(path, limit))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if is_nested(value, MAX_NESTING):
        raise ValueError("it is nested too deeply")
    return value


def is_nested(value: Any, levels: int) -> bool:
    """Whether a JSON value has more than so many maps and lists in each other."""
    level = [value]
    for _ in range(levels):
        level = [inner for outer in level for inner in _parts(outer)]
    return any(isinstance(inner, dict | list) for inner in level)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
