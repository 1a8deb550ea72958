"""A disk cache of a backbone's quantized matrices and rotary frequencies:
`<cache folder>/<fingerprint>/backbone.bin`.

Layout: the matrices one after the other, each at a multiple of ALIGNMENT; an index (msgpack: name -> offset,
bytes, crc32); the index's length (8 bytes, little endian). The file is written under another name, renamed
when complete, and never changed afterwards. `take` checks every matrix against its checksum. A missing or
damaged matrix is quantized again; errors of this cache never fail a start.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from pipeline.checkpoint.model_source import ModelSource
from protocol.errors import NotPrivate
from protocol.private_files import check_private, make_folders
from shm.atomic_file import put_in_place
from shm.disk_cache import CacheRecord, note_use
from shm.file_locks import try_lock
from shm.huge import map_file
from shm.layout import Bytes

NAME, UNFINISHED = "backbone.bin", "backbone.tmp"
VERSION = 3
MAX_INDEX = 1 << 22
ALIGNMENT = 64  # a cache line
READ_BYTES = 1 << 20  # at a time, so that the checksum reads it from the processor's cache
WRITE_BYTES = 1 << 26

log = logging.getLogger(__name__)

Entries = dict[str, tuple[int, int, int]]


class _Index(msgspec.Struct):
    version: int
    matrices: Entries


def backbone_fingerprint(source: ModelSource, dtype: str) -> str:
    """The name of the folder of a model's matrices in this format."""
    return source.fingerprint(f"backbone {dtype}", 0)


class BackboneCache:
    """One model's matrices in one format. Any thread may call `take` and `keep`."""

    def __init__(self, folder: Path, fingerprint: str, record: CacheRecord | None = None) -> None:
        """`fingerprint`: 64 hex digits that change whenever the matrices' bytes would."""
        self._path = folder / fingerprint / NAME
        self._record = record
        self._descriptor, self._entries = _open(self._path)
        self._damaged = False  # a matrix is, and the log says so
        if self._descriptor is not None:
            self._note_use()
        self._new: Entries = {}
        self._end = 0  # file offset of the next matrix
        self._file: int | None = None
        # A complete file exists, or what no file can replace: `keep` writes none.
        self._disabled = self._descriptor is not None or self._path.is_dir()
        self._writer = ThreadPoolExecutor(1, "backbone cache")

    def take(self, name: str, nbytes: int) -> Bytes | None:
        """A matrix of `nbytes` bytes as a private mapping of the file; None where it is missing, damaged or
        cannot be mapped."""
        found = self._entries.get(name)
        if found is None or found[1] != nbytes or self._descriptor is None:
            return None
        offset, _, checksum = found
        # Read before it is mapped: a disk error is an exception here, and SIGBUS in a mapping.
        if _checksum(self._descriptor, offset, nbytes) != checksum:
            if not self._damaged:
                self._damaged = True
                log.warning(f"{self._path} is damaged: it is made again at the next start")
                _remove(self._path)
            return None
        try:
            return map_file(self._descriptor, offset, nbytes)
        except (OSError, ValueError) as e:  # for example, too little memory for a writable mapping
            log.warning(f"{self._path} is not used: {e}")
            return None

    def keep(self, name: str, data: Bytes) -> None:
        """Queue a matrix for writing; it must not change afterwards."""
        if not self._disabled:
            self._writer.submit(self._write, name, data)

    def finish(self) -> None:
        """Queue the rename of the complete file, after which the writer thread ends."""
        self._writer.submit(self._close)
        self._writer.shutdown(wait=False)

    def _write(self, name: str, data: Bytes) -> None:
        if self._disabled:
            return
        try:
            if self._file is None:
                self._file = self._begin()
            done = 0
            while done < len(data):
                done += os.pwrite(self._file, data[done : done + WRITE_BYTES].data, self._end + done)
            self._new[name] = (self._end, len(data), zlib.crc32(data.data))
            self._end += -(-done // ALIGNMENT) * ALIGNMENT
        except OSError as e:
            self._disabled = True
            log.warning(f"the backbone could not be kept on disk, the next start quantizes it again: {e}")

    def _begin(self) -> int:
        """Create and lock the unfinished file. Raises OSError."""
        make_folders(self._path.parent)
        descriptor = try_lock(self._path.with_name(UNFINISHED), fcntl.LOCK_EX)
        if descriptor is None:
            raise OSError("another engine is writing it")
        try:
            os.ftruncate(descriptor, 0)
        except OSError:  # a pipe
            os.close(descriptor)
            raise
        return descriptor

    def _note_use(self) -> None:
        if self._record is not None:
            note_use(self._path.parent, self._record)

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        if self._file is None:
            return
        unfinished = self._path.with_name(UNFINISHED)
        try:
            if not self._disabled:
                index = msgspec.msgpack.encode({"version": VERSION, "matrices": self._new})
                os.pwrite(self._file, index + len(index).to_bytes(8, "little"), self._end)
                put_in_place(self._file, unfinished, self._path)
                self._note_use()
        except OSError as e:
            self._disabled = True
            log.warning(f"the backbone could not be kept on disk, the next start quantizes it again: {e}")
        if self._disabled:
            unfinished.unlink(missing_ok=True)
        os.close(self._file)


def _checksum(descriptor: int, offset: int, nbytes: int) -> int | None:
    """The crc32 of a part of a file; None where it cannot be read or is cut short."""
    buffer, value, done = bytearray(READ_BYTES), 0, 0
    while done < nbytes:
        part = memoryview(buffer)[: nbytes - done]
        try:
            count = os.preadv(descriptor, [part], offset + done)
        except OSError:
            return None
        if count == 0:
            return None
        value, done = zlib.crc32(part[:count], value), done + count
    return value


def _open(path: Path) -> tuple[int | None, Entries]:
    """A complete file that only this user can write, and its index. An invalid file is removed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None, {}
    try:
        status = os.fstat(descriptor)
        check_private(status)
        length = int.from_bytes(os.pread(descriptor, 8, status.st_size - 8), "little")
        if not 0 < length <= min(MAX_INDEX, status.st_size - 8):
            raise ValueError("it has no index")
        end = status.st_size - 8 - length
        return descriptor, _entries(os.pread(descriptor, length, end), end)
    except (OSError, NotPrivate, ValueError) as e:
        log.warning(f"{path} is not used: {e}")
        os.close(descriptor)
        _remove(path)
        return None, {}


def _entries(packed: bytes, end: int) -> Entries:
    """The matrices of an index that begins at byte `end`. Raises ValueError where it is damaged or of another
    version."""
    try:
        index = msgspec.msgpack.decode(packed, type=_Index)
    except (msgspec.DecodeError, ValueError, RecursionError) as e:
        raise ValueError(f"its index is damaged: {str(e)[:80]!r}") from None
    if index.version != VERSION:
        raise ValueError("it is of another version")
    for name, (offset, nbytes, _) in index.matrices.items():
        if not 0 <= offset <= end - nbytes <= end or offset % ALIGNMENT:
            raise ValueError(f"its index is damaged at {name[:80]!r}")
    return index.matrices


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # a directory, or a folder that cannot be written
        path.unlink()
