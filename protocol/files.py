"""Files of this user that no other user can read or write; and the reading of files that may be anything: a
pipe that blocks, a device without an end, terabytes, or JSON nested so deeply that the stack ends."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from protocol.errors import NotPrivate

OTHERS_WRITE = 0o022  # mode bits: group or others may write
OTHERS_READ_OR_WRITE = 0o077

MAX_SETTINGS = 1 << 22  # bytes of a file of settings; the largest known config.json has a fiftieth
MAX_NESTING = 64  # levels of maps and lists
MAX_VALUES = 1 << 20  # in a file of JSON: four times the tensors of the largest list of them

Check = Callable[[os.stat_result], None]


def check_private(
    status: os.stat_result,
    forbidden: int = OTHERS_WRITE,
    *,
    directory: bool = False,
    remedies: Mapping[str, str] | None = None,
) -> None:
    """Raises NotPrivate unless this is the status of a file (with `directory`, of a directory) of this user
    without any of the mode bits `forbidden`. The error names the first of "kind", "owner" and "mode" that is
    wrong, followed by the remedy of that name."""
    mode = stat.S_IMODE(status.st_mode)
    if not (stat.S_ISDIR if directory else stat.S_ISREG)(status.st_mode):
        name, text = "kind", f"is not a {'directory' if directory else 'file'}"
    elif status.st_uid != os.geteuid():
        name, text = "owner", f"belongs to user {status.st_uid}, not to you"
    elif mode & forbidden:
        name, text = "mode", f"is open to other users (mode {mode:04o})"
    else:
        return
    raise NotPrivate(text + (remedies or {}).get(name, ""))


def check_unshared(status: os.stat_result) -> None:
    """Raises NotPrivate unless this is the status of a file that only this user can write, and that has no
    second name: any user can give a name of ours to a file of ours that all can write (`ln`)."""
    check_private(status)
    if status.st_nlink > 1:  # 0: removed, which its user notices
        raise NotPrivate(f"has {status.st_nlink} names (hard links)")


def private_directory(path: Path) -> Path:
    """Make this directory with mode 0700, or check that the existing one is a real directory that only this
    user can enter. Its parent must exist. Raises NotPrivate."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        check_private_directory(path)
    except OSError as e:
        raise NotPrivate(f"cannot create {path}: {e.strerror}") from e
    return path


def is_own_directory(path: Path) -> bool:
    """Returns whether this is a directory of this user, and no link to one."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode)


def check_private_directory(path: Path) -> None:
    """Raises NotPrivate unless this is a real directory that only this user can enter."""
    remedies = {
        "kind": "; remove it and start again",
        "owner": "; have it removed",
        "mode": f"; run: chmod 700 {path}",
    }
    try:
        check_private(path.lstat(), OTHERS_READ_OR_WRITE, directory=True, remedies=remedies)
    except NotPrivate as e:
        raise NotPrivate(f"{path} {e}") from None
    except OSError as e:
        raise NotPrivate(f"cannot use {path}: {e.strerror}") from e


def sync_folder(folder: Path) -> None:
    """Write the names in this folder to the disk, after a file was made or renamed there. An error is no
    reason to call that file unwritten: some file systems cannot do it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folders(folder: Path) -> None:
    """Make this folder and those above it that are missing, private whatever the umask. Raises OSError."""
    missing = [above for above in folder.parents if not above.exists()]
    for above in (*reversed(missing), folder):
        above.mkdir(mode=0o700, exist_ok=True)


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
    """The value in a JSON file, nested at most MAX_NESTING levels, of at most MAX_VALUES values. Raises
    OSError as `read_small`, and ValueError where it is no such value."""
    content = read_small(path, limit)
    # Before objects are made of them: an empty list is three bytes of the file and 80 of memory. Text counts
    # too, which has some.
    if sum(map(content.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ValueError("it has too many values")
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if is_nested(value, MAX_NESTING):
        raise ValueError("it is nested too deeply")
    return value


def is_nested(value: Any, levels: int) -> bool:
    """Returns whether a JSON value has more than so many maps and lists in each other."""
    level = [value]
    for _ in range(levels):
        level = [inner for outer in level for inner in _parts(outer)]
    return any(isinstance(inner, dict | list) for inner in level)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
