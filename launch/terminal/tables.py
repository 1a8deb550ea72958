"""The one printer of reports: tables and lines, in a terminal's colours and width, else plain in 80 columns.

    table = Table[Run](
        [
            Column("policy", lambda run: run.name, text=True),
            Column("decode\\ntok/s", lambda run: run.speeds, spreads, style="bold"),
            Column("hits", lambda run: run.hits, each(percent), note="hits: share of the resident experts"),
            Column("late", lambda run: run.late_bytes or None, each(byte_size), optional=True),
        ],
        runs,
    )
    print_parts(table, "", *dim(table.notes))

A column formats all of its values together, so that they can agree on their decimals (`alike`, `spreads`);
`each` makes such a format of a function of one value. None is shown as "-"; an `optional` column is left out
where every row has None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, TypeVar

from rich import box, table
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from launch.terminal.format import MISSING, alike
from launch.terminal.output import show
from pipeline.policies.view import PolicyRequest
from protocol.program import visible

PLAIN_WIDTH = 80
UNBROKEN = 10_000  # columns, where the reader of a pipe looks for whole lines
COMMAND = "> "
TYPED = (COMMAND, "--")  # before commands and options, whose lines are wrapped on terminals only
MAX_WIDTH = 110  # longer lines of text are hard to read
LEAST_TEXT = 24  # columns for a text that wraps

Row = TypeVar("Row")
Cell = str | Text
Format = Callable[[Sequence[Any]], Sequence[Cell]]


def each(shown: Callable[[Any], Cell]) -> Format:
    """Returns the format that shows every value by itself."""
    return lambda values: [shown(value) for value in values]


def as_they_are(values: Sequence[Any]) -> list[Cell]:
    """Shows texts and whole numbers."""
    return [value if isinstance(value, Text) else str(value) for value in values]


def spreads(every: Sequence[Sequence[float]]) -> list[Text]:
    """Shows the median of each cell's values and, of several, the range below it."""
    words = iter(alike([figure(values) for values in every for figure in (median, min, max)]))
    cells = []
    for values, middle, least, most in zip(every, words, words, words, strict=True):
        between = " to " if least.startswith("-") else "-"
        below = f"\n{least}{between}{most}" if len(values) > 1 else ""
        cells.append(Text.assemble(middle, (below, "dim not bold")))
    return cells


def policy_name(request: PolicyRequest, exact: bool = True) -> Text:
    """Returns the first cell of a policy's row: its name, its options, and `approximate` where it is."""
    options = [(f"\n{option}={value}", "dim not bold") for option, value in request.options.items()]
    return Text.assemble(
        (request.name, "bold"), *options, ("" if exact else "\napproximate", "yellow not bold")
    )


@dataclass(frozen=True)
class Column(Generic[Row]):
    """`title`: of one or more lines. `text`: aligned left and wrapped; numbers are aligned right, and never
    wrapped. `note`: explains the title. `optional`: left out where each value is None."""

    title: str
    value: Callable[[Row], Any]
    format: Format = as_they_are
    text: bool = False
    style: str = ""
    note: str = ""
    optional: bool = False

    def cells(self, rows: Sequence[Row]) -> list[Cell] | None:
        """Returns the cell of each row, or None where the column is left out."""
        values = [self.value(row) for row in rows]
        if self.optional and all(value is None for value in values):
            return None
        shown = iter(self.format([value for value in values if value is not None]))
        return [MISSING if value is None else next(shown) for value in values]


@dataclass(frozen=True)
class Table(Generic[Row]):
    """`style`: of a whole row. `gap`: spaces between columns; one more where no rule is drawn below the
    titles."""

    columns: Sequence[Column[Row]]
    rows: Sequence[Row]
    title: str = ""
    gap: int = 1
    style: Callable[[Row], str] = lambda row: ""

    @property
    def notes(self) -> list[str]:
        """Returns the notes of the columns that are shown, each once."""
        return list(dict.fromkeys(column.note for column, _ in self._shown() if column.note))

    def __rich__(self) -> table.Table:
        made = _titled([column for column, _ in self._shown()], self.gap, self.title)
        for row, line in zip(
            self.rows, zip(*(cells for _, cells in self._shown()), strict=True), strict=True
        ):
            made.add_row(*line, style=self.style(row))
        return made

    def _shown(self) -> Iterator[tuple[Column[Row], list[Cell]]]:
        for column in self.columns:
            if (cells := column.cells(self.rows)) is not None:
                yield column, cells


def _titled(columns: Sequence[Column[Any]], gap: int, title: str) -> table.Table:
    terminal = Console().is_terminal
    titled = table.Table(
        title=title or None,
        title_style="bold yellow",
        box=box.SIMPLE_HEAD if terminal else None,
        padding=(0, gap if terminal else gap + 1, 0, 0),
        show_edge=False,
        header_style="bold",
    )
    lines = max(column.title.count("\n") for column in columns)
    for column in columns:
        heading = "\n" * (lines - column.title.count("\n")) + column.title  # all end on the last line
        if column.text:
            titled.add_column(heading, overflow="fold", style=column.style)
        else:
            titled.add_column(heading, justify="right", no_wrap=True, style=column.style)
    return titled


@dataclass(frozen=True)
class Grid:
    """Rows of equally many cells without titles. The last one wraps beside the others or, where a narrow
    terminal leaves it too little room, below them. Words, and so paths, are never broken."""

    rows: Sequence[Sequence[Cell]]
    gap: int = 2
    indent: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        widths = [max(map(_text_width, column)) for column in zip(*self.rows, strict=True)][:-1]
        head = self.indent + sum(widths) + self.gap * len(widths)
        beside = options.max_width - head >= LEAST_TEXT
        indent = head if beside else self.indent + self.gap
        for *cells, last in self.rows:
            line = Text(" " * self.indent)
            for cell, width in zip(cells, widths, strict=True):
                line.append_text(_as_text(cell)).append(" " * (width + self.gap - _text_width(cell)))
            if not beside and line.plain.strip():
                yield _whole(line)
                if not last:
                    continue
                line = Text(" " * indent)
            for text in wrapped(_as_text(last), options.max_width - indent, console.is_terminal):
                yield _whole(line.append_text(text))
                line = Text(" " * indent)


def wrapped(text: Text, width: int, commands: bool = True) -> Iterator[Text]:
    """Yields lines of `width` columns; a longer word is a line by itself. rich would break or cut it.
    `commands`: whether they are wrapped, too."""
    for line in text.split("\n", allow_blank=True):
        if not commands and line.plain.lstrip().startswith(TYPED):
            yield line
            continue
        breaks, used = [], 0
        for word in re.finditer(r"\s*\S+", line.plain):
            if used and used + cell_len(word[0]) > width:
                breaks.append(word.end() - len(word[0].lstrip()))
                used = cell_len(word[0].lstrip())
            else:
                used += cell_len(word[0])
        for part in line.divide(breaks):
            part.rstrip()
            yield part


def _whole(line: Text) -> Text:
    """Returns a line that is printed as it is."""
    line.no_wrap, line.overflow = True, "ignore"
    return line


def _as_text(cell: Cell) -> Text:
    return Text(cell) if isinstance(cell, str) else cell


def _text_width(cell: Cell) -> int:
    return _as_text(cell).cell_len


def dim(lines: Iterable[str]) -> list[Text]:
    """Returns lines that explain, in a paler colour."""
    return [Text(line, style="dim") for line in lines]


class VisibleConsole(Console):
    """Draws texts as they are, without markup, emoji or highlighting; none can control the terminal."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **settings)

    def show(self, what: RenderableType) -> None:
        """Print something in this width; a word that is longer, such as a path, stays whole."""
        if not isinstance(what, Cell):
            self.print(what, crop=False)
            return
        for line in wrapped(_as_text(what), self.width, self.is_terminal):
            self.print(line, no_wrap=True, overflow="ignore", crop=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def render(*parts: RenderableType, max_width: int = MAX_WIDTH, plain_width: int = PLAIN_WIDTH) -> str:
    """Returns the text of `parts` for stdout, each beginning a line: colours and the terminal's width (at
    most `max_width`) on a terminal, else plain and `plain_width` columns. No line ends in spaces."""
    stdout = Console()
    terminal = stdout.is_terminal
    width = min(stdout.width, max_width) if terminal else plain_width
    console = VisibleConsole(width=width, force_terminal=terminal)
    with console.capture() as captured:
        for part in parts:
            console.show(part)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def print_parts(*parts: RenderableType) -> None:
    """Print what `render` makes of `parts`."""
    show(render(*parts), rendered=True)
