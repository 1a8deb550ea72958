"""How messages write this installation's commands (`pip install` copies no launch.py); its user's
folders; and text of others on its way to a terminal or a log: answers of models, names in files.

A terminal obeys some characters: escape sequences move its cursor, set its title, write the clipboard or make
links; C1 controls begin such sequences with one character; carriage returns overwrite a line; bidirectional
overrides show text in another order than it has. What is printed for people passes `visible` last, at the
exit; answers in pipes, and JSON, are exact.
"""

from __future__ import annotations

import io
import logging
import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

_CHECKOUT = (Path(__file__).resolve().parents[1] / "launch.py").is_file()
PROGRAM = "launch.py" if _CHECKOUT else "tandem"  # where a command is only named
COMMAND = "python launch.py" if _CHECKOUT else "tandem"  # where it is to be typed
REPAIR = "in Tandem's folder run: make -B run" if _CHECKOUT else "install Tandem again with pip"

DEFAULTS = {"CACHE": ".cache", "STATE": ".local/state"}

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# C0 but tab and newline; DEL and C1; line and paragraph separators; bidirectional embeddings, overrides and
# isolates; halves of surrogate pairs, which names of files that are no UTF-8 hold and no encoding takes.
_RANGES = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_CONTROL = re.compile(f"[{_RANGES}]")
_BREAKING = re.compile(rf"[\t\n{_RANGES}]")


def user_folder(kind: Literal["CACHE", "STATE"]) -> Path:
    """$XDG_<kind>_HOME/tandem, usually a folder of that name in ~/.cache or ~/.local/state; it may be
    missing. By the XDG rules, a variable that is not an absolute path counts as not set."""
    given = os.environ.get(f"XDG_{kind}_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / DEFAULTS[kind]) / "tandem"


def installed(package: str) -> str:
    """The version of an installed package; a checkout that was not installed has none of its own."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def visible(text: str) -> str:
    """The text with U+FFFD for every character that controls a terminal, but newline and tab."""
    return _CONTROL.sub(REPLACEMENT, text)


def one_line(text: str) -> str:
    """Does what `visible` does, of newline and tab too: a name, or a line of a log."""
    return _BREAKING.sub(REPLACEMENT, text)


def escaped(json_text: str) -> str:
    """Returns JSON with such characters, which only its strings hold, as escapes."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", json_text)


class LineFormatter(logging.Formatter):
    """A message is one line, whatever it quotes; below it is at most the traceback of an exception."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class VisibleStream(io.TextIOWrapper):
    """A standard stream of a process in which libraries print too: warnings, log lines, tracebacks."""

    def write(self, text: str) -> int:
        super().write(visible(text))
        return len(text)
