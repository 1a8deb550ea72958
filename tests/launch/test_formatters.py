"""Percentages, figures and byte sizes as the commands print them."""

from __future__ import annotations

import json
import math

import pytest

from launch.terminal.format import distinct_names, percent, rate, three_digits
from launch.terminal.output import print_json
from pipeline.assets import model_dir
from shm.segment import byte_size


def test_percent_is_0_or_100_only_where_it_is_exact() -> None:
    assert [percent(part / 1000) for part in (0, 1, 500, 999, 1000)] == ["0%", "<1%", "50%", ">99%", "100%"]
    assert [percent(part, 1) for part in (0.0004, 0.0345, 0.9996)] == ["<0.1%", "3.5%", ">99.9%"]
    assert percent(None) == "-"


def test_models_of_the_same_name_are_told_apart_by_their_folders() -> None:
    models = ["/a/x/model", "/b/x/model", "/b/y/model", "/c/other", str(model_dir())]
    shown = ["a/x/model", "b/x/model", "y/model", "other", "the embedded model"]
    # A calibration's record has the name alone.
    models += ["the embedded model", "other"]
    shown += ["the embedded model", "other"]
    assert distinct_names(models) == dict(zip(models, shown, strict=True))


def test_three_digits_keeps_narrow_columns_narrow() -> None:
    assert [three_digits(x) for x in (0, 0.1234, 12.34, 1234.5, 12345)] == [
        "0",
        "0.123",
        "12.3",
        "1234",
        "12.3k",
    ]


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


def test_json_has_figures_of_each_layer_only_in_detail(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"layers": 8, "decode": {"layers": {"hits": [1, 2]}, "hit_rate_by_layer": [0.5], "steps": 2}}
    print_json(figures, detail=False)
    assert json.loads(capsys.readouterr().out) == {"layers": 8, "decode": {"steps": 2}}
    print_json(figures, detail=True)
    assert json.loads(capsys.readouterr().out) == figures


def test_rate_has_three_digits() -> None:
    assert [rate(pace) for pace in (23.14e9, 5e9, 1.234e9, 6e6)] == [
        "23.1 GB/s",
        "5 GB/s",
        "1.23 GB/s",
        "0.006 GB/s",
    ]


def test_byte_size_picks_the_unit() -> None:
    sizes = (0, 999, 1200, 123_456, 31_500_000, 25_130_000_000)
    assert [byte_size(n) for n in sizes] == ["0 B", "999 B", "1.2 kB", "123.5 kB", "31.5 MB", "25.13 GB"]
