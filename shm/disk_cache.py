"""Stores on disk: `<cache folder>/<fingerprint>/store.bin`, the same bytes as the segment.

Files are 0600 in 0700 folders, and one that somebody else may have written is not used. A file is written
under another name, store.tmp, flushed and then renamed, so what has the right name was once whole; reading
still checks its size, its manifest and every layer's checksum (on other cores while the next layer is read),
because disks fail quietly and a store is used for months.

Who writes a store.tmp holds its exclusive lock. One that nobody locks is what a killed loader left, also
where several machines have the folder in common.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from shm.checksums import damaged_layers, name_layers
from shm.errors import StoreDamaged, StoreInvalid
from shm.file_locks import try_lock
from shm.layout import PAGE
from shm.manifest import MAX_MANIFEST, StoreManifest, read_head
from shm.segment import gigabytes
from shm.store import Store, StoreBuilder

STORE_FILE = "store.bin"
UNFINISHED = "store.tmp"
FINGERPRINT = re.compile(r"[0-9a-f]{64}")
CHUNK = 1 << 24  # bytes of one read or write
FLUSH = 1 << 28  # bytes between two flushes of a file being written
LOCK_TRIES = 10  # a sweep holds an unfinished file's lock for a moment


class CachedStore:
    """A store on disk whose manifest has been checked, open for reading. A context manager."""

    def __init__(self, descriptor: int, path: Path, manifest: StoreManifest, start: int) -> None:
        """Hold an open file. Use `open`."""
        self._descriptor = descriptor
        self._start = start
        self._path = path
        self.manifest = manifest

    @classmethod
    def open(cls, folder: Path, fingerprint: str) -> CachedStore | None:
        """The store of this model, or None where the folder has none. Raises StoreInvalid where its file is
        cut short, unreadable, of another version or another model's, or could be another user's work."""
        path = _store_path(folder, fingerprint)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # it may be a pipe
        except FileNotFoundError:
            return None
        except OSError as e:
            raise StoreInvalid(f"the cached store {path} cannot be used: {e.strerror}") from None
        try:
            size = _size_of_own(descriptor)
            head = np.frombuffer(os.pread(descriptor, PAGE + MAX_MANIFEST, 0), dtype=np.uint8)
            manifest, start = read_head(head, size)
            if manifest.fingerprint != fingerprint:
                raise StoreInvalid(f"it belongs to another model ({manifest.source})")
        except (StoreInvalid, OSError) as e:
            os.close(descriptor)
            reason = e.strerror if isinstance(e, OSError) else e
            raise StoreInvalid(f"the cached store {path} cannot be used: {reason}") from None
        return cls(descriptor, path, manifest, start)

    def fill(self, builder: StoreBuilder, progress: Callable[[int], None]) -> None:
        """Read all experts straight into a new store; `progress` is given the bytes read so far. Raises
        StoreDamaged where the bytes are not those that were written."""
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            sums: list[Future[int]] = []
            for layer in range(self.manifest.shape.layers):
                self._read_layer(builder, layer, progress)
                sums.append(pool.submit(builder.checksum, layer))
            for layer, (future, expected) in enumerate(zip(sums, self.manifest.checksums, strict=True)):
                if future.result() != expected:
                    raise StoreDamaged(f"the cached store {self._path} is damaged in layer {layer}")

    def verify(self, progress: Callable[[int], None]) -> None:
        """Compare every layer with its checksum, on all cores; `progress` is given the bytes compared so far.
        Raises StoreDamaged naming the layers that differ."""
        stride = self.manifest.layout.layer_stride

        def parts(layer: int) -> Iterator[memoryview]:
            buffer = memoryview(bytearray(min(CHUNK, stride)))
            begin = layer * stride
            end = begin + stride
            while begin < end:
                count = self._read(buffer[: end - begin], begin)
                yield buffer[:count]
                begin += count

        damaged = damaged_layers(self.manifest.checksums, parts, progress)
        if damaged:
            raise StoreDamaged(f"the cached store {self._path} is damaged in {name_layers(damaged)}")

    def _read_layer(self, builder: StoreBuilder, layer: int, progress: Callable[[int], None]) -> None:
        target = builder.layer(layer).data
        begin = builder.layout.offset(layer, 0)
        done = 0
        while done < len(target):
            done += self._read(target[done : done + CHUNK], begin + done)
            progress(begin + done)

    def _read(self, target: memoryview, begin: int) -> int:
        """Fill at least one byte of `target` with the experts' bytes from `begin` on; how many."""
        try:
            count = os.preadv(self._descriptor, [target], self._start + begin)
        except OSError as e:
            raise StoreDamaged(f"the cached store {self._path} cannot be read: {e.strerror}") from None
        if count == 0:
            raise StoreDamaged(f"the cached store {self._path} became shorter while it was read")
        return count

    def __enter__(self) -> CachedStore:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def write_cache(folder: Path, store: Store, progress: Callable[[int], None]) -> None:
    """Keep a finished store on disk; `progress` is given the bytes written so far. Raises OSError, and leaves
    nothing behind, where that fails; ENOSPC before anything is written where the disk has too little room.
    """
    path = _store_path(folder, store.fingerprint)
    temporary = path.with_name(UNFINISHED)
    descriptor = _open_unfinished(temporary)
    try:
        _write(descriptor, store, temporary, progress)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        temporary.replace(path)  # still locked: a sweep must not take it for a killed loader's
    except BaseException:
        temporary.unlink(missing_ok=True)
        _remove_empty(path.parent)
        raise
    finally:
        os.close(descriptor)


def sweep_cache(folder: Path) -> list[Path]:
    """Remove what killed loaders left in the cache folder: unfinished files that nobody writes, and folders
    with nothing in them. Returns the files. A folder that does not let us is left as it is."""
    removed = []
    for entry in sorted(folder.glob("*")):
        temporary = entry / UNFINISHED
        if FINGERPRINT.fullmatch(entry.name) is None:
            continue
        with contextlib.suppress(OSError):  # of another user, on a disk that cannot be written, just removed
            if temporary.exists():
                descriptor = try_lock(temporary, fcntl.LOCK_EX)
                if descriptor is None:
                    continue
                temporary.unlink(missing_ok=True)
                os.close(descriptor)
                removed.append(temporary)
            _remove_empty(entry)
    return removed


def _open_unfinished(path: Path) -> int:
    """The descriptor of a new, empty file, locked. Raises OSError."""
    for _ in range(LOCK_TRIES):
        with contextlib.suppress(FileNotFoundError):  # a sweep found the folder empty
            for folder in (path.parent.parent, path.parent):
                _private_folder(folder)
            descriptor = try_lock(path, fcntl.LOCK_EX)
            if descriptor is not None:
                os.ftruncate(descriptor, 0)
                return descriptor
        time.sleep(0.02)
    raise OSError(errno.EBUSY, "another program is writing it", str(path))


def _write(descriptor: int, store: Store, path: Path, progress: Callable[[int], None]) -> None:
    data = store.segment.array
    free = shutil.disk_usage(path.parent).free
    if free < data.nbytes:
        what = f"{gigabytes(data.nbytes)} are needed, {gigabytes(free)} are free"
        raise OSError(errno.ENOSPC, what, str(path.parent))
    flushed = 0
    for begin in range(0, data.nbytes, CHUNK):
        part = data[begin : begin + CHUNK].data
        while part:
            part = part[os.write(descriptor, part) :]
        written = min(begin + CHUNK, data.nbytes)
        if written - flushed >= FLUSH or written == data.nbytes:
            # Flushed pages leave the page cache at once: the store itself already fills the memory.
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, flushed, written - flushed, os.POSIX_FADV_DONTNEED)
            flushed = written
        progress(written)


def _size_of_own(descriptor: int) -> int:
    """Bytes of an open file. Raises StoreInvalid unless it is one that only this user can have written."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise StoreInvalid("it is not a file")
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise StoreInvalid("other users can write it")
    return status.st_size


def _private_folder(folder: Path) -> None:
    """Make this folder and those above it that are missing, or close it to others. Raises OSError."""
    missing = [above for above in (folder, *folder.parents) if not above.is_dir()]
    for above in reversed(missing):
        above.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise OSError(errno.EPERM, "the folder belongs to another user", str(folder))
    if status.st_mode & 0o077:
        folder.chmod(0o700)


def _store_path(folder: Path, fingerprint: str) -> Path:
    return folder / fingerprint / STORE_FILE


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # an older store may still be in it
        folder.rmdir()
