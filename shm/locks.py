"""Who builds a store, who uses it, and who removes it.

Each store has two lock files, in folders `.locks` (mode 0700). Both are locked with flock, which the kernel
gives back however a process ends:

    /tmp/tandem-<uid>/.locks/<16 hex>.build
                     exclusive while a store is looked for or built. Two engines that start at once build
                     once: the second waits, and finds the first one's store.
    <root>/.locks/<16 hex>.use
                     shared as long as an engine uses the store. The last one out, for whom the exclusive lock
                     succeeds, unlinks the segment. The file's text "keep" says that one of them asked to
                     leave it for the next start; the first user of that start clears it. It is there from
                     the beginning of a build on, so that the sweep finds what a killed builder left.

Root is the folder of an engine's runtime directory; a name that begins with a dot is no engine's.

A lock file is removed by a holder of its exclusive lock. Whoever locks a file therefore makes sure afterwards
that the name still leads to it, and otherwise starts again.

Segments are seen by all of a user's engines, a root by some of them (a login without a session has another
XDG_RUNTIME_DIR). So builders lock in one place whatever their root, or each would take the other's segment
for a dead builder's; and each user of a store also holds a shared lock on the segment itself, whose
exclusive lock removing it needs, too. A kept store is known to its own root only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from shm.errors import SegmentMissing, ShmError
from shm.segment import SHM_FOLDER, unlink
from shm.store import Store, store_name

LOCK_FOLDER = ".locks"
BUILD_ROOT = "/tmp/tandem-{uid}"  # nothing of the environment: all of a user's engines must find it
KEEP = b"keep"
POLL_SECONDS = 0.05
USE_WAIT_SECONDS = 10.0  # others hold the exclusive lock only while they unlink
BUILD_WAIT_SECONDS = 3600.0  # another engine may be reading hundreds of gigabytes


class StoreLease:
    """This engine's share in a store. As long as it is held, nobody removes the store."""

    def __init__(self, name: str, path: Path, descriptor: int, segment: int) -> None:
        """Hold the store's use file and its segment, both locked. Use `acquire`."""
        self._name = name
        self._path = path
        self._descriptor = descriptor
        self._segment = segment

    @classmethod
    def acquire(cls, fingerprint: str, root: Path) -> StoreLease:
        """Take a share in a finished store.

        Raises SegmentMissing where the store is gone (between its loader's end and this call its last user
        may have removed it: load it again), StoreInvalid where it is not that model's, ShmError where the
        lock cannot be had.
        """
        name, path = store_name(fingerprint), _use_path(root, fingerprint)
        first = _try_lock(path, fcntl.LOCK_EX)
        if first is not None:
            os.ftruncate(first, 0)  # an earlier engine's wish to keep the store has been granted
            os.close(first)
        with contextlib.ExitStack() as undo:
            descriptor = _wait_lock(path, fcntl.LOCK_SH, USE_WAIT_SECONDS, None)
            undo.callback(os.close, descriptor)
            segment = _lock_segment(name, fcntl.LOCK_SH)
            if segment is None:
                raise SegmentMissing(f"there is no shared-memory segment {name}")
            undo.callback(os.close, segment)
            Store.attach(name, fingerprint).close()
            undo.pop_all()
        return cls(name, path, descriptor, segment)

    def release(self, keep: bool) -> bool:
        """Give the share back; says whether the store was removed. The last one out removes it, unless one of
        its users asked to `keep` it."""
        try:
            if keep:
                os.pwrite(self._descriptor, KEEP, 0)
            os.close(self._segment)
            return _remove_if_unused(self._descriptor, self._path, self._name)
        finally:
            os.close(self._descriptor)


@contextlib.contextmanager
def build_lock(fingerprint: str, root: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the right to build a store. `waiting` is called again and again while another engine has it.
    Raises ShmError where it cannot be had within an hour."""
    path, use = _build_path(fingerprint), _use_path(root, fingerprint)
    descriptor = _wait_lock(path, fcntl.LOCK_EX, BUILD_WAIT_SECONDS, waiting)
    try:
        use.touch(mode=0o600)  # this process may be killed: the sweep must find what it leaves
        yield
        # From here on the store has no builder and, until a lease is taken, no user. Its last user may have
        # left meanwhile, and removed the file.
        use.touch(mode=0o600)
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def sweep(root: Path) -> list[str]:
    """Remove the stores that engines of this root left behind when they were killed: nobody uses or builds
    them, and nobody asked to keep them. Returns the segments' names."""
    removed = []
    for use_path in sorted(_lock_folder(root).glob("*.use")):
        key = use_path.stem
        build = _try_lock(_build_path(key), fcntl.LOCK_EX)
        if build is None:
            continue
        use = _try_lock(use_path, fcntl.LOCK_EX)
        try:
            if use is not None and _remove_if_unused(use, use_path, store_name(key)):
                removed.append(store_name(key))
        finally:
            if use is not None:
                os.close(use)
            _build_path(key).unlink(missing_ok=True)
            os.close(build)
    return removed


def _remove_if_unused(descriptor: int, path: Path, name: str) -> bool:
    """Unlink a store and its use file if nobody else holds the file's lock and nobody asked to keep it; of
    the two only the file where the store is gone, or used by an engine of another root."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if os.pread(descriptor, len(KEEP), 0) == KEEP:
        return False
    path.unlink(missing_ok=True)
    segment = _lock_segment(name, fcntl.LOCK_EX)
    if segment is None:
        return False
    unlink(name)
    os.close(segment)
    return True


def _lock_segment(name: str, operation: int) -> int | None:
    """The segment's descriptor, locked; None where there is no such segment or its lock is taken."""
    path = Path(SHM_FOLDER) / name[1:]
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        if _leads_to(path, descriptor):
            return descriptor
    os.close(descriptor)
    return None


def _lock_folder(root: Path) -> Path:
    return _own_folder(root / LOCK_FOLDER)


def _own_folder(folder: Path) -> Path:
    """Make this folder, or check that the one there is this user's alone. Raises ShmError."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.geteuid():
        raise ShmError(f"the folder {folder} belongs to another user")
    if status.st_mode & 0o077:
        raise ShmError(f"the folder {folder} is open to other users; run: chmod 700 {folder}")
    return folder


def _use_path(root: Path, fingerprint: str) -> Path:
    return _lock_folder(root) / f"{fingerprint[:16]}.use"


def _build_path(fingerprint: str) -> Path:
    root = _own_folder(Path(BUILD_ROOT.format(uid=os.geteuid())))
    return _lock_folder(root) / f"{fingerprint[:16]}.build"


def _try_lock(path: Path, operation: int) -> int | None:
    """The descriptor of the file, locked, or None where others hold it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
            if _leads_to(path, descriptor):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last holder removed it just now: there is a new file, or none


def _wait_lock(path: Path, operation: int, seconds: float, waiting: Callable[[], None] | None) -> int:
    deadline = time.monotonic() + seconds
    while (descriptor := _try_lock(path, operation)) is None:
        if time.monotonic() > deadline:
            raise ShmError(f"the lock {path} has been held by another process for {seconds:.0f} s")
        if waiting is not None:
            waiting()
        time.sleep(POLL_SECONDS)
    return descriptor


def _leads_to(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
