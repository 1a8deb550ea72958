"""The printer's tables and the plot module's pictures, which every command uses."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launch.errors import OutputFailed, WrongUsage
from launch.terminal.format import distinct_names
from launch.terminal.output import print_json
from launch.terminal.plot import Panel, Series, check_picture, draw
from launch.terminal.tables import Grid, VisibleConsole, render
from pipeline.assets import model_dir

if TYPE_CHECKING:  # to import it takes a while, in each of several processes
    pass


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
