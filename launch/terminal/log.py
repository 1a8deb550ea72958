"""Log lines on stderr, and the level between info and warning: what a command always says, such as that its
engine is ready. `--log-level info` shows more."""

from __future__ import annotations

import logging
import sys

from protocol.program import PROGRAM, LineFormatter, one_line

NOTICE = 25
CLEAR = "\r\x1b[2K"  # the line that a bar is drawn in

logging.addLevelName(NOTICE, "NOTICE")
_log = logging.getLogger("tandem")


def notice(text: str) -> None:
    """Log a line that is shown by default."""
    _log.log(NOTICE, text, stacklevel=2)


def complain(error: object) -> None:
    """Print an error as one line on stderr."""
    print(f"{PROGRAM}: {one_line(str(error))}", file=sys.stderr)


def pass_on(line: str) -> None:
    """Print a line of a child process, which has made it visible, on stderr; a bar is drawn again below."""
    print(CLEAR + line if LogHandler.bar_drawn else line, file=sys.stderr)


class LogHandler(logging.StreamHandler):  # type: ignore[type-arg]  # it is no generic class at run time
    """Writes to stderr; a bar that is drawn there is cleared first, and is drawn again below."""

    bar_drawn = False  # of the only bar at a time; set by ProgressDisplay

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(LineFormatter("[%(name)s] %(message)s"))

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return CLEAR + text if LogHandler.bar_drawn else text


def start_logging(level: str) -> None:
    """Log to stderr from `level` on: NOTICE or one of logging's own."""
    logging.basicConfig(level=level, handlers=[LogHandler()])


def child_level(level: str) -> str:
    """Returns the level of an engine's child processes, which do not know NOTICE."""
    return "WARNING" if level == "NOTICE" else level
