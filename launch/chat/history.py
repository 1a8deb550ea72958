"""The lines that were typed, kept from one start to the next for the arrow keys and Ctrl-R.

$XDG_STATE_HOME/tandem/history, or ~/.local/state/tandem/history: one JSON text a line, oldest first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from prompt_toolkit.history import History

KEPT = 2000  # lines; a file of twice as many is shortened at a start
LARGEST = 8 << 20  # bytes that are read from the end of the file


def history_file() -> Path:
    """Where the history is, by the XDG rules: what is not absolute counts as not set."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return base / "tandem" / "history"


class KeptHistory(History):
    """Lines in memory and in the file. Where the file cannot be used, `complain` is called once with a line
    for a person, and the lines are kept in memory alone."""

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        super().__init__()
        self._path = path
        self._complain = complain
        self._usable = True

    def load_history_strings(self) -> Iterable[str]:
        """Newest first."""
        lines: list[str] = []
        try:
            self._path.parent.parent.mkdir(parents=True, exist_ok=True)
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            with os.fdopen(self._open(os.O_RDWR), "r+b") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - LARGEST))
                content = file.read().decode("utf-8", "replace").splitlines()
                if len(content) > 2 * KEPT:
                    content = content[-KEPT:]
                    file.seek(0)
                    file.write("".join(line + "\n" for line in content).encode())
                    file.truncate()
            lines = [text for line in content if (text := _text(line)) is not None]
        except OSError as e:
            self._give_up(e)
        return reversed(lines)

    def store_string(self, string: str) -> None:
        if not self._usable:
            return
        try:
            with os.fdopen(self._open(os.O_WRONLY | os.O_APPEND), "ab") as file:
                file.write(json.dumps(string).encode() + b"\n")
        except OSError as e:
            self._give_up(e)

    def _open(self, flags: int) -> int:
        fd = os.open(self._path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.fchmod(fd, 0o600)
        except OSError:
            os.close(fd)
            raise
        return fd

    def _give_up(self, error: OSError) -> None:
        if self._usable:
            self._usable = False
            self._complain(f"the history is not kept: {self._path}: {error.strerror}")


def _text(line: str) -> str | None:
    """The text of a line of the file, or None where it is damaged."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
