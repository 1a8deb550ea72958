"""Output on stdout: answers, or with --json one object and nothing else."""

from __future__ import annotations

import atexit
import io
import json
import math
import os
import sys
import threading
from collections import deque
from typing import Any

from protocol.program import escaped, visible

# ----------------------------------------------------------------------------------------------------------
# Output that blocks no process: a program that starts an engine may stop reading what it prints.


MOST_QUEUED = 256 << 10  # bytes
PATIENCE = 0.25  # seconds that a line waits to be written, so that streams of one terminal keep their order
LAST_SECONDS = 0.5  # for what is still queued when the process ends


class BackgroundOutput(io.RawIOBase):
    """Writes to a descriptor from a thread of its own. What exceeds a queue is dropped; when the descriptor
    takes bytes again, a line tells how many lines that were. `error`: why nothing is written any more."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.error: OSError | None = None
        self._descriptor = descriptor
        self._queue: deque[bytes] = deque()  # the first is being written
        self._queued = 0  # bytes
        self._dropped = 0  # lines
        self._stalled = False  # a line was not written in time: the next ones do not wait
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: bytes, /) -> int:  # type: ignore[override]  # TextIOWrapper writes bytes alone
        """Take a text as a whole, or drop it. Returns its length."""
        with self._changed:
            if self.error is not None:
                return len(data)
            if self._queued + len(data) > MOST_QUEUED:
                self._dropped += max(1, data.count(b"\n"))
                return len(data)
            self._put(bytes(data))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="output", daemon=True)
                self._thread.start()
            if not self._stalled:
                self._stalled = not self.wait_written(PATIENCE)
        return len(data)

    def wait_written(self, seconds: float) -> bool:
        """Wait until nothing is queued, for so long at most. Returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, seconds)

    def _put(self, data: bytes) -> None:
        self._queue.append(data)
        self._queued += len(data)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                rest = memoryview(self._queue[0])
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError as e:
                self._end(e)
                return
            with self._changed:
                self._queued -= len(self._queue.popleft())
                if not self._queue and self._dropped:
                    lost, self._dropped = self._dropped, 0
                    self._put(f"[tandem] {lost} lines were dropped: nobody read them in time\n".encode())
                self._stalled = self._stalled and bool(self._queue)
                self._changed.notify_all()

    def _end(self, error: OSError) -> None:
        with self._changed:
            self.error = error
            self._queue.clear()
            self._changed.notify_all()


def unblock_stderr() -> None:
    """Let no process of this program wait for the reader of its stderr from now on."""
    if sys.stderr is not sys.__stderr__:
        return  # a test's
    stderr: Any = sys.stderr
    if isinstance(stderr.buffer, BackgroundOutput):
        return
    output: Any = BackgroundOutput(stderr.fileno())
    text: Any = io.TextIOWrapper(output, stderr.encoding, stderr.errors, line_buffering=True)
    sys.stderr = sys.__stderr__ = text  # type: ignore[misc]
    atexit.register(output.wait_written, LAST_SECONDS)


# --- stdout -------------------------------------------------------------------------------------------------

MEASURED = 4  # significant digits of a measured figure: clocks and loads vary by more than the rest


def show(text: str, rendered: bool = False) -> None:
    """Print part of an answer, or other text, without buffering: exact into a pipe or a file, `visible` on a
    terminal. `rendered`: by `tables.render`, which colours, and has made its texts visible."""
    if text:
        exact = rendered or not sys.stdout.isatty()
        print(text if exact else visible(text), end="", flush=True)


def announce(line: str) -> None:
    """Print a line for the program that has started this one, which may never read it. Raises OSError where
    it cannot be written."""
    output = BackgroundOutput(sys.stdout.fileno())
    output.write(f"{line}\n".encode())
    if output.error is not None:
        raise output.error


def print_json(fields: dict[str, Any], *, digits: int = MEASURED) -> None:
    """Print one line of JSON. Numbers that are not whole have `digits` significant digits; NaN and
    infinities, which JSON does not have, become null."""
    print(escaped(json.dumps(plain(fields, digits), ensure_ascii=False, allow_nan=False)), flush=True)


def plain(value: Any, digits: int = MEASURED) -> Any:
    """Returns what `print_json` prints of a value."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case float() if value:
            return round(value, max(0, digits - 1 - math.floor(math.log10(abs(value)))))
        case dict():
            return {str(key): plain(item, digits) for key, item in value.items()}
        case list() | tuple():
            return [plain(item, digits) for item in value]
    return value
