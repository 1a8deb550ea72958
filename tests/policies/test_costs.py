"""Costs: interpolation against hand-made numbers, invalid costs files, and costs derived from rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import PolicyError
from pipeline.policies.costs import MACHINES, Costs, Rates, derived

RATES = Rates(100.0, 25.0, 1000.0, 1.0, 100.0, round_trip=5e-5, layer=2e-4, launch=3e-5)
WEIGHTS = 8 * 10**6  # an expert's, 4 bits each
GOOD: dict[str, Any] = {
    "rows": [2, 4, 16],
    "host": [1.0, 2.0, 8.0],
    "device": [0.5, 0.4, 0.3],
    "link": 0.25,
    "round_trip": 0.125,
}


def test_other_work_of_a_layer() -> None:
    """The other work has the same row counts; it is 0 where the file does not have it."""
    costs = Costs.from_json(GOOD | {"other": [1.0, 3.0, 9.0]})
    assert [costs.other_at[rows] for rows in (0, 2, 3, 16)] == [0, 1, 2, 9]
    assert not Costs.from_json(GOOD).other_at[99]
    full = GOOD | {"other": [0.0] * 3, "launch": 0, "fetch": 0, "per": "tile"}
    assert Costs.from_json(GOOD) == Costs.from_json(full)


@given(st.integers(1, 100), st.integers(1, 50))
def test_costs_of_an_expert_are_divided_by_its_tiles(tiles: int, rows: int) -> None:
    """An expert's costs are divided by its tiles; other costs and costs of tiles do not change."""
    whole = Costs.from_json(GOOD | {"other": [1.0, 2.0, 3.0], "launch": 0.75, "fetch": 0.5, "per": "expert"})
    costs = whole.for_tiles(tiles)
    assert np.isclose(costs.host_at[rows] * tiles, whole.host_at[rows])
    assert np.isclose(costs.device_at[rows] * tiles, whole.device_at[rows])
    assert np.isclose(costs.link * tiles, whole.link)
    assert (costs.other, costs.round_trip, costs.per) == (whole.other, whole.round_trip, "tile")
    assert (costs.launch, costs.fetch) == (0.75, 0.5)
    assert costs.for_tiles(7) is costs


@given(
    st.lists(st.floats(0, 10), min_size=2, max_size=6),
    st.lists(st.integers(1, 100), min_size=6, max_size=6, unique=True),
    st.integers(0, 300),
)
def test_seconds_are_exact_on_the_grid_and_linear_outside(values, rows, asked) -> None:
    grid = tuple(sorted(rows)[: len(values)])
    costs = Costs(grid, tuple(values), tuple(values), 0.0, 0.0)
    assert [costs.host_at[row] for row in grid] == values
    expected = float(np.interp(asked, grid, values))
    if not grid[0] <= asked <= grid[-1]:  # the nearest segment goes on: not below 0, nor below the last point
        near = slice(0, 2) if asked < grid[0] else slice(-2, None)
        (a, b), (x, y) = grid[near], values[near]
        expected = max(0.0 if asked < a else y, x + (y - x) / (b - a) * (asked - a))
    assert np.isclose(costs.host_at[asked], expected if asked else 0.0)


def test_costs_file_round_trip(tmp_path: Path) -> None:
    single = 5e-5, 1e-4, (1e-4, 2e-4), 3e-5, 4e-5, "expert", ((3e-4, 1.2), (0.0, 2.0))
    costs = Costs((1, 8), (1e-5, 3e-5), (1e-6, 2e-6), *single)
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(costs.to_json()))
    assert Costs.load(path) == costs


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": []}, "'rows' is empty"),
        ({"rows": [2, 2, 3]}, "ascending"),
        ({"rows": [0, 1, 2]}, "at least 1"),
        ({"rows": [1, 2, 3.5]}, r"Expected `int`, got `float` - at `\$\.rows\[2\]`"),
        ({"rows": [1, 2, 10**400]}, "ascending, .* below"),
        ({"rows": 3}, "Expected `array`, got `int`"),
        ({"host": [1.0, 2.0]}, "2 values for 3"),
        ({"host": [1.0, 2.0, -1]}, "not negative"),
        ({"device": [1.0, 2.0, float("nan")]}, "finite"),
        ({"device": [1.0, 2.0, "3"]}, "Expected `float`, got `str`"),
        ({"link": float("inf")}, "finite"),
        ({"link": True}, "Expected `float`, got `bool`"),
        ({"link": 10**400}, "out of range"),
        ({"round_trip": None}, "Expected `float`, got `null`"),
        ({"launch": -1.0}, "'launch' holds -1.0"),
        ({"fetch": float("nan")}, "'fetch' holds nan"),
        ({"fetch": "0.1"}, "Expected `float`, got `str`"),
        ({"other": [1.0, 2.0]}, "'other' has 2 values for 3"),
        ({"other": [1.0, 2.0, -3.0]}, "'other' holds -3.0"),
        ({"other": "much"}, "Expected `array`, got `str`"),
        ({"per": "layer"}, "Invalid enum value 'layer'"),
        ({"per": ["tile"]}, "Expected `str`, got `array`"),
        ({"rouns": 1}, "'rouns' is no key"),
    ],
)
def test_invalid_values_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(PolicyError, match=words) as caught:
        Costs.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", list(GOOD))
def test_missing_key_is_named(key: str) -> None:
    with pytest.raises(PolicyError, match=f"missing required field `{key}`"):
        Costs.from_json({name: value for name, value in GOOD.items() if name != key})


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000, b" " * (1 << 20) + b"{}"]
)
def test_invalid_costs_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    with pytest.raises(PolicyError) as caught:
        Costs.load(path)
    assert "\n" not in str(caught.value)


def test_shipped_table_is_read_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any folder; a file of that name in the folder takes precedence."""
    monkeypatch.chdir(tmp_path)
    assert Costs.load(Path("daop-table-1")).per == "expert"
    (tmp_path / "daop-table-1").write_text(json.dumps(GOOD))
    assert Costs.load(Path("daop-table-1")) == Costs.from_json(GOOD)
    with pytest.raises(PolicyError, match="cannot read the costs file"):
        Costs.load(tmp_path / "elsewhere" / "daop-table-1")


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(PolicyError, match="cannot read the costs file"):
            Costs.load(path)


def test_one_row_takes_as_long_as_reading_the_expert() -> None:
    costs = derived(RATES, WEIGHTS / 2, WEIGHTS)
    assert costs.per == "expert"
    assert costs.host[0] == pytest.approx(4e6 / 75e9)  # the link takes its 25 GB/s from the same memory
    assert costs.device[0] == pytest.approx(4e6 / 1000e9)
    assert costs.link == pytest.approx(4e6 / 25e9)
    assert (costs.round_trip, costs.launch, costs.fetch) == (5e-5, 3e-5, 1e-5)
    assert costs.other[0] == pytest.approx(2e-4)


def test_many_rows_take_as_long_as_their_arithmetic() -> None:
    costs = derived(RATES, WEIGHTS / 2, WEIGHTS, other_bytes=1e6, other_weights=5e5)
    rows = costs.rows[-1]
    assert costs.host[-1] == pytest.approx(2 * WEIGHTS * rows / 1e12)
    assert costs.device[-1] == pytest.approx(2 * WEIGHTS * rows / 100e12)
    assert costs.other[-1] == pytest.approx(2e-4 + 2 * 5e5 * rows / 100e12)


def test_the_workers_keep_half_of_the_memory() -> None:
    assert Rates(40.0, 50.0, 1000.0, 1.0, 1.0).workers_gbps == 20


@pytest.mark.parametrize("name", MACHINES)
def test_named_machines_give_costs(name: str) -> None:
    costs = derived(MACHINES[name], WEIGHTS / 2, WEIGHTS)
    assert costs.device[0] < costs.host[0] < costs.link
