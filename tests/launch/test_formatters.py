"""Percentages, figures and byte sizes as the commands print them."""

from __future__ import annotations

from launch.terminal.format import percent, three_digits
from shm.segment import byte_size


def test_percent_is_0_or_100_only_where_it_is_exact() -> None:
    assert [percent(part / 1000) for part in (0, 1, 500, 999, 1000)] == ["0%", "<1%", "50%", ">99%", "100%"]
    assert [percent(part, 1) for part in (0.0004, 0.0345, 0.9996)] == ["<0.1%", "3.5%", ">99.9%"]
    assert percent(None) == "-"


def test_three_digits_keeps_narrow_columns_narrow() -> None:
    assert [three_digits(x) for x in (0, 0.1234, 12.34, 1234.5, 12345)] == [
        "0",
        "0.123",
        "12.3",
        "1234",
        "12.3k",
    ]


def test_byte_size_picks_the_unit() -> None:
    sizes = (0, 999, 1200, 123_456, 31_500_000, 25_130_000_000)
    assert [byte_size(n) for n in sizes] == ["0 B", "999 B", "1.2 kB", "123.5 kB", "31.5 MB", "25.13 GB"]
