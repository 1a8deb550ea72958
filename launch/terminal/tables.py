"""The one style of tables, and rendering: coloured for a terminal, plain text without rules elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from protocol.visible import visible

PLAIN_WIDTH = 80
MAX_WIDTH = 110  # longer lines of text are hard to read


class VisibleConsole(Console):
    """Draws texts as they are, without markup, emoji or highlighting; none can control the terminal."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def make_table(*text_columns: str, numbers: Iterable[str] = (), gap: int = 1, title: str = "") -> Table:
    """A table with its columns: texts aligned left, which wrap, then numbers aligned right, which do not.
    `gap`: spaces between columns; one more where no terminal draws the rule below the heading."""
    terminal = Console().is_terminal
    table = Table(
        title=title or None,
        title_style="bold yellow",
        box=box.SIMPLE_HEAD if terminal else None,
        padding=(0, gap if terminal else gap + 1, 0, 0),
        show_edge=False,
        header_style="bold",
    )
    for heading in text_columns:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def make_grid(columns: int, gap: int = 2) -> Table:
    """Rows without headings; the last column wraps, the others do not."""
    grid = Table.grid(padding=(0, gap, 0, 0))
    for _ in range(columns - 1):
        grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def render(*parts: RenderableType, max_width: int = MAX_WIDTH) -> str:
    """The text of `parts` for stdout, each beginning a line: colours and the terminal's width (at most
    `max_width`) on a terminal, else plain and 80 columns. No line ends in spaces."""
    stdout = Console()
    terminal = stdout.is_terminal
    width = min(stdout.width, max_width) if terminal else PLAIN_WIDTH
    console = VisibleConsole(width=width, force_terminal=terminal)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())
