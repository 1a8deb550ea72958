"""Reads traces: every length is checked against the file's size before it is read."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import TraceError
from pipeline.traces.header import MAGIC, MAX_JSON, PREFIX, VERSION, Header
from pipeline.traces.steps import FRAME, MAX_BODY, TracedStep, decode_step
from protocol.files import open_regular


class Trace:
    """A file of `--record`. After a kill of its writer, the steps end with the last complete one."""

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises TraceError, one line with the path, like every method of this class."""
        self.path = path
        self.end = 0  # the offset behind the last complete step; known once the steps have been read
        self.cut_short = False  # whether the file goes on there
        with self._open() as file:
            self.header, self._start = _read_header(file, path)

    def steps(self) -> Iterator[TracedStep]:
        """All complete steps, in order."""
        with self._open() as file:
            size = os.fstat(file.fileno()).st_size
            self.end = file.seek(self._start)
            for number in itertools.count():
                try:
                    body = _next_body(file, size)
                    step = None if body is None else decode_step(self.header, body, number)
                except TraceError as e:
                    raise TraceError(f"{self.path}: step {number} is damaged: {e}") from None
                if step is None:
                    break
                self.end = file.tell()
                yield step
            self.cut_short = self.end != size

    def _open(self) -> BinaryIO:
        try:
            return os.fdopen(open_regular(self.path), "rb")
        except OSError as e:
            raise TraceError(f"cannot read the trace {self.path}: {e.strerror}") from None


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


def _next_body(file: BinaryIO, size: int) -> bytes | None:
    """The body of the next step; None where the rest of the file's `size` bytes has no complete one."""
    if file.tell() + FRAME.size > size:
        return None
    length, checksum = FRAME.unpack(file.read(FRAME.size))
    if length > MAX_BODY:
        raise TraceError(f"it would have {length} bytes")
    if file.tell() + length > size:
        return None
    body = file.read(length)
    if zlib.crc32(body) != checksum:
        raise TraceError("its checksum is wrong")
    return body
