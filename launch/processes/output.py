"""What an engine's child processes print, as the supervisor reads it."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import time
from collections import deque
from contextlib import suppress

from launch.terminal.log import pass_on
from protocol.program import visible
from shm.segment import byte_size

CHUNK = 65536  # bytes that are read at once, and of the longest line
LAST_LINES = 20  # that are kept
MOST_QUOTED = 100  # characters
# What Python, torch, NumPy, the C++ library, ZeroMQ and the loader of shared libraries say.
NO_MEMORY = re.compile(
    r"bad_alloc|MemoryError|(can(no|')t|unable to|failed to|could not) allocate"
    r"|allocation of \d+ bytes failed|out of memory|failed to map segment|Resource temporarily unavailable"
    r"|can't start new thread",
    re.IGNORECASE,
)
RECENT = 5.0  # seconds before an exit, of lines that may tell its reason


class ChildOutput:
    """The reading end of a child's stdout and stderr. Lines are passed on to the supervisor's stderr. A pipe,
    and not that stderr itself, lets a child that prints never wait for whoever reads it; the child's end of
    this pipe is non-blocking."""

    def __init__(self, reader: int) -> None:
        self._last: deque[tuple[float, str]] = deque(maxlen=LAST_LINES)  # with their times
        self._reader = reader
        self._begun = b""  # of a line
        os.set_blocking(reader, False)
        asyncio.get_running_loop().add_reader(reader, self._read)

    def _read(self) -> bool:
        """Returns whether there may be more."""
        data = b""
        with suppress(BlockingIOError):
            data = os.read(self._reader, CHUNK)
            if not data:
                asyncio.get_running_loop().remove_reader(self._reader)
        *lines, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) >= CHUNK:
            lines, self._begun = [*lines, self._begun], b""
        for line in lines:
            self._take(line)
        return data != b""

    def _take(self, line: bytes) -> None:
        text = visible(line.decode("utf-8", "replace"))
        self._last.append((time.monotonic(), text))
        pass_on(text)

    def close(self) -> None:
        """Read what an exited child has left, and close."""
        if self._reader < 0:
            return
        while self._read():
            pass
        if self._begun:
            self._take(self._begun)
        asyncio.get_running_loop().remove_reader(self._reader)
        os.close(self._reader)
        self._reader = -1

    def memory_reason(self) -> str:
        """Returns what tells that an exit was for want of memory, to follow its description; "" without a
        sign of it."""
        since = time.monotonic() - RECENT
        said = next((line for at, line in reversed(self._last) if at > since and NO_MEMORY.search(line)), "")
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        limited = ""
        if limit != resource.RLIM_INFINITY:
            limited = f"ulimit -v allows each process {byte_size(limit)}; raise it"
        if said:
            words = f": the system refused it memory or a thread (it said {said.strip()[:MOST_QUOTED]!r})"
            return words + (limited and f"; {limited}")
        return limited and f"; perhaps for want of memory: {limited}"
