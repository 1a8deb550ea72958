"""The printer's tables and the plot module's pictures, which every command uses."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from launch.errors import OutputFailed, WrongUsage
from launch.terminal.format import distinct_names, percent, rate, three_digits
from launch.terminal.output import print_json
from launch.terminal.plot import Panel, Series, check_picture, draw
from launch.terminal.tables import Column, Grid, Table, VisibleConsole, each, render, spreads
from pipeline.assets import model_dir
from shm.segment import byte_size

if TYPE_CHECKING:  # to import it takes a while, in each of several processes
    from matplotlib.figure import Figure


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
    Column[Run]("cache", lambda run: run.cache, text=True),
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
        "0.1    dali          14.0     -",
        "0.2    lru            9.0    0%",
        "                  9.0-9.0",
    ]
    assert render(Grid([("a", "b"), ("long", "c")])) == "a     b\nlong  c\n"


def test_no_path_is_broken_and_a_narrow_terminal_has_the_text_below_the_name() -> None:
    path = f"/models/{'x' * 90}/config.json"
    console = VisibleConsole(width=38, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.show(Grid([("what /it is called in full", f"reads {path} at\nthe start"), ("short", "")]))
        console.show(f"saved: {path}")
    lines = ["what /it is called in full", "  reads", f"  {path}", "  at", "  the start"]
    lines += ["short", "saved:", path]
    assert [line.rstrip() for line in captured.get().splitlines()] == lines
    assert path in render(Grid([("name", path)]))
    command = f"> python launch.py {'--option value ' * 9}".rstrip()
    assert f"{command}\n" in render(Grid([("name", f"{'words ' * 30}\n{command}")]))
    with console.capture() as captured:
        console.show(command)
    assert command not in captured.get()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Each figure, in place of a file."""
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    return figures


def test_bars_and_lines_have_medians_and_ranges(tmp_path: Path, drawn: list[Figure]) -> None:
    from matplotlib.container import ErrorbarContainer

    speeds = Panel("speed", [Series("", {"a": [900, 901, 902], "b": [10, 30]})])
    along = Panel("speed", [Series("fiddler", {16: [5.0], 1: [1.0, 3.0]})], "batch")
    draw(tmp_path / "a.PNG", [[speeds], [along]], "heading")
    bars, lines = drawn[0].axes
    assert [text.get_text() for text in bars.texts] == ["901", "20"]
    (errors,) = (container for container in bars.containers if isinstance(container, ErrorbarContainer))
    assert [(a[0], b[0]) for a, b in errors[2][0].get_segments()] == [(900, 902), (10, 30)]
    assert [label.get_text() for label in bars.get_yticklabels()] == ["a", "b"]
    line = lines.lines[0]
    assert (np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()) == ([1, 16], [2, 5])
    assert (lines.get_xscale(), lines.get_xticks().tolist()) == ("log", [1, 16])
    assert lines.get_legend().get_texts()[0].get_text() == "fiddler"
    assert [text.get_text() for text in drawn[0].texts] == ["heading"]


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


def test_picture_that_cannot_be_made_is_refused_before_an_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.jpg", "a", "no/a.png"):
        with pytest.raises(WrongUsage, match="--plot"):
            check_picture(tmp_path / name)
    check_picture(tmp_path / "a.PDF")
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    with pytest.raises(WrongUsage, match=r"^--plot needs the Python package matplotlib: run .* matplotlib$"):
        check_picture(tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_figures_have_three_digits() -> None:
    assert [three_digits(x) for x in (0, 0.1234, 12.34, 1234.5, 12345)] == "0 0.123 12.3 1234 12.3k".split()
    assert [rate(pace) for pace in (23.14e9, 6e6)] == ["23.1 GB/s", "0.006 GB/s"]


def test_percent_is_0_or_100_only_where_it_is_exact() -> None:
    assert [percent(part / 1000) for part in (0, 1, 500, 999, 1000)] == ["0%", "<1%", "50%", ">99%", "100%"]
    assert [percent(part, 1) for part in (0.0004, 0.0345, 0.9996)] == ["<0.1%", "3.5%", ">99.9%"]
    assert percent(-1e-17) == "0%"
    assert percent(None) == "-"


def test_models_of_the_same_name_are_told_apart_by_their_folders() -> None:
    models = ["/a/x/model", "/b/x/model", "/b/y/model", "/c/other", str(model_dir())]
    shown = [*models[:3], "other", "the embedded model"]
    # A calibration's record has the name alone.
    models += ["the embedded model", "other"]
    shown += ["the embedded model", "other"]
    assert distinct_names(models) == dict(zip(models, shown, strict=True))


def test_json_has_the_digits_that_were_measured(capsys: pytest.CaptureFixture[str]) -> None:
    times = {
        "s": 0.00123456,
        "tok_s": 165.23423,
        "moved": 1234567.8,
        "count": 123456,
        "exact": 0.25,
        "none": 0.0,
    }
    figures = {"times": times, "rates": (1 / 3, -2 / 3), "open": math.inf}
    print_json(figures)
    rounded = {"s": 0.001235, "tok_s": 165.2, "moved": 1234568.0, "count": 123456, "exact": 0.25, "none": 0.0}
    assert json.loads(capsys.readouterr().out) == {"times": rounded, "rates": [0.3333, -0.6667], "open": None}
    print_json(figures, digits=7)
    assert json.loads(capsys.readouterr().out)["rates"] == [0.3333333, -0.6666667]


def test_byte_size_picks_the_unit() -> None:
    sizes = (0, 999, 1200, 123_456, 31_500_000, 25_130_000_000)
    assert [byte_size(n) for n in sizes] == ["0 B", "999 B", "1.2 kB", "123.5 kB", "31.5 MB", "25.13 GB"]
