"""A disk cache of a backbone's quantized matrices: `<cache folder>/<fingerprint>/backbone.bin`.

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
import threading
import zlib
from pathlib import Path

import msgspec

from pipeline.checkpoint.model_source import ModelSource
from protocol.errors import NotPrivate
from protocol.files import check_private, make_folders
from shm.atomic_file import put_in_place, warn_unkept
from shm.disk_cache import CacheRecord, note_use
from shm.huge import private
from shm.layout import Bytes
from shm.locks import try_lock

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
        # A complete file exists, or what no file can replace: `finish` writes none.
        self._disabled = self._descriptor is not None or self._path.is_dir()
        self._new: dict[str, Bytes] = {}
        if self._descriptor is not None:
            self._note_use()

    def take(self, name: str, nbytes: int) -> Bytes | None:
        """A matrix of `nbytes` bytes, read into memory; None where it is missing or damaged."""
        entry = self._entries.get(name)
        if entry is None or entry[1] != nbytes or self._descriptor is None:
            return None
        offset, _, checksum = entry
        data = private(nbytes)
        if _read(self._descriptor, offset, data) == checksum:
            return data
        if not self._damaged:
            self._damaged = True
            log.warning(f"{self._path} is damaged: it is made again at the next start")
            _remove(self._path)
        return None

    def keep(self, name: str, data: Bytes) -> None:
        """Have `finish` write this matrix; it must not change afterwards."""
        self._new[name] = data

    def finish(self) -> None:
        """Begin to write the file, in a thread that ends when it is complete."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._new and not self._disabled:
            threading.Thread(target=self._write, name="backbone cache").start()

    def _write(self) -> None:
        unfinished = self._path.with_name(UNFINISHED)
        try:
            make_folders(self._path.parent)
            file = try_lock(unfinished, fcntl.LOCK_EX)
            if file is None:
                raise OSError("another engine is writing it")
            try:
                os.ftruncate(file, 0)
                _write_matrices(file, self._new)
                put_in_place(file, unfinished, self._path)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise
            finally:
                os.close(file)
            self._note_use()
        except OSError as e:
            warn_unkept(log, "the backbone could not be kept on disk, the next start quantizes it again", e)
        self._new.clear()

    def _note_use(self) -> None:
        if self._record is not None:
            note_use(self._path.parent, self._record)


def _write_matrices(file: int, matrices: dict[str, Bytes]) -> None:
    entries, end = {}, 0
    for name, data in matrices.items():
        done = 0
        while done < len(data):
            done += os.pwrite(file, data[done : done + WRITE_BYTES].data, end + done)
        entries[name] = (end, done, zlib.crc32(data.data))
        end += -(-done // ALIGNMENT) * ALIGNMENT
    index = msgspec.msgpack.encode(_Index(VERSION, entries))
    os.pwrite(file, index + len(index).to_bytes(8, "little"), end)


def _read(descriptor: int, offset: int, data: Bytes) -> int | None:
    """Fill `data` from a file and return its crc32; None where it cannot be read or is cut short."""
    value, done = 0, 0
    while done < len(data):
        part = data[done : done + READ_BYTES].data
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
