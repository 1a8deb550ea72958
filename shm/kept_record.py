"""Records of what was measured, kept in the disk cache so that the next start need not measure it again: a
JSON file each, readable by its owner alone.

A file is written completely or not at all. One that is damaged, of another version or possibly written by
another user is removed, and its content is measured again. Errors never fail a start. What a record contains,
and what its file is called, is the business of the modules that measure.
"""

from __future__ import annotations

import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from msgspec import ValidationError

from protocol.errors import NotPrivate
from protocol.files import check_private, make_folders, read_small
from shm.atomic_file import atomic_file

LOADED = 0.5  # load average for each core, from which on a measurement may be wrong
MAX_BYTES = 1 << 20

R = TypeVar("R")
log = logging.getLogger(__name__)


class KeptRecord(ABC):
    """`load`: the machine's load average when it was measured."""

    load: float

    @property
    @abstractmethod
    def cores(self) -> int:
        """The cores of the machine that was measured that could be used."""

    @property
    def loaded(self) -> bool:
        """Other programs were computing, so that it may be wrong."""
        return self.load > LOADED * self.cores

    def outdated(self, load: float) -> bool:
        """Tells whether to measure again at this load average: the machine was busy, and is half as busy
        now."""
        return self.loaded and load <= self.load / 2


def find(path: Path, parse: Callable[[Any], R], what: str) -> R | None:
    """The record of a file; None without one. A file without a valid record is removed, and the log says that
    `what` is measured again."""
    try:
        return read(path, parse)
    except OSError:
        return None
    except ValueError as e:
        log.warning(f"{path} is not used, {what} measured again: {' '.join(str(e).split())[:100]}")
        with suppress(OSError):
            path.unlink()
        return None


def read(path: Path, parse: Callable[[Any], R]) -> R:
    """The record of a file that only this user can have written. `parse` makes it of a JSON value, and may
    raise what Python does with a value of another form. Raises OSError where the file cannot be read,
    ValueError where it has no such record."""
    try:
        return parse(json.loads(read_small(path, MAX_BYTES, flags=os.O_NOFOLLOW, check=check_private)))
    except (NotPrivate, ValidationError, TypeError, KeyError, AttributeError) as e:
        raise ValueError(str(e)) from e
    except (RecursionError, ArithmeticError) as e:
        raise ValueError(str(e)) from e


def note_use(path: Path) -> None:
    """Its time is that of its last use, which keeps a file from being removed first."""
    with suppress(OSError):  # a disk that cannot be written
        os.utime(path)


def keep(path: Path, data: dict[str, Any], what: str) -> None:
    """Write a record, replacing that of the same name. A failure is logged: `what` is lost."""
    try:
        make_folders(path.parent)
        with atomic_file(path) as file:
            file.write(json.dumps(data, indent=1).encode() + b"\n")
    except OSError as e:
        log.warning(f"{what} could not be kept in {path.parent}, the next start measures again: {e.strerror}")
