"""Stores on disk: `<cache folder>/<fingerprint>/store.bin`, the same bytes as the segment.

Files are 0600 in 0700 folders. A file is written under another name, flushed and then renamed, so what has
the right name was once whole; reading still checks its size, its manifest and every layer's checksum (on
other cores while the next layer is read), because disks fail quietly and a store is used for months.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from shm.errors import StoreDamaged, StoreInvalid
from shm.layout import PAGE
from shm.manifest import MAX_MANIFEST, StoreManifest, read_head
from shm.segment import gigabytes
from shm.store import Store, StoreBuilder

STORE_FILE = "store.bin"
CHUNK = 1 << 24  # bytes of one read or write
FLUSH = 1 << 28  # bytes between two flushes of a file being written


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
        cut short, unreadable, of another version or another model's."""
        path = _store_path(folder, fingerprint)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as e:
            raise StoreInvalid(f"the cached store {path} cannot be used: {e.strerror}") from None
        try:
            size = os.fstat(descriptor).st_size
            head = np.frombuffer(os.pread(descriptor, PAGE + MAX_MANIFEST, 0), dtype=np.uint8)
            manifest, start = read_head(head, size)
            if manifest.fingerprint != fingerprint:
                raise StoreInvalid(f"it belongs to another model ({manifest.source})")
        except (StoreInvalid, OSError) as e:
            os.close(descriptor)
            raise StoreInvalid(f"the cached store {path} cannot be used: {e}") from None
        return cls(descriptor, path, manifest, start)

    def fill(self, builder: StoreBuilder, progress: Callable[[int], None]) -> None:
        """Read all experts straight into a new store; `progress` is given the bytes read so far. Raises
        StoreDamaged where the bytes are not those that were written."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            sums: list[Future[int]] = []
            for layer in range(self.manifest.shape.layers):
                self._read_layer(builder, layer, progress)
                sums.append(pool.submit(builder.checksum, layer))
            for layer, (future, expected) in enumerate(zip(sums, self.manifest.checksums, strict=True)):
                if future.result() != expected:
                    raise StoreDamaged(f"the cached store {self._path} is damaged in layer {layer}")

    def _read_layer(self, builder: StoreBuilder, layer: int, progress: Callable[[int], None]) -> None:
        target = builder.layer(layer).data
        begin = builder.layout.offset(layer, 0)
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._descriptor, [target[done : done + CHUNK]], self._start + begin + done)
            except OSError as e:
                raise StoreDamaged(f"the cached store {self._path} cannot be read: {e.strerror}") from None
            if count == 0:
                raise StoreDamaged(f"the cached store {self._path} became shorter while it was read")
            done += count
            progress(begin + done)

    def __enter__(self) -> CachedStore:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def write_cache(folder: Path, store: Store, progress: Callable[[int], None]) -> None:
    """Keep a finished store on disk; `progress` is given the bytes written so far. Raises OSError, and leaves
    nothing behind, where that fails; ENOSPC before anything is written where the disk has too little room.
    """
    path = _store_path(folder, store.fingerprint)
    for parent in (folder, path.parent):
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    data = store.segment.array
    free = shutil.disk_usage(path.parent).free
    if free < data.nbytes:
        _remove_empty(path.parent)
        what = f"{gigabytes(data.nbytes)} are needed, {gigabytes(free)} are free"
        raise OSError(errno.ENOSPC, what, str(path.parent))
    temporary = path.with_suffix(".tmp")  # one name: only the holder of the build lock writes it
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.closing(os.fdopen(descriptor, "wb", buffering=0)) as file:
            flushed = 0
            for begin in range(0, data.nbytes, CHUNK):
                part = data[begin : begin + CHUNK].data
                while part:
                    part = part[file.write(part) :]
                written = min(begin + CHUNK, data.nbytes)
                if written - flushed >= FLUSH or written == data.nbytes:
                    # Flushed pages leave the page cache at once: the store itself already fills the memory.
                    os.fsync(descriptor)
                    os.posix_fadvise(descriptor, flushed, written - flushed, os.POSIX_FADV_DONTNEED)
                    flushed = written
                progress(written)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        _remove_empty(path.parent)
        raise


def _store_path(folder: Path, fingerprint: str) -> Path:
    return folder / fingerprint / STORE_FILE


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # an older store may still be in it
        folder.rmdir()
