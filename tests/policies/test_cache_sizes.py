"""AdapMoE's cache sizes: the published measurements, the paper's own formula, counting, and brute force."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_calibration import plain_calibration
from policy_machine import make_view, policy

from pipeline.policies.calibration import at_limits
from pipeline.policies.replacements import best_sizes, expected_loads, filled, layer_sizes
from pipeline.policies.view import ModelShape, View

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "data/adapmoe_mixtral_8x7b.json").read_text())
shares = st.floats(0, 1)


def mixtral_loads(gated: bool) -> list[np.ndarray]:
    return [
        expected_loads(8, [0, single, 1 - single] if gated else [0, 0, 1], right)
        for single, right in zip(GOLDEN["alpha"], GOLDEN["beta"], strict=True)
    ]


def mixtral_view() -> View:
    """Without a gate tokens keep two experts, under one that drops anything as many as were measured."""
    shape = ModelShape(layers=32, experts=8, tiles=4, top_k=2)
    single = np.array(GOLDEN["alpha"])
    none, both = np.zeros(32), np.ones(32)
    tables = [np.stack([none, none, both], axis=1), np.stack([none, single, 1 - single], axis=1)]
    raw = np.stack([np.array(GOLDEN["beta"], np.float32)] * 2, axis=1)
    calibration = plain_calibration(
        32,
        8,
        kept=np.stack(tables, axis=1).astype(np.float32),
        gated_accuracy={"raw": raw, "residual": np.zeros_like(raw), "first": np.full_like(raw, 0.75)},
        sensitivity=np.array(GOLDEN["sensitivity"], np.float32),
        threshold=GOLDEN["threshold"],
    )
    return replace(make_view(shape, 128 * 4), calibration=calibration)


UNGATED, GATED = [0.0] * 32, [1.0] * 32  # of a token's weight, that may be dropped


@pytest.mark.parametrize("known", GOLDEN["optimal"], ids=lambda known: f"{known['total']}-{known['gated']}")
def test_layer_sizes_of_a_calibration(known: dict[str, Any]) -> None:
    sizes = layer_sizes(mixtral_view(), known["total"], GATED if known["gated"] else UNGATED)
    assert sum(sizes) == known["total"]
    loads = mixtral_loads(known["gated"])
    cost, theirs = (
        sum(load[size] for load, size in zip(loads, one, strict=True)) for one in (sizes, known["sizes"])
    )
    assert cost == pytest.approx(known["cost"], abs=1e-4)  # a calibration's arrays are float32
    assert theirs == pytest.approx(known["cost"], abs=1e-6)  # where the sizes differ, they tie


def test_first_layer_has_the_accuracy_of_its_trained_gate() -> None:
    view = mixtral_view()
    assert view.calibration is not None
    without = layer_sizes(view, 96, UNGATED)
    trained = replace(view.calibration, first_gate=np.zeros((8, 4), np.float32))
    gate = layer_sizes(replace(view, calibration=trained), 96, UNGATED)
    assert without[0] == 8
    assert gate[0] < without[0]


def test_without_prediction_layers_are_equal() -> None:
    assert layer_sizes(mixtral_view(), 96, UNGATED, predictor=None) == [3] * 32


def sizes_of(view: View, **options: str) -> list[int]:
    return [int(size) for size in (policy("adapmoe", **options).placement(view) > 0).sum(axis=1)]


def test_cache_sizes_follow_the_threshold_in_force() -> None:
    """A threshold that drops nothing, the calibration's, and one that drops what it may."""
    view = mixtral_view()
    assert view.calibration is not None
    every = [sizes_of(view, threshold=one) for one in ("0", str(GOLDEN["threshold"]), "1e9")]
    assert len({str(sizes) for sizes in every}) == 3
    assert sizes_of(view) == every[1]
    assert sizes_of(view, gate="own") == every[0]


def test_cache_sizes_may_be_those_of_a_prefetch_that_does_not_take_place() -> None:
    view, alone = mixtral_view(), {"gate": "own", "prediction": "none"}
    assert sizes_of(view, sizes="dp", **alone) == [4] * 32
    assert sizes_of(view, sizes="predicted", **alone) == layer_sizes(view, 128, UNGATED) != [4] * 32


def test_cache_sizes_follow_the_accuracy_of_gated_predictions() -> None:
    """Not that of all predictions, of prompts too: here a gate makes a layer's predictions useless."""
    view = mixtral_view()
    assert view.calibration is not None
    gated = {name: table.copy() for name, table in view.calibration.gated_accuracy.items()}
    gated["raw"][20, 1] = 0
    changed = replace(view, calibration=replace(view.calibration, gated_accuracy=gated))
    assert layer_sizes(changed, 96, UNGATED) == layer_sizes(view, 96, UNGATED)
    assert layer_sizes(changed, 96, GATED)[20] > layer_sizes(view, 96, GATED)[20]
    accuracy = {name: np.zeros_like(array) for name, array in view.calibration.accuracy.items()}
    useless = replace(view, calibration=replace(view.calibration, accuracy=accuracy))
    assert layer_sizes(useless, 96, GATED) == layer_sizes(view, 96, GATED)


def test_entries_between_the_steps_of_a_table() -> None:
    table = np.array([[[0, 1], [1, 3], [5, 0]], [[2, 2], [4, 4], [6, 6]]], np.float32)
    assert at_limits(table, [0, 0.75]).tolist() == [[0, 1], [5, 5]]
    assert at_limits(table, [0.25, float("inf")]).tolist() == [[0.5, 2], [6, 6]]
    assert at_limits(table[:, :, 0], [1, 0.5]).tolist() == [5, 4]


@given(st.integers(2, 200), shares, shares)
def test_loads_of_two_experts_equal_the_papers_equations(experts: int, single: float, right: float) -> None:
    """Equations 11 to 15, as printed."""
    loads = expected_loads(experts, [0, single, 1 - single], right)
    for t in range(experts + 1):
        both = max((experts - t) * (experts - t - 1) / (experts * (experts - 1)), 0)
        f1 = (1 - t / experts) * (1 - right)
        f2 = 2 * both * (1 - right)
        f3 = both * right
        f4 = 2 * (experts - t) * t / (experts * (experts - 1)) * (1 - right)
        assert loads[t] == pytest.approx(single * f1 + (1 - single) * (f2 + f3 + f4), abs=1e-12)


@settings(max_examples=40)
@given(st.data())
def test_loads_of_any_number_of_experts_equal_counting(data: st.DataObject) -> None:
    """Every set of needed experts against a cache of the first t, one by one."""
    experts = data.draw(st.integers(1, 8))
    weights = data.draw(st.lists(st.integers(0, 5), min_size=2, max_size=experts + 1))
    needed = [share / max(1, sum(weights)) for share in weights]
    right = data.draw(shares)
    loads = expected_loads(experts, needed, right)
    for t in range(experts + 1):
        expected = 0.0
        for j, share in enumerate(needed):
            sets = list(combinations(range(experts), j))
            for chosen in sets:
                misses = sum(expert >= t for expert in chosen)
                expected += share * (misses - right if misses else 0) / len(sets)
        assert loads[t] == pytest.approx(expected, abs=1e-12)


def test_more_needed_than_existing_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="3 experts cannot be needed of 2"):
        expected_loads(2, [0, 0, 0, 1], 0.5)


@settings(max_examples=60)
@given(st.data())
def test_best_sizes_equal_exhaustive_search(data: st.DataObject) -> None:
    layers, experts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    loads = data.draw(
        st.lists(
            st.lists(st.floats(0, 9), min_size=experts + 1, max_size=experts + 1),
            min_size=layers,
            max_size=layers,
        )
    )
    total = data.draw(st.integers(0, layers * experts + 3))
    sizes = best_sizes(loads, total)
    assert sum(sizes) <= total
    least = min(
        sum(load[size] for load, size in zip(loads, tried, strict=True))
        for tried in product(range(experts + 1), repeat=layers)
        if sum(tried) <= total
    )
    assert sum(load[size] for load, size in zip(loads, sizes, strict=True)) == pytest.approx(least, abs=1e-12)


def test_remaining_capacity_goes_to_the_smallest_layers() -> None:
    assert filled([0, 4, 1], 4, 8) == [2, 4, 2]
    assert filled([0, 4, 1], 4, 99) == [4, 4, 4]
    assert filled([1, 2], 4, 3) == [1, 2]
