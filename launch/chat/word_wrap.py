"""Word wrap for a text that arrives in pieces, on a terminal that shows each piece at once."""

from __future__ import annotations

import re
from collections.abc import Callable

from rich.cells import get_character_cell_size

TAB = 8
_CODE = re.compile(r"\t|    |```")  # beginnings of lines that are not wrapped
_FENCE = re.compile(r"\s{0,3}```")


class WordWrap:
    """Wraps one text. A word is written at once, and moved to the next line by CHA and EL when it grows too
    long. Code, words longer than a line, and scripts without spaces are left to the terminal, to be copied
    whole."""

    def __init__(self, width: Callable[[], int]) -> None:
        """`width`: returns the terminal's columns; called for each piece."""
        self._width = width
        self._column = 0  # cells written in this line of the screen; `width` where it is full
        self._word = ""  # the current word so far
        self._cells = 0  # of the word
        self._line = ""  # the current line of the text
        self._fenced = False

    def push(self, text: str) -> str:
        """`text` with control sequences that wrap its lines. Its only control characters are newline, tab."""
        width = self._width()
        return "".join(self._put(character, width) for character in text)

    def _put(self, character: str, width: int) -> str:
        if character == "\n":
            self._fenced ^= _FENCE.match(self._line) is not None
            self._line, self._column = "", 0
            self._end_word()
            return "\n"
        self._line += character
        if character == "\t":
            spaces = TAB - self._column % TAB
            return "".join(self._put_space(width) for _ in range(spaces))
        if character == " ":
            return self._put_space(width)
        return self._put_letter(character, width)

    def _put_space(self, width: int) -> str:
        self._end_word()
        if self._column >= width:
            self._column = 0
            return "\n"
        self._column += 1
        return " "

    def _put_letter(self, character: str, width: int) -> str:
        cells = get_character_cell_size(character)
        before = ""
        if self._column + cells > width:
            start = self._column - self._cells  # of the word
            code = self._fenced or _CODE.match(self._line)
            if start > 0 and not code and 0 < self._cells <= width - cells:
                # Behind a full line the cursor's column is undefined, so the move is absolute.
                before = f"\x1b[{start + 1}G\x1b[K\n{self._word}"
                self._column = self._cells
            else:
                self._column = 0  # the terminal wraps by itself
                self._end_word()
        self._column += cells
        if cells == 2:  # East Asian text may be broken between any two characters
            self._end_word()
        else:
            self._word += character
            self._cells += cells
        return before + character

    def _end_word(self) -> None:
        self._word, self._cells = "", 0
