"""POSIX shared-memory segments as numpy arrays.

A segment is created whole: its name is new (O_CREX), its mode is 0600 whatever the umask, and every page
is allocated before `create` returns. A page that does not exist is an error there and never a SIGBUS in
the middle of a computation.

Names begin with a slash and contain no other. All users can make files in /dev/shm, and most names can be
guessed: what is not a regular file that this user alone can write, under one name, does not count as a
segment. This module knows nothing about what the bytes mean.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import re
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import posix_ipc

from protocol.errors import NotPrivate
from protocol.files import check_unshared
from shm.errors import NotEnoughMemory, SegmentEmpty, SegmentMissing, ShmError
from shm.huge import HUGE, collapse, map_shared, populate
from shm.kernel_files import free_memory, limits
from shm.layout import Bytes

SHM_FOLDER = "/dev/shm"
ALLOCATION_STEP = 1 << 26  # bytes allocated by one thread, between two calls of `progress`


def engine_prefix(runtime: Path) -> str:
    """Returns the beginning of the names of an engine's segments, given its runtime directory. Names of
    engines are unique only beside each other, those of segments must be on the whole machine: hence the
    hash."""
    place = hashlib.sha256(f"{os.geteuid()} {os.path.realpath(runtime)}".encode()).hexdigest()[:6]
    return f"/tandem-{runtime.name}-{place}-"


def new_name(prefix: str, kind: str) -> str:
    """A new segment's name. Nobody can foresee it: other users could take names that count up beforehand."""
    return f"{prefix}{kind}-{secrets.randbelow(10**15)}"


def is_segment(path: Path) -> bool:
    """Tells whether this is a segment of this user, and not another user's file or anything else of that
    name, such as a hard link to a file of this user that others can write."""
    try:
        status = os.lstat(path)
        if status.st_uid != os.geteuid():  # without an error's cost: there may be a hundred thousand
            return False
        check_unshared(status)
    except (OSError, NotPrivate):
        return False
    return True


def shm_names(pattern: re.Pattern[str]) -> list[str]:
    """The names in /dev/shm that match as a whole, without a slash. A hundred thousand of other users cost
    50 ms, and a system call for each of them much more."""
    try:
        return [entry for entry in os.listdir(SHM_FOLDER) if pattern.fullmatch(entry)]
    except OSError:
        return []


def segment_path(name: str) -> Path:
    """The file of a segment, which may not exist."""
    return Path(SHM_FOLDER) / name.removeprefix("/")


class Segment:
    """One mapped segment. `array` is uint8 [size], read-only unless the mapping is writable.

    `close` ends this object's use. If other views of `array` exist, the memory stays mapped until the last of
    them is garbage: a view never dangles, and closing in any order is safe.
    """

    def __init__(self, name: str, descriptor: int, size: int, writable: bool) -> None:
        """Map an open descriptor, which the caller keeps. Use `create` or `attach`."""
        self.name = name
        self.size = size
        self._array: Bytes | None = map_shared(descriptor, size, writable)

    @classmethod
    def create(
        cls,
        name: str,
        size: int,
        progress: Callable[[int], None] | None = None,
        place: Callable[[int], None] | None = None,
        sparse: bool = False,
    ) -> Segment:
        """A new, zeroed, writable segment of `size` bytes; `progress` is called with the bytes allocated so
        far, `place` before that with the open descriptor, to set the policy for its pages. Of a `sparse` one
        none is allocated: who writes a page makes it.

        Raises NotEnoughMemory if not all of its pages can be allocated, ShmError if the name is taken; an
        incomplete segment is removed.
        """
        if size < 1:
            raise ValueError(f"a segment needs a positive size, not {size}")
        memory = _create(name)
        try:
            os.fchmod(memory.fd, 0o600)  # the umask may have removed bits
            os.ftruncate(memory.fd, size)
            if place is not None:
                place(memory.fd)
            segment = cls(memory.name, memory.fd, size, writable=True)
            if not sparse:
                _allocate(memory.fd, segment.array, progress)
            return segment
        except OSError as e:
            _give_up(memory)
            if e.errno == errno.EFBIG:
                raise NotEnoughMemory(
                    f"a segment of {byte_size(size)} is larger than a file may be here: raise ulimit -f"
                ) from None
            if e.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise NotEnoughMemory(_too_small(size, free_shm_bytes())) from None
        except BaseException:
            _give_up(memory)
            raise
        finally:
            memory.close_fd()

    @classmethod
    def attach(cls, name: str, writable: bool = False) -> Segment:
        """Map an existing segment of this user. Raises SegmentMissing if it does not exist or is another
        user's, SegmentEmpty if it has no bytes, ShmError if it cannot be opened."""
        try:
            check_unshared(segment_path(name).lstat())  # opening a named pipe could wait for ever
            memory = posix_ipc.SharedMemory(name, read_only=not writable)
        except (posix_ipc.ExistentialError, FileNotFoundError):
            raise SegmentMissing(f"the shared-memory segment {name} does not exist") from None
        except NotPrivate as e:
            raise SegmentMissing(f"the shared-memory segment {name} {e}") from None
        except posix_ipc.PermissionsError:
            raise ShmError(f"the shared-memory segment {name} may not be opened by this user") from None
        try:
            status = os.fstat(memory.fd)
            # Every user can create names in /dev/shm; another user's bytes must not be taken for ours.
            check_unshared(status)
            if status.st_size == 0:
                raise SegmentEmpty(f"the shared-memory segment {name} is empty")
            return cls(name, memory.fd, status.st_size, writable)
        except NotPrivate as e:
            raise ShmError(f"the shared-memory segment {name} {e}") from None
        finally:
            memory.close_fd()

    @property
    def array(self) -> Bytes:
        """uint8 [size]. Raises ValueError after `close`."""
        if self._array is None:
            raise ValueError(f"the shared-memory segment {self.name} is closed here")
        return self._array

    def close(self) -> None:
        """End this object's use; the segment itself stays until `unlink`. May be called twice."""
        self._array = None

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _create(name: str) -> posix_ipc.SharedMemory:
    """A new, empty segment of this name. Raises ShmError."""
    try:
        return posix_ipc.SharedMemory(name, flags=posix_ipc.O_CREX, mode=0o600)
    except (posix_ipc.ExistentialError, posix_ipc.PermissionsError):
        if is_segment(segment_path(name)):
            raise ShmError(f"the shared-memory segment {name} exists already") from None
        raise ShmError(
            f"{segment_path(name)} is not a segment of this user: have it removed, or avoid its name, of a "
            "store by setting TANDEM_STORE_SPACE, of an engine's own segment by --name"
        ) from None
    except (posix_ipc.Error, OSError) as e:
        raise ShmError(f"the shared-memory segment {name} cannot be created: {e}") from None


def _allocate(descriptor: int, memory: Bytes, progress: Callable[[int], None] | None) -> None:
    """Allocate every page, on all cores: a virtual machine's host may have to find each of them. Raises
    OSError, and the exceptions of `progress`, which is called in this thread."""

    def allocate(start: int) -> int:
        part = memory[start : start + ALLOCATION_STEP]
        # One page of each huge one: the kernel then makes the rest of it, and nothing is copied.
        for page in range(start, start + len(part) - HUGE + 1, HUGE):
            os.posix_fallocate(descriptor, page, 1)
        if collapse(part) < len(part) // HUGE * HUGE:
            populate(part)  # several threads can; of posix_fallocate, one at a time
        os.posix_fallocate(descriptor, start, len(part))
        return len(part)

    starts, done = range(0, len(memory), ALLOCATION_STEP), 0
    with ThreadPoolExecutor(min(len(starts), len(os.sched_getaffinity(0)))) as pool:
        try:
            for allocated in pool.map(allocate, starts):
                done += allocated
                if progress is not None:
                    progress(done)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _give_up(memory: posix_ipc.SharedMemory) -> None:
    """Remove an incomplete segment; its pages are freed at once, even if a process maps it."""
    with contextlib.suppress(OSError):
        os.ftruncate(memory.fd, 0)
    unlink(memory.name)


def unlink(name: str) -> None:
    """Remove the name of this user's segment, if it exists; its memory is freed with the last mapping."""
    if is_segment(segment_path(name)):
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_shared_memory(name)


def allocated_bytes(name: str) -> int:
    """Bytes that a segment of this user takes: all of a complete one, less of a partial one and of one that
    is being built; 0 where there is none."""
    with contextlib.suppress(OSError):
        status = os.stat(segment_path(name))
        if status.st_uid == os.geteuid():
            return status.st_blocks * 512
    return 0


def free_shm_bytes() -> int:
    """Bytes that /dev/shm can still hold."""
    status = os.statvfs(SHM_FOLDER)
    return status.f_bavail * status.f_frsize


def available_memory() -> int:
    """Bytes of memory available without swapping (MemAvailable), within a container's limit."""
    import psutil  # a tenth of a worker's start, which needs no memory sizes

    available, free = int(psutil.virtual_memory().available), free_memory()
    return available if free is None else min(available, free)


def total_memory() -> int:
    """Bytes of memory of this machine, or of the container's limit."""
    import psutil

    total, limit = int(psutil.virtual_memory().total), limits().memory
    return total if limit is None else min(total, limit)


def free_space(reserve: int) -> int:
    """Bytes that /dev/shm and the available memory less `reserve` bytes both have; at least 0."""
    return max(0, min(free_shm_bytes(), available_memory() - reserve))


def check_space(needed: int, reserve: int) -> None:
    """Raise NotEnoughMemory, one line that names what to change, unless `needed` bytes fit both /dev/shm and
    the available memory less `reserve` bytes for everything else."""
    shm, memory = free_shm_bytes(), available_memory()
    if needed > memory - reserve:
        raise NotEnoughMemory(
            f"{byte_size(needed)} of shared memory are needed, but of the {byte_size(memory)} of memory that "
            f"are available {byte_size(reserve)} must stay free for the rest: use a smaller --format, a "
            "smaller model, or close other programs"
        )
    if needed > shm:
        raise NotEnoughMemory(_too_small(needed, shm))


def byte_size(count: float) -> str:
    """A byte count for a person: "25.13 GB", "31.5 MB", "4.0 kB", "12 B"."""
    for limit, unit, digits in ((1e9, "GB", 2), (1e6, "MB", 1), (1e3, "kB", 1)):
        if count >= limit:
            return f"{count / limit:.{digits}f} {unit}"
    return f"{count:.0f} B"


def _too_small(needed: int, free: int) -> str:
    status = os.statvfs(SHM_FOLDER)
    enough = status.f_blocks * status.f_frsize - free + needed
    return (
        f"{byte_size(needed)} of shared memory are needed, but {SHM_FOLDER} has {byte_size(free)} free: "
        f"use a smaller --format, or enlarge it: mount -o remount,size={enough // 2**20 + 64}m {SHM_FOLDER}"
    )


LOCKED_TOGETHER = 1 << 24  # bytes of one call


def lock_pages(memory: Bytes) -> str:
    """Lock the pages of a segment's `array`, so that they are not swapped out, as far as this process may:
    without privilege up to RLIMIT_MEMLOCK. Returns the result in one line.

    They stay locked until they are unmapped or the process ends, for all processes that map them. Pages that
    have been written take about 80 ms a gigabyte.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    total = byte_size(memory.nbytes)
    for start in range(0, memory.nbytes, LOCKED_TOGETHER):
        size = min(LOCKED_TOGETHER, memory.nbytes - start)
        if libc.mlock(memory.ctypes.data + start, size):
            why = os.strerror(ctypes.get_errno()).lower()
            fix = "raise the limit with `ulimit -l unlimited`"
            return f"{byte_size(start)} of {total} locked in memory ({why}); {fix}"
    return f"{total} locked in memory"
