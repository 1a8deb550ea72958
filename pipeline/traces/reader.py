"""Reads traces: every length is checked against the file's size before it is read."""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import TraceError
from pipeline.traces.header import MAGIC, MAX_JSON, PREFIX, VERSION, Header
from pipeline.traces.steps import FRAME, MAX_BODY, StepReader, TracedStep


class Trace:
    """A file of `--record`. After a kill of its writer, the steps end with the last complete one."""

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises TraceError, one line with the path, like every method of this class."""
        self.path = path
        self.cut_short = False  # known once the steps have been read
        with self._open() as file:
            self.header, self._start = _read_header(file, path)

    def steps(self) -> Iterator[TracedStep]:
        """All complete steps, in order."""
        with self._open() as file:
            for body, number, _ in _bodies(file, self.path, self._start):
                try:
                    step = StepReader(self.header).read(body, number)
                except TraceError as e:
                    raise TraceError(f"{self.path}: step {number} is damaged: {e}") from None
                yield step
            self.cut_short = file.tell() != os.fstat(file.fileno()).st_size

    def end(self) -> tuple[int, int]:
        """The number of complete steps, and the offset behind the last one."""
        steps, offset = 0, self._start
        with self._open() as file:
            for _, number, end in _bodies(file, self.path, self._start):
                steps, offset = number + 1, end
        return steps, offset

    def _open(self) -> BinaryIO:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            file = os.fdopen(fd, "rb")
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                file.close()
                raise TraceError(f"{self.path} is not a file")
            return file
        except (OSError, ValueError) as e:  # ValueError: a name with a NUL
            reason = e.strerror if isinstance(e, OSError) else str(e)
            raise TraceError(f"cannot read the trace {self.path}: {reason}") from None


def _read_header(file: BinaryIO, path: Path) -> tuple[Header, int]:
    prefix = file.read(PREFIX.size)
    if len(prefix) < PREFIX.size or not prefix.startswith(MAGIC):
        raise TraceError(f"{path} is not a trace; --record makes one")
    _, version, length = PREFIX.unpack(prefix)
    if version != VERSION:
        raise TraceError(f"{path} is a trace of version {version}, this program reads version {VERSION}")
    if length > MAX_JSON or len(text := file.read(length)) < length:
        raise TraceError(f"{path}: its header is incomplete")
    try:
        return Header.decode(text), PREFIX.size + length
    except TraceError as e:
        raise TraceError(f"{path}: {e}") from None


def _bodies(file: BinaryIO, path: Path, start: int) -> Iterator[tuple[bytes, int, int]]:
    """Yields each complete step's body, number, and the offset behind it; the file's position is then behind
    the last."""
    size = os.fstat(file.fileno()).st_size
    at, number = start, 0
    file.seek(at)
    while at + FRAME.size <= size:
        length, checksum = FRAME.unpack(file.read(FRAME.size))
        if length > MAX_BODY:
            raise TraceError(f"{path}: step {number} is damaged: it would have {length} bytes")
        if at + FRAME.size + length > size:
            break
        body = file.read(length)
        if zlib.crc32(body) != checksum:
            raise TraceError(f"{path}: step {number} is damaged: its checksum is wrong")
        at += FRAME.size + length
        yield body, number, at
        number += 1
    file.seek(at)
