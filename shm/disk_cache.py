"""Stores on disk: `<cache folder>/<fingerprint>/store.bin`, the bytes of the segment, with checksums.

Files are 0600 in 0700 folders; a file that another user can write is not used. A file is written as
store.tmp, flushed and then renamed, so a store.bin was complete when it was written.
Reading still checks its size, its manifest and every layer's checksum (on other cores while the next layer is
read), because disks corrupt data silently and a store is used for months.

The writer of a store.tmp holds its exclusive lock. An unlocked one was left by a killed loader, also in a
folder that several machines share.

Beside it lies `about.json`, a record of the folder's content and last use: the files need not name the model
that they were made for, and many file systems do not keep access times. Each reader and writer sets its
modification time. An error there never fails a start.

A file is written layer by layer while the store is being filled, by a thread of its own, so that a slow disk
delays only `finish`. Writeback starts after each write, and at most FLUSH bytes of it stay in the page
cache: the store itself may fill nearly all of the memory. The head is written last, so the file of a killed
writer is never a valid store, whatever its name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import mmap
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from protocol.errors import NotPrivate
from protocol.files import OTHERS_READ_OR_WRITE, check_private, make_folders, read_small
from shm.atomic_file import atomic_file, put_in_place
from shm.errors import StoreDamaged, StoreInvalid
from shm.layout import PAGE, Bytes
from shm.locks import try_lock
from shm.segment import byte_size
from shm.store import (
    MAX_MANIFEST,
    READY,
    StoreBuilder,
    StoreManifest,
    data_offset,
    pack_head,
    read_head,
    store_bytes,
)

RECORD = "about.json"
MAX_RECORD = 1 << 16  # bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheRecord:
    """`kind`: store, backbone or calibration; `model`: its path, or its name where it has none; `format`: of
    the numbers, empty where there is none."""

    kind: str
    model: str
    format: str


def note_use(folder: Path, record: CacheRecord) -> None:
    """Record that the files in `folder` are used now; a missing record is written."""
    path = folder / RECORD
    try:
        if read_record(folder) == record:
            os.utime(path)
            return
        with atomic_file(path) as file:
            file.write(json.dumps(asdict(record)).encode())
    except OSError as e:
        log.debug(f"no use was noted in {folder}: {e.strerror}")


def read_record(folder: Path) -> CacheRecord | None:
    """The record of a folder; None where it has none, or a damaged one."""
    try:
        fields = json.loads(read_small(folder / RECORD, MAX_RECORD, flags=os.O_NOFOLLOW))
        return CacheRecord(str(fields["kind"]), str(fields["model"]), str(fields["format"]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def last_use(folder: Path) -> float | None:
    """Seconds since the epoch; None where the folder has no record."""
    try:
        return (folder / RECORD).lstat().st_mtime
    except OSError:
        return None


def remove_empty(folder: Path) -> None:
    """Remove a folder that holds nothing, or nothing but its record."""
    try:
        if os.listdir(folder) == [RECORD]:
            (folder / RECORD).unlink()
        folder.rmdir()
    except OSError as e:
        log.debug(f"{folder} stays: {e.strerror}")


STORE_FILE = "store.bin"
UNFINISHED = "store.tmp"
FINGERPRINT = re.compile(r"[0-9a-f]{64}")
CHUNK = 1 << 24  # bytes of one read
DONTNEED = os.POSIX_FADV_DONTNEED
NO_MEMORY = "there is no memory for it: /dev/shm is full, or memory is"  # the kernel says "Bad address"


class CachedStore:
    """An open store on disk with a checked manifest. A context manager."""

    def __init__(self, descriptor: int, path: Path, manifest: StoreManifest, start: int) -> None:
        """Hold an open file. Use `open`."""
        self._descriptor = descriptor
        self._start = start
        self.path = path
        self.manifest = manifest
        self._direct = False

    @classmethod
    def open(cls, folder: Path, fingerprint: str) -> CachedStore | None:
        """The store of this model, or None if the folder has none. Raises StoreInvalid if its file is
        truncated, unreadable, of another version or another model, or writable by another user."""
        path = store_path(folder, fingerprint)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # it may be a pipe
        except FileNotFoundError:
            return None
        except OSError as e:
            raise StoreInvalid(f"the cached store {path} cannot be used: {e.strerror}") from None
        try:
            status = os.fstat(descriptor)
            check_private(status)
            head = np.frombuffer(os.pread(descriptor, PAGE + MAX_MANIFEST, 0), dtype=np.uint8)
            manifest, start = read_head(head, status.st_size)
            if manifest.fingerprint != fingerprint:
                raise StoreInvalid(f"it belongs to another model ({manifest.source})")
        except (StoreInvalid, NotPrivate, OSError) as e:
            os.close(descriptor)
            reason = e.strerror if isinstance(e, OSError) else e
            raise StoreInvalid(f"the cached store {path} cannot be used: {reason}") from None
        return cls(descriptor, path, manifest, start)

    def hold(self) -> None:
        """Mark the file as being in use, until this object or this process ends."""
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def pass_page_cache(self) -> bool:
        """Read past the page cache from now on, where the file system can do that: `read_pages` then moves
        bytes from the disk to their place. Returns whether it can."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            self._direct = os.preadv(self._descriptor, [mmap.mmap(-1, PAGE)], 0) == PAGE
        except OSError:
            self._direct = False
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
        return self._direct

    def read_pages(self, memory: Bytes, at: int) -> None:
        """Fill whole pages with the experts' bytes from `at` on; for any thread. Nothing of it stays in the
        page cache. Raises StoreDamaged, with the file and the reason."""
        done = 0
        while done < len(memory):
            begin = at + done
            done += self._read(memory[done:].data, begin)
            if self._direct and done % PAGE:
                raise StoreDamaged(f"the cached store {self.path} became shorter while it was read")
            if not self._direct:
                os.posix_fadvise(self._descriptor, self._start + begin, at + done - begin, DONTNEED)

    def fill(self, builder: StoreBuilder, progress: Callable[[int], None]) -> int:
        """Read all experts directly into a new store, and return their bytes; `progress` is called with those
        read so far. Raises StoreDamaged if a checksum does not match."""
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            sums = []
            for layer in range(self.manifest.shape.layers):
                self._read_layer(builder, layer, progress)
                sums.append(pool.submit(zlib.crc32, builder.layer(layer).data))
        for layer, (found, expected) in enumerate(zip(sums, self.manifest.checksums, strict=True)):
            if found.result() != expected:
                raise StoreDamaged(f"the cached store {self.path} is damaged in layer {layer}")
        return builder.layout.total_bytes

    def _read_layer(self, builder: StoreBuilder, layer: int, progress: Callable[[int], None]) -> None:
        target = builder.layer(layer).data
        begin = layer * builder.layout.layer_stride
        done = 0
        while done < len(target):
            done += self._read(target[done : done + CHUNK], begin + done)
            progress(begin + done)

    def _read(self, target: memoryview, begin: int) -> int:
        """Read the experts' bytes from `begin` on into `target`; returns how many were read, at least one."""
        try:
            count = os.preadv(self._descriptor, [target], self._start + begin)
        except OSError as e:
            why = NO_MEMORY if e.errno == errno.EFAULT else e.strerror
            raise StoreDamaged(f"the cached store {self.path} cannot be read: {why}") from None
        if count == 0:
            raise StoreDamaged(f"the cached store {self.path} became shorter while it was read")
        return count

    def __enter__(self) -> CachedStore:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def sweep_cache(folder: Path) -> list[Path]:
    """Remove what killed loaders left in the cache folder: unlocked unfinished files, and empty folders.
    Returns the files. Files that cannot be removed are skipped."""
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
            remove_empty(entry)
    return removed


def store_path(folder: Path, fingerprint: str) -> Path:
    """The path of a store's file, which may not exist."""
    return folder / fingerprint / STORE_FILE


def free_on_disk(path: Path) -> int:
    """Bytes that are free where this file is or would be."""
    folder = next(folder for folder in path.parents if folder.exists())
    return shutil.disk_usage(folder).free


PIECE = 1 << 24  # bytes of one write
FLUSH = 1 << 28  # bytes between two flushes
LOCK_TRIES = 100  # a sweep holds an unfinished file's lock for a moment, longer on a busy machine
REPORT_SECONDS = 0.1


class CacheWriter:
    """The unfinished, locked file of one store. A context manager, which removes an unfinished file."""

    def __init__(self, folder: Path, manifest: StoreManifest) -> None:
        """Create the file. Raises OSError; ENOSPC if the disk has too little free space for the store."""
        self._manifest = manifest
        self._start = data_offset(len(manifest.pack()))
        self._checksums = [0] * manifest.shape.layers
        self._path = store_path(folder, manifest.fingerprint)
        self._temporary = self._path.with_name(UNFINISHED)
        self._size = store_bytes(manifest)
        self._written = self._unflushed = 0
        self._failure: Exception | None = None
        self._descriptor = _open_unfinished(self._temporary)
        try:
            free = free_on_disk(self._path)
            if free < self._size:
                what = f"{byte_size(self._size)} are needed, {byte_size(free)} are free"
                raise OSError(errno.ENOSPC, what, str(self._path.parent))
        except BaseException:
            self._remove()
            raise
        self._thread = ThreadPoolExecutor(1, "cache")

    def write(self, layer: int, data: Bytes) -> None:
        """Queue a layer's bytes, which must not change any more; for any thread. Returns at once: `finish`
        raises the error of a failed write."""
        self._thread.submit(self._write, layer, data)

    def write_through(self, layer: int, data: Bytes) -> None:
        """Write a layer's bytes; they may change when this returns. Raises OSError."""
        self._thread.submit(self._write, layer, data).result()
        if self._failure is not None:
            raise self._failure

    def finish(self, progress: Callable[[int], None]) -> None:
        """Wait until all layers are written, write the head and rename the file; `progress` is called with
        the bytes written so far. Raises OSError if a write failed, and what `progress` raises."""
        end = self._thread.submit(self._end)
        progress(self._written)
        while not wait([end], REPORT_SECONDS).done:
            progress(self._written)
        end.result()
        progress(self._size)
        if self._path.is_dir() and not self._path.is_symlink():
            shutil.rmtree(self._path)
        # Still locked: a sweep must not take it for a killed loader's.
        put_in_place(self._descriptor, self._temporary, self._path)
        self._close()

    def _write(self, layer: int, data: Bytes) -> None:
        if self._failure is not None:
            return
        begin = self._start + layer * len(data)
        try:
            for at in range(0, len(data), PIECE):
                piece = data[at : at + PIECE].data
                self._checksums[layer] = zlib.crc32(piece, self._checksums[layer])
                self._write_piece(begin + at, piece)
        except Exception as e:  # any error: this thread has no caller that could receive it
            self._failure = e
            with contextlib.suppress(OSError):  # free the space now: other programs use the disk, too
                os.ftruncate(self._descriptor, 0)

    def _write_piece(self, begin: int, piece: memoryview | bytes) -> None:
        size = len(piece)
        done = 0
        while done < size:
            done += os.pwrite(self._descriptor, piece[done:], begin + done)
        # Of pages that are not yet on the disk this only begins the writing.
        os.posix_fadvise(self._descriptor, begin, size, os.POSIX_FADV_DONTNEED)
        self._written += size
        self._unflushed += size
        if self._unflushed >= FLUSH:
            self._flush()

    def _flush(self) -> None:
        os.fsync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        self._unflushed = 0

    def _end(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._flush()
        manifest = replace(self._manifest, checksums=tuple(self._checksums))
        self._write_piece(0, pack_head(manifest, READY))

    def _remove(self) -> None:
        self._temporary.unlink(missing_ok=True)
        remove_empty(self._temporary.parent)
        os.close(self._descriptor)
        self._descriptor = -1

    def _close(self) -> None:
        self._thread.shutdown()
        os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor >= 0:
            self._thread.shutdown(cancel_futures=True)
            self._remove()


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


def _private_folder(folder: Path) -> None:
    """Make this folder and those above it that are missing, or close it to others. Raises OSError."""
    make_folders(folder)
    status = folder.stat()
    try:
        check_private(status, forbidden=0, directory=True)
    except NotPrivate as e:
        raise OSError(errno.EPERM, str(e), str(folder)) from None
    if status.st_mode & OTHERS_READ_OR_WRITE:
        folder.chmod(0o700)
