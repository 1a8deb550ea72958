"""The printer's tables and the plot module's pictures, which every command uses."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure

from launch.errors import OutputFailed, WrongUsage
from launch.terminal.format import percent
from launch.terminal.plot import Panel, Series, check_picture, draw
from launch.terminal.tables import Column, Table, each, grid, render, spreads


@dataclass
class Run:
    cache: float
    name: str
    speeds: list[float]
    hits: float | None


RUNS = [
    Run(0.1, "fiddler", [11.2, 12.3, 13.4], 0.5),
    Run(0.1, "dali", [14.0], None),
    Run(0.2, "lru", [9, 9], 0),
]
COLUMNS = [
    Column[Run]("cache", lambda run: run.cache, text=True, once=True),
    Column[Run]("policy", lambda run: run.name, text=True),
    Column[Run]("decode\ntok/s", lambda run: run.speeds, spreads, style="bold"),
    Column[Run]("hits", lambda run: run.hits, each(percent), note="hits: of experts", optional=True),
    Column[Run]("never", lambda run: None, note="never", optional=True),
]


def test_table_by_columns() -> None:
    table = Table(COLUMNS, RUNS)
    assert table.notes == ["hits: of experts"]
    assert render(table).splitlines() == [
        "                   decode",
        "cache  policy       tok/s  hits",
        "0.1    fiddler       12.3   50%",
        "                11.2-13.4",
        "       dali          14.0     -",
        "0.2    lru            9.0    0%",
        "                  9.0-9.0",
    ]
    assert render(Table(COLUMNS[1:], RUNS, across=True)).splitlines()[0].split() == [
        "policy",
        "fiddler",
        "dali",
        "lru",
    ]
    assert render(grid([("a", "b"), ("long", "c")])) == "a     b\nlong  c\n"


def test_terminal_has_rules_and_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    text = render(Table(COLUMNS, RUNS), "word " * 20)
    assert "\x1b[1m" in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "─" in plain
    assert max(map(len, plain.splitlines())) <= 40
    assert "12.3" in plain


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Each figure, in place of a file."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    return figures


def bars(axes: Any) -> list[tuple[str, list[tuple[float, float]]]]:
    """Of each series: its label, and each bar's begin and length."""
    return [
        (container.get_label(), [(bar.get_x(), bar.get_width()) for bar in container])
        for container in axes.containers
        if isinstance(container, BarContainer)
    ]


def test_bars_have_medians_ranges_and_words(tmp_path: Path, drawn: list[Figure]) -> None:
    speeds = Panel("speed", [Series("", {"a": [900, 901, 902], "b": [10, 30]})])
    moved = Panel(
        "moved",
        [Series("late", {"a": [4.5], "b": [0]}), Series("never", {}), Series("used", {"a": [1], "b": [2]})],
        words={"b": "two"},
        end=20,
    )
    draw(tmp_path / "a.PNG", [[speeds, moved]], "heading", "footnote")
    left, right = drawn[0].axes
    assert [lengths for _, lengths in bars(left)] == [[(0, 901), (0, 20)]]
    (errors,) = (container for container in left.containers if isinstance(container, ErrorbarContainer))
    assert [(a[0], b[0]) for a, b in errors[2][0].get_segments()] == [(900, 902), (10, 30)]
    assert [(*text.xy, text.get_text()) for text in left.texts] == [(902, 0, "901"), (30, 1, "20")]
    assert left.get_xlim() == (0, 1.25 * 902)
    assert left.get_ylim() == (1.5, -0.5)  # the first place above
    assert [label.get_text() for label in left.get_yticklabels()] == ["a", "b"]
    assert bars(right) == [("late", [(0, 4.5), (0, 0)]), ("used", [(4.5, 1), (0, 2)])]
    assert [text.get_text() for text in right.texts] == ["5.50", "two"]
    assert right.get_xlim() == (0, 20)
    assert [text.get_text() for text in drawn[0].texts] == ["heading", "footnote"]


def test_lines_go_along_their_places(tmp_path: Path, drawn: list[Figure]) -> None:
    values = {16: [5.0], 1: [1.0, 3.0]}
    panels = [[Panel("speed", [Series("fiddler", values)], "batch", mark=(4, "what fits"))]]
    draw(tmp_path / "a.svg", [*panels, [Panel("few", [Series("x", {0: [1], 1: [2]})], "layer")]], "")
    above, below = drawn[0].axes
    line = above.lines[0]
    assert (np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()) == ([1, 16], [2, 5])
    assert (above.get_xscale(), above.get_xticks().tolist()) == ("log", [1, 16])
    assert "what fits" in above.texts[0].get_text()
    assert above.get_legend().get_texts()[0].get_text() == "fiddler"
    assert below.get_xscale() == "linear"


@pytest.mark.parametrize(("suffix", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_picture_is_written_whole_or_not_at_all(tmp_path: Path, suffix: str, begins: bytes) -> None:
    path = tmp_path / f"a.{suffix}"
    panels = [[Panel("speed", [Series("", {"a": [1]})])]]
    draw(path, panels, "")
    assert path.read_bytes().startswith(begins)
    assert os.listdir(tmp_path) == [path.name]
    path.unlink()
    path.mkdir()
    with pytest.raises(OutputFailed, match="Is a directory"):
        draw(path, panels, "")
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("name", ["a.jpg", "a", "no/a.png"])
def test_picture_that_cannot_be_made_is_refused_before_an_engine_starts(tmp_path: Path, name: str) -> None:
    with pytest.raises(WrongUsage, match="--plot"):
        check_picture(tmp_path / name)
    check_picture(tmp_path / "a.PDF")


def test_pictures_without_matplotlib_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    message = r"--plot needs the Python package matplotlib: run .* install '(matplotlib>=.*|\.\[plots\])'$"
    with pytest.raises(WrongUsage, match=message):
        check_picture(tmp_path / "a.png")
    assert not list(tmp_path.iterdir())
