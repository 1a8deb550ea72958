"""Files and directories that belong to this user, and that no other user can read or write."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from protocol.errors import NotPrivate

OTHERS_WRITE = 0o022  # mode bits: group or others may write
OTHERS_READ_OR_WRITE = 0o077

log = logging.getLogger(__name__)


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
    Where another user has taken the name, it is a directory whose name has a suffix, the same for all of this
    user's programs. Raises NotPrivate where neither can be made."""
    if is_own(path):
        return private_directory(path)
    # Also where the name is free now: other programs of this user may use the directory with the suffix.
    with suppress(OSError):
        for other in sorted(path.parent.glob(f"{path.name}.????????")):
            if is_own(other) and other.is_dir() and not other.is_symlink():
                return private_directory(other)
    try:
        return private_directory(path)
    except NotPrivate as e:
        if isinstance(e.__cause__, OSError):  # no directory can be made there
            raise
    try:
        made = Path(tempfile.mkdtemp(prefix=f"{path.name}.", dir=path.parent))
    except OSError as e:
        raise NotPrivate(f"{path} is another user's, and no other directory can be made: {e.strerror}") from e
    log.warning(f"{path} is another user's; {made} is used instead")
    return made


def is_own(path: Path) -> bool:
    """Whether the name exists and belongs to this user; of a symbolic link, the link itself."""
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


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
