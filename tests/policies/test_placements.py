"""Placements: exactly which experts are resident at the start, and the notes about them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from policy_machine import make_calibration, make_view, policy

from pipeline.policies.view import ModelShape, View

SHAPE = ModelShape(layers=3, experts=4, tiles=2, top_k=2)
CAPACITY = 15  # tiles: 7 whole experts, 2 in each layer and one more
COUNTED = np.array([[5, 9, 9, 0], [1, 1, 1, 1], [0, 7, 8, 6]])
DECODE = np.array([[0, 0, 3, 4], [8, 7, 6, 5], [2, 1, 2, 1]])


def view_of(counted: bool, calibrated: bool, capacity: int = CAPACITY) -> View:
    view = make_view(SHAPE, capacity, popularity=COUNTED if counted else None)
    calibration = make_calibration(SHAPE, np.random.default_rng(0))
    calibration = replace(calibration, decode_counts=DECODE)
    return replace(view, calibration=calibration if calibrated else None)


def placed(view: View, name: str, **options: str) -> list[list[int]]:
    """The resident experts of each layer."""
    target = policy(name, **options).placement(view)
    assert set(target.ravel()) <= {0, SHAPE.tiles}
    return [np.flatnonzero(row).tolist() for row in target]


MOST_COUNTED = [[1, 2], [0, 1], [1, 2, 3]]  # ties go to the smaller index; 6 rows are the most of the rest
MOST_DECODED = [[2, 3], [0, 1, 2], [0, 2]]


@pytest.mark.parametrize(
    ("placement", "counted", "calibrated", "wanted"),
    [
        ("popular", True, True, MOST_COUNTED),
        ("popular", False, True, [[0, 1, 2], [0, 1], [0, 1]]),
        ("calibrated", True, True, MOST_DECODED),
        ("known", True, True, MOST_DECODED),
        ("known", True, False, MOST_COUNTED),
        ("first-layers", True, True, [[0, 1, 2, 3], [0, 1, 2], []]),
    ],
)
def test_placement_without_layer_sizes(placement, counted, calibrated, wanted) -> None:
    view = view_of(counted, calibrated)
    assert placed(view, "fiddler", placement=placement) == wanted
    if placement in ("popular", "calibrated", "known"):
        assert placed(view, "daop", placement=placement) == wanted


def test_known_placement_fills_each_layer_of_the_replacement() -> None:
    """An LRU cache has 3, 2 and 2 experts in the layers."""
    assert placed(view_of(True, False), "on-demand", placement="known") == [[0, 1, 2], [0, 1], [1, 2]]
    assert placed(view_of(True, True), "on-demand", placement="known") == [[0, 2, 3], [0, 1], [0, 2]]


def test_random_placement_is_even_and_follows_its_seed() -> None:
    drawn = [placed(view_of(True, True), "fiddler", placement="random", seed=str(seed)) for seed in range(20)]
    assert {tuple(sorted(map(len, rows))) for rows in drawn} == {(2, 2, 3)}
    assert len({str(rows) for rows in drawn}) > 10
    assert drawn[3] == placed(view_of(False, False), "fiddler", placement="random", seed="3")


@pytest.mark.parametrize(
    ("placement", "counted", "calibrated", "words"),
    [
        ("popular", False, True, "no routing has been counted yet"),
        ("popular", True, False, ""),
        ("known", False, False, "no routing has been counted yet"),
        ("known", True, False, "the model is not calibrated"),
        ("known", False, True, ""),
        ("calibrated", False, True, ""),
    ],
)
def test_notes_about_a_placement(placement, counted, calibrated, words) -> None:
    made = policy("fiddler", placement=placement)
    notes = made.notes(view_of(counted, calibrated))
    assert [note.startswith(f"fiddler: {words}") for note in notes] == [True] * bool(words)
    for capacity in (0, 24, 30):  # nothing is chosen: no expert fits, or all do
        assert made.notes(view_of(counted, calibrated, capacity)) == ()
    assert len(made.notes(view_of(counted, calibrated, 22))) == bool(words)
