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

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, TypeVar

from rich import box, table
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from launch.terminal.format import MISSING, alike
from launch.terminal.output import show
from pipeline.policies.view import PolicyRequest
from protocol.program import visible

PLAIN_WIDTH = 80
MAX_WIDTH = 110  # longer lines of text are hard to read

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


def grid(rows: Iterable[Sequence[RenderableType]], gap: int = 2) -> table.Table:
    """Returns rows of equally many cells without titles; the last column wraps, the others do not."""
    made = table.Table.grid(padding=(0, gap, 0, 0))
    lines = list(rows)
    for _ in lines[0][:-1] if lines else ():
        made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for line in lines:
        made.add_row(*line)
    return made


def dim(lines: Iterable[str]) -> list[Text]:
    """Returns lines that explain, in a paler colour."""
    return [Text(line, style="dim") for line in lines]


class VisibleConsole(Console):
    """Draws texts as they are, without markup, emoji or highlighting; none can control the terminal."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def render(*parts: RenderableType, max_width: int = MAX_WIDTH) -> str:
    """Returns the text of `parts` for stdout, each beginning a line: colours and the terminal's width (at
    most `max_width`) on a terminal, else plain and 80 columns. No line ends in spaces."""
    stdout = Console()
    terminal = stdout.is_terminal
    width = min(stdout.width, max_width) if terminal else PLAIN_WIDTH
    console = VisibleConsole(width=width, force_terminal=terminal)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def print_parts(*parts: RenderableType) -> None:
    """Print what `render` makes of `parts`."""
    show(render(*parts), rendered=True)
