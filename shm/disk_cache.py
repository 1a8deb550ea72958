"""Stores on disk: `<cache folder>/<fingerprint>/store.bin`, the same bytes as the segment.

Files are 0600 in 0700 folders; a file that another user can write is not used. A file is written as
store.tmp, flushed and then renamed (`shm/cache_writer.py`), so a store.bin was complete when it was written.
Reading still checks its size, its manifest and every layer's checksum (on other cores while the next layer is
read), because disks corrupt data silently and a store is used for months.

The writer of a store.tmp holds its exclusive lock. An unlocked one was left by a killed loader, also in a
folder that several machines share.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from protocol.errors import NotPrivate
from protocol.files import check_private
from shm.cache_record import remove_empty
from shm.checksums import damaged_layers, name_layers
from shm.errors import StoreDamaged, StoreInvalid
from shm.file_locks import try_lock
from shm.layout import PAGE
from shm.manifest import MAX_MANIFEST, StoreManifest, read_head
from shm.store import StoreBuilder

STORE_FILE = "store.bin"
UNFINISHED = "store.tmp"
FINGERPRINT = re.compile(r"[0-9a-f]{64}")
CHUNK = 1 << 24  # bytes of one read


class CachedStore:
    """An open store on disk with a checked manifest. A context manager."""

    def __init__(self, descriptor: int, path: Path, manifest: StoreManifest, start: int) -> None:
        """Hold an open file. Use `open`."""
        self._descriptor = descriptor
        self._start = start
        self._path = path
        self.manifest = manifest

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

    def fill(self, builder: StoreBuilder, progress: Callable[[int], None]) -> None:
        """Read all experts directly into a new store; `progress` is called with the bytes read so far. Raises
        StoreDamaged if a checksum does not match."""
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            sums: list[Future[None]] = []
            for layer in range(self.manifest.shape.layers):
                self._read_layer(builder, layer, progress)
                for expert in range(self.manifest.shape.experts):
                    sums += [pool.submit(part) for part in builder.checksum_tasks(layer, expert)]
            for part in sums:
                part.result()
        for layer, expected in enumerate(self.manifest.checksums):
            if builder.checksum(layer) != expected:
                raise StoreDamaged(f"the cached store {self._path} is damaged in layer {layer}")

    def verify(self, progress: Callable[[int], None]) -> None:
        """Compare every layer with its checksum, on all cores; `progress` is called with the bytes compared
        so far. Raises StoreDamaged naming the layers that differ."""
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
            raise StoreDamaged(f"the cached store {self._path} cannot be read: {e.strerror}") from None
        if count == 0:
            raise StoreDamaged(f"the cached store {self._path} became shorter while it was read")
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
