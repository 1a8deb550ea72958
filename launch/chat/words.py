"""Keeps words whole at the right edge of a terminal while an answer arrives in pieces: a word that turns out
too long for its line is erased there, and written again on the next one."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.cells import cell_len

FENCE = "```"
ERASE = "\x1b[K"  # to the line's end


class WordWrap:
    """The place in the lines of one answer. Lines of code are left to the terminal, which copies a line that
    it has broken as one."""

    def __init__(self) -> None:
        self._column = 0
        self._word = ""  # the last one of the line, which may go on
        self._line = ""  # its first characters
        self._code = False

    def feed(self, text: str, width: int) -> Iterator[tuple[str, str]]:
        """Yields what to write of a text without control characters: codes for the terminal, and then text.
        `width`: its columns."""
        for part in re.findall(r"\n|[^\S\n]+|\S+", text):
            if part == "\n":
                self._code ^= self._line == FENCE
                self._column, self._word, self._line = 0, "", ""
                yield "", part
                continue
            self._line = (self._line + part)[: len(FENCE)]
            word = "" if part.isspace() else self._word + part
            cells = cell_len(part)
            begins = self._column - cell_len(self._word)
            if word and begins > 0 and self._column + cells >= width > cell_len(word) and not self._code:
                yield "\b" * cell_len(self._word) + ERASE + "\n", word
                self._column = cell_len(word)
            else:
                yield "", part
                self._column = (self._column + cells) % width
            self._word = word
