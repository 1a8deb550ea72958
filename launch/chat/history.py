"""The typed lines of earlier sessions, in $XDG_STATE_HOME/tandem/history: one JSON string a line, oldest
first.

prompt_toolkit's FileHistory creates its file with the umask's permissions, follows links, grows without
limit, and raises when the file cannot be used or a line holds half a surrogate pair.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from prompt_toolkit.history import History

from protocol.user_folders import user_folder

MAX_LINES = 2000  # a file of more than twice as many is cut to these when it is loaded
MAX_BYTES = 8 << 20  # read from the end of the file


def history_file() -> Path:
    return user_folder("STATE") / "history"


class PrivateFileHistory(History):
    """Lines in memory and in a file with mode 0600; in memory alone after a `warn` that it is unusable."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        super().__init__()
        self._path = path
        self._warn = warn
        self._usable = True

    def load_history_strings(self) -> Iterable[str]:
        """The lines of the file, newest first; damaged ones are left out."""
        lines: list[str] = []
        try:
            self._path.parent.parent.mkdir(parents=True, exist_ok=True)
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            with os.fdopen(self._open(os.O_RDWR), "r+b") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - MAX_BYTES))
                content = file.read().decode("utf-8", "replace").splitlines()
                if len(content) > 2 * MAX_LINES:
                    content = content[-MAX_LINES:]
                    file.seek(0)
                    file.write("".join(line + "\n" for line in content).encode())
                    file.truncate()
            lines = [text for line in content if (text := _text(line)) is not None]
        except OSError as e:
            self._disable(e)
        return reversed(lines)

    def store_string(self, string: str) -> None:
        if not self._usable:
            return
        try:
            with os.fdopen(self._open(os.O_WRONLY | os.O_APPEND), "ab") as file:
                file.write(json.dumps(string).encode() + b"\n")
        except OSError as e:
            self._disable(e)

    def _open(self, flags: int) -> int:
        fd = os.open(self._path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.fchmod(fd, 0o600)
        except OSError:
            os.close(fd)
            raise
        return fd

    def _disable(self, error: OSError) -> None:
        if self._usable:
            self._usable = False
            self._warn(f"the history is not saved: {self._path}: {error.strerror}")


def _text(line: str) -> str | None:
    """The text of a line of the file, or None where it is damaged."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
