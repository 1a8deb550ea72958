"""The locks of a store's builder and users, and the removal of unused stores.

Each store has two lock files, in folders `.locks` (mode 0700). Both are locked with flock, which the kernel
releases when a process exits for any reason:

    /tmp/tandem-<uid>/.locks/<16 hex>.build       (with a suffix where another user has taken this name)
                     exclusive while a store is looked for or built. If two engines start at once, the
                     second waits and then attaches the first one's store.
    <root>/.locks/<16 hex>.use
                     shared as long as an engine uses the store. The last user, which gets the exclusive lock,
                     unlinks the segment. The file's text is "keep" if a user asked to keep the store for the
                     next start; the first user of that start clears it. The file exists from the start of
                     a build on, so that the sweep finds what a killed builder left. Only a finished store is
                     kept.

`<root>` is the parent of an engine's runtime directory; names of engines do not begin with a dot.

All of a user's engines see the same segments, but they may have different roots (a login without a session
has another XDG_RUNTIME_DIR). So all builders lock in one folder, independent of their root: otherwise each
would take the other's segment for that of a dead builder. The builder and the users of a store also hold a
shared lock on the segment itself; removing it requires the exclusive one. Only the root of a store's users
has its "keep". So the sweep removes finished stores of its own root alone, but unfinished ones, which are
never kept, of every root.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from protocol.errors import NotPrivate
from protocol.files import own_directory
from shm.errors import SegmentMissing, ShmError, StoreInvalid
from shm.file_locks import leads_to, private_folder, try_lock, wait_lock
from shm.segment import is_segment, segment_path, unlink
from shm.store import Store, store_key, store_name, store_segments, store_space

LOCK_FOLDER = ".locks"
KEEP = b"keep"
KEY = re.compile(r"[0-9a-f]{16}")  # of a fingerprint, in the names of its files
USE_WAIT_SECONDS = 10.0  # the exclusive lock is held only while unlinking
LOCK_TRIES, LOCK_PAUSE = 10, 0.02  # seconds; the sweep of another start holds a store's locks for a moment
BUILD_WAIT_SECONDS = 3600.0  # another engine may be reading hundreds of gigabytes


class StoreLease:
    """This engine's lease of a store. No engine removes the store while it is held."""

    def __init__(self, name: str, path: Path, descriptor: int, segment: int) -> None:
        """Hold the store's use file and its segment, both locked. Use `acquire`."""
        self._name = name
        self._path = path
        self._descriptor = descriptor
        self._segment = segment

    @classmethod
    def acquire(cls, fingerprint: str, root: Path) -> StoreLease:
        """Lease a finished store.

        Raises SegmentMissing if no finished store exists: since the loader exited its last user may have
        removed it, and another engine may be building it again (load it again). ShmError if the lock cannot
        be taken.
        """
        path = _use_path(root, fingerprint)
        first = try_lock(path, fcntl.LOCK_EX)
        if first is not None:
            os.ftruncate(first, 0)  # an earlier engine's request to keep the store is fulfilled
            os.close(first)
        with contextlib.ExitStack() as undo:
            descriptor = wait_lock(path, fcntl.LOCK_SH, USE_WAIT_SECONDS, None)
            undo.callback(os.close, descriptor)
            name = store_name(fingerprint)
            segment = _lock_segment(name, fcntl.LOCK_SH)
            if segment is None:
                raise SegmentMissing(f"the shared-memory segment {name} does not exist")
            undo.callback(os.close, segment)
            try:
                Store.attach(name, fingerprint).close()
            except StoreInvalid as e:
                raise SegmentMissing(str(e)) from None
            os.utime(segment)
            undo.pop_all()
        return cls(name, path, descriptor, segment)

    def release(self, keep: bool) -> bool:
        """Release the lease; returns whether the store was removed. The last user removes it, unless a user
        asked to `keep` it."""
        try:
            if keep:
                os.pwrite(self._descriptor, KEEP, 0)
            os.utime(self._segment)  # the time of the last use, for lists of kept stores
            os.close(self._segment)
            return _remove_if_unused(self._descriptor, self._path, self._name)
        finally:
            os.close(self._descriptor)


@contextlib.contextmanager
def build_lock(fingerprint: str, root: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a build lock; `waiting` is called while another engine does. Raises ShmError after an hour."""
    path, use = _build_path(fingerprint), _use_path(root, fingerprint)
    descriptor = wait_lock(path, fcntl.LOCK_EX, BUILD_WAIT_SECONDS, waiting)
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
    """Remove what killed engines left behind: stores of this root that are not in use, being built or kept,
    and unfinished stores and lock files of builders of every root. Returns the segments' names.
    """
    removed = []
    for key in _known_keys(root):
        with _try_build_lock(key) as locked:
            name = store_name(key)
            if locked and _sweep_store(root, key, name):
                removed.append(name)
    return removed


@contextlib.contextmanager
def unused_store(fingerprint: str) -> Iterator[bool]:
    """Whether no engine builds or uses a store; if so, none builds or loads it before the end of the block.
    The first 16 digits of a fingerprint are enough."""
    for _ in range(LOCK_TRIES):
        with _try_build_lock(fingerprint) as locked:
            if locked and not _in_use(store_name(fingerprint)):
                yield True
                return
        time.sleep(LOCK_PAUSE)
    yield False


def remove_kept(fingerprint: str, root: Path) -> bool:
    """Remove a store that an engine has left in shared memory; False where an engine builds or uses it."""
    with unused_store(fingerprint) as unused:
        if not unused or not remove_unused(store_name(fingerprint)):
            return False
        _use_path(root, fingerprint).unlink(missing_ok=True)
        return True


def remove_unused(name: str) -> bool:
    """For the holder of its build lock: remove a store unless an engine uses it; whether it was removed."""
    segment = _lock_segment(name, fcntl.LOCK_EX)
    if segment is None:
        return not is_segment(segment_path(name))
    unlink(name)
    os.close(segment)
    return True


@contextlib.contextmanager
def _try_build_lock(fingerprint: str) -> Iterator[bool]:
    """Whether the build lock of a store is free; if so, it is held for the block."""
    path = _build_path(fingerprint)
    descriptor = try_lock(path, fcntl.LOCK_EX)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _in_use(name: str) -> bool:
    segment = _lock_segment(name, fcntl.LOCK_EX)
    if segment is None:
        return is_segment(segment_path(name))
    os.close(segment)
    return False


def _known_keys(root: Path) -> list[str]:
    """The keys of all stores that have a lock file or a segment."""
    keys = {path.stem for path in _lock_folder(root).glob("*.use")}
    keys |= {path.stem for path in build_folder().glob("*.build")}
    keys |= {store_key(name) for name in store_segments()}
    return sorted(key for key in keys if KEY.fullmatch(key))


def _sweep_store(root: Path, key: str, name: str) -> bool:
    """Whether a store was removed. For the holder of its build lock."""
    path = _use_path(root, key)
    if not path.exists():
        return is_segment(segment_path(name)) and not _is_store(name) and remove_unused(name)
    use = try_lock(path, fcntl.LOCK_EX)
    if use is None:
        return False
    try:
        return _remove_if_unused(use, path, name)
    finally:
        os.close(use)


def _remove_if_unused(descriptor: int, path: Path, name: str) -> bool:
    """Unlink a store and its use file if no other process holds the file's lock and the store is not kept;
    only the file if the store does not exist or an engine of another root uses it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if os.pread(descriptor, len(KEEP), 0) == KEEP and _is_store(name):
        return False
    removed = is_segment(segment_path(name)) and remove_unused(name)
    path.unlink(missing_ok=True)  # last: if this process is killed before, the next sweep finds this file
    return removed


def _is_store(name: str) -> bool:
    """Whether the segment exists and is finished."""
    try:
        Store.attach(name).close()
    except ShmError:
        return False
    return True


def _lock_segment(name: str, operation: int) -> int | None:
    """The segment's descriptor, locked; None if the segment does not exist or its lock is taken."""
    path = segment_path(name)
    if not is_segment(path):
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        if leads_to(path, descriptor):
            return descriptor
    os.close(descriptor)
    return None


def _lock_folder(root: Path) -> Path:
    return private_folder(root / LOCK_FOLDER)


def _use_path(root: Path, fingerprint: str) -> Path:
    return _lock_folder(root) / f"{fingerprint[:16]}.use"


def build_folder() -> Path:
    """The folder of the build locks. It does not depend on the runtime directory: all of a user's engines, or
    those of one space (`store_space`), must find it."""
    space = store_space()
    root = Path(f"/tmp/tandem-{os.geteuid()}" + (f"-{space}" if space else ""))
    try:
        return _lock_folder(own_directory(root))
    except NotPrivate as e:
        raise ShmError(str(e)) from None


def _build_path(fingerprint: str) -> Path:
    return build_folder() / f"{fingerprint[:16]}.build"
