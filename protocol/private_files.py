"""Files and directories that belong to this user, and that no other user can read or write."""

from __future__ import annotations

import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from protocol.errors import NotPrivate

OTHERS_WRITE = 0o022  # mode bits: group or others may write
OTHERS_READ_OR_WRITE = 0o077

SETTLE_SECONDS = 0.1  # in which programs that start at the same time have made their directories

log = logging.getLogger(__name__)
_used: dict[Path, Path] = {}  # the directory that `own_directory` has found for a name


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


def own_directory(path: Path) -> Path:
    """This user's private directory of this name in a folder where all users can make names, such as /tmp.
    Where the name is taken, by another user or by a file of this one (to which any user can give it), it is a
    directory whose name has a suffix, the same for all of this user's programs. Raises NotPrivate where
    neither can be made."""
    used = _used.get(path)
    if used is None or not is_own_directory(used):
        used = _used[path] = _find_or_make(path)
    return private_directory(used)


def _find_or_make(path: Path) -> Path:
    # With a suffix also where the name is free now: other programs of this user may use that directory.
    if is_own_directory(path) or ((other := _with_suffix(path)) is None and _made(path)):
        return path
    if other is not None:
        return other
    try:
        made = Path(tempfile.mkdtemp(prefix=f"{path.name}.", dir=path.parent))
    except OSError as e:
        raise NotPrivate(f"{path} is taken, and no other directory can be made: {e.strerror}") from e
    used = _with_suffix(path) or made
    if used != made:  # another program has made one at the same time
        with suppress(OSError):
            made.rmdir()
    log.warning(f"{path} is not a directory of this user; {used} is used instead")
    return used


def _made(path: Path) -> bool:
    """Whether the directory could be made, or another program of this user has just made it."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return is_own_directory(path)
    except OSError as e:
        raise NotPrivate(f"cannot create {path}: {e.strerror}") from e
    return True


def _with_suffix(path: Path) -> Path | None:
    """Of this user's directories of this name and a suffix the one that all programs use: the first by name
    of those that hold something, else the first. While all are empty, programs that start at the same time
    may still be making theirs."""
    found = _all_with_suffix(path)
    if found and not found[0][0]:
        time.sleep(SETTLE_SECONDS)
        found = _all_with_suffix(path)
    return found[0][1] if found else None


def _all_with_suffix(path: Path) -> list[tuple[bool, Path]]:
    name, found = re.compile(re.escape(path.name) + r"\.[a-z0-9_]{8}"), []
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:  # there may be a hundred thousand of other users: no Path of each
            if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False) and is_own_directory(entry):
                with suppress(OSError):
                    found.append((bool(os.listdir(entry)), Path(entry)))
    return sorted(found, key=lambda one: (not one[0], one[1]))


def is_own_directory(path: Path | os.DirEntry[str]) -> bool:
    """Whether this is a directory of this user, and no link to one."""
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
