"""The locks of a store's builder and users, and the removal of unused stores.

All locks are flock's, which the kernel releases when a process exits for any reason:

    /tmp/tandem-<uid>/.locks/<16 hex>.build       (in a folder of mode 0700)
                     exclusive while a store is looked for or built. If two engines start at once, the
                     second waits and then attaches the first one's store.
    the segment itself
                     shared by its builder, and by each engine as long as it uses the store. Whoever gets the
                     exclusive lock may unlink the segment: the last user, and the sweep of the next start
                     for what killed engines left.

A user that asks to keep a store for the next start marks the segment with the mode bit KEPT; the first user
of that start clears it. Only a finished store is kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from protocol.errors import NotPrivate
from protocol.files import check_unshared, private_directory
from shm.errors import SegmentMissing, ShmError, StoreInvalid
from shm.segment import is_segment, segment_path, unlink
from shm.store import Store, store_key, store_name, store_segments, store_space

# ----------------------------------------------------------------------------------------------------------
# Lock files: flock, which the kernel releases when a process exits for any reason, on removable files.
#
# The holder of a file's exclusive lock may remove it. So after locking, these functions check that the name
# still leads to the locked file, and otherwise start again.


POLL_SECONDS = 0.05


def try_lock(path: Path, operation: int) -> int | None:
    """The descriptor of the file, created if missing, with this flock; None if another process holds a
    conflicting lock. Raises OSError if the file cannot be opened, ShmError if others could write it, too."""
    while True:
        descriptor = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600
        )
        try:
            check_unshared(os.fstat(descriptor))
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
            if leads_to(path, descriptor):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except NotPrivate as e:
            os.close(descriptor)
            raise ShmError(f"the lock {path} {e}") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last holder has just removed it: lock the new file


def wait_lock(path: Path, operation: int, seconds: float, waiting: Callable[[], None] | None) -> int:
    """Take a lock as `try_lock`, trying for up to so many seconds; `waiting` is called in between. Raises
    ShmError after them."""
    deadline = time.monotonic() + seconds
    while (descriptor := try_lock(path, operation)) is None:
        if time.monotonic() > deadline:
            raise ShmError(f"the lock {path} has been held by another process for {seconds:.0f} s")
        if waiting is not None:
            waiting()
        time.sleep(POLL_SECONDS)
    return descriptor


def is_locked(path: Path, operation: int) -> bool:
    """Tells whether a process holds a lock on the file that conflicts with this flock; False without the
    file. Raises OSError if it cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def leads_to(path: Path, descriptor: int) -> bool:
    """Tells whether the name still leads to the open file, and not to none: another user may have put a loop
    of links, a file or a closed directory in the place of ours."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


# --- stores -------------------------------------------------------------------------------------------------

KEPT = stat.S_IXUSR
KEY = re.compile(r"[0-9a-f]{16}")  # of a fingerprint, in the names of its files
LOCK_TRIES, LOCK_PAUSE = 100, 0.02  # seconds; a segment's removal or another start's sweep takes a moment
BUILD_WAIT_SECONDS = 3600.0  # another engine may be reading hundreds of gigabytes


class StoreLease:
    """This engine's lease of a store. No engine removes the store while it is held."""

    def __init__(self, name: str, descriptor: int) -> None:
        """Hold the locked segment. Use `acquire`."""
        self._name = name
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, fingerprint: str) -> StoreLease:
        """Lease a finished store.

        Raises SegmentMissing if no finished store exists: since the loader exited its last user may have
        removed it, and another engine may be building it again (load it again).
        """
        name = store_name(fingerprint)
        alone = _lock_segment(name, fcntl.LOCK_EX)
        if alone is not None:
            os.fchmod(alone, 0o600)  # an earlier engine's request to keep the store is fulfilled
            os.close(alone)
        descriptor = None
        for _ in range(LOCK_TRIES):
            descriptor = _lock_segment(name, fcntl.LOCK_SH)
            if descriptor is not None or not is_segment(segment_path(name)):
                break
            time.sleep(LOCK_PAUSE)
        if descriptor is None:
            raise SegmentMissing(f"the shared-memory segment {name} does not exist")
        try:
            Store.attach(name, fingerprint).close()
            os.utime(descriptor)
        except BaseException as e:
            os.close(descriptor)
            if isinstance(e, StoreInvalid):
                raise SegmentMissing(str(e)) from None
            raise
        return cls(name, descriptor)

    def release(self, keep: bool) -> bool:
        """Release the lease; returns whether the store was removed. The last user removes it, unless a user
        asked to `keep` it."""
        try:
            if keep:
                os.fchmod(self._descriptor, 0o600 | KEPT)
            os.utime(self._descriptor)  # the time of the last use, for lists of kept stores
            return _locked(self._name, self._descriptor, fcntl.LOCK_EX) and _remove_unless_kept(self._name)
        finally:
            os.close(self._descriptor)


@contextlib.contextmanager
def build_lock(fingerprint: str, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a build lock; `waiting` is called while another engine does. Raises ShmError after an hour."""
    path = _build_path(fingerprint)
    descriptor = wait_lock(path, fcntl.LOCK_EX, BUILD_WAIT_SECONDS, waiting)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def sweep() -> list[str]:
    """Remove what killed engines left behind: stores that are not in use, being built or kept, and lock files
    of builders. Returns the segments' names."""
    removed = []
    keys = {path.stem for path in build_folder().glob("*.build")}
    keys |= {store_key(name) for name in store_segments()}
    for key in sorted(key for key in keys if KEY.fullmatch(key)):
        name = store_name(key)
        with _try_build_lock(key) as locked:
            segment = _lock_segment(name, fcntl.LOCK_EX) if locked else None
            if segment is not None:
                if _remove_unless_kept(name):
                    removed.append(name)
                os.close(segment)
    return removed


@contextlib.contextmanager
def unused_store(fingerprint: str) -> Iterator[bool]:
    """Yields whether no engine builds or uses a store; if so, none builds or loads it before the end of the
    block. The first 16 digits of a fingerprint are enough."""
    for _ in range(10):
        with _try_build_lock(fingerprint) as locked:
            name = store_name(fingerprint)
            segment = _lock_segment(name, fcntl.LOCK_EX)
            if segment is not None:
                os.close(segment)
            if locked and (segment is not None or not is_segment(segment_path(name))):
                yield True
                return
        time.sleep(LOCK_PAUSE)
    yield False


def remove_kept(fingerprint: str) -> bool:
    """Remove a store that an engine has left in shared memory; False where an engine builds or uses it."""
    with unused_store(fingerprint) as unused:
        return unused and remove_unused(store_name(fingerprint))


def remove_unused(name: str) -> bool:
    """Remove a store, for the holder of its build lock, unless an engine uses it. Returns whether it is
    gone."""
    segment = _lock_segment(name, fcntl.LOCK_EX)
    if segment is None:
        return not is_segment(segment_path(name))
    unlink(name)
    os.close(segment)
    return True


def _remove_unless_kept(name: str) -> bool:
    """Unlink a store, for the holder of its exclusive lock; False for a finished store that is to be kept."""
    if segment_path(name).stat().st_mode & KEPT and _is_store(name):
        return False
    unlink(name)
    return True


@contextlib.contextmanager
def _try_build_lock(fingerprint: str) -> Iterator[bool]:
    """Yields whether the build lock of a store is free; if so, it is held for the block."""
    path = _build_path(fingerprint)
    descriptor = try_lock(path, fcntl.LOCK_EX)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _is_store(name: str) -> bool:
    """Tells whether the segment exists and is finished."""
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
    if _locked(name, descriptor, operation):
        return descriptor
    os.close(descriptor)
    return None


def _locked(name: str, descriptor: int, operation: int) -> bool:
    """Lock an open segment; False if its lock is taken, or if it has lost its name."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return leads_to(segment_path(name), descriptor)


def build_folder() -> Path:
    """The folder of the build locks: the same for all of a user's engines, or for those of one space
    (`store_space`), whatever their runtime directories are."""
    space = store_space()
    root = Path(f"/tmp/tandem-{os.geteuid()}" + (f"-{space}" if space else ""))
    try:
        return private_directory(private_directory(root) / ".locks")
    except NotPrivate as e:
        raise ShmError(str(e)) from None


def _build_path(fingerprint: str) -> Path:
    return build_folder() / f"{fingerprint[:16]}.build"
