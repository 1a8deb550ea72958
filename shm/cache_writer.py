"""Writes a store's cache file, from memory that is complete or still being filled.

A separate thread writes, so a slow disk delays only `finish`. Writeback starts after each write, and at most
FLUSH bytes of it stay in the page cache: the store itself may fill nearly all of the memory. The head is
written last, so the file of a killed writer is never a valid store, whatever its name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from protocol.errors import NotPrivate
from protocol.files import OTHERS_READ_OR_WRITE, check_private, make_folders
from shm.atomic_file import put_in_place
from shm.cache_record import remove_empty
from shm.disk_cache import UNFINISHED, store_path
from shm.file_locks import try_lock
from shm.layout import Bytes
from shm.manifest import READY, StoreManifest, data_offset, pack_head, store_bytes
from shm.segment import byte_size
from shm.store import Store

PIECE = 1 << 24  # bytes of one write
FLUSH = 1 << 28  # bytes between two flushes
LOCK_TRIES = 10  # a sweep holds an unfinished file's lock for a moment
REPORT_SECONDS = 0.1


class CacheWriter:
    """The unfinished, locked file of one store. A context manager, which removes an unfinished file."""

    def __init__(self, folder: Path, manifest: StoreManifest) -> None:
        """Create the file. Raises OSError; ENOSPC if the disk has too little free space for the store."""
        self._path = store_path(folder, manifest.fingerprint)
        self._temporary = self._path.with_name(UNFINISHED)
        self._size = store_bytes(manifest)
        self._written = self._unflushed = 0
        self._failure: Exception | None = None
        self._descriptor = _open_unfinished(self._temporary)
        try:
            free = shutil.disk_usage(self._path.parent).free
            if free < self._size:
                what = f"{byte_size(self._size)} are needed, {byte_size(free)} are free"
                raise OSError(errno.ENOSPC, what, str(self._path.parent))
        except BaseException:
            self._remove()
            raise
        self._thread = ThreadPoolExecutor(1, "cache")

    def write(self, begin: int, data: Bytes) -> None:
        """Queue these bytes, which must not change any more, for writing at byte `begin` of the store; for
        any thread. Returns at once: `finish` raises the error of a failed write."""
        self._thread.submit(self._write, begin, data)

    def finish(self, manifest: StoreManifest, progress: Callable[[int], None]) -> None:
        """Wait until everything is written, write the head and rename the file; `progress` is called with the
        bytes written so far. Raises OSError if a write failed, and what `progress` raises."""
        end = self._thread.submit(self._end, manifest)
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

    def _write(self, begin: int, data: Bytes) -> None:
        if self._failure is not None:
            return
        try:
            for at in range(0, len(data), PIECE):
                self._write_piece(begin + at, data[at : at + PIECE].data)
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

    def _end(self, manifest: StoreManifest) -> None:
        if self._failure is not None:
            raise self._failure
        self._flush()
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


def write_cache(folder: Path, store: Store, progress: Callable[[int], None]) -> None:
    """Write a finished store to disk; `progress` is called with the bytes written so far. Raises OSError and
    removes the file if that fails; ENOSPC before the first write if the disk has too little free space.
    """
    data = store.segment.array
    with CacheWriter(folder, store.manifest) as writer:
        begin = data_offset(len(store.manifest.pack()))
        writer.write(begin, data[begin:])
        writer.finish(store.manifest, progress)


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
