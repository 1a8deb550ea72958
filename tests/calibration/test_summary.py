"""A calibration's few numbers, each from its own array, and each cell of calibration.txt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plain_calibration import plain_calibration

from pipeline.calibration.summary import describe, summary

FOUND = replace(
    plain_calibration(3, 2, threshold=0.0625, first_gate=np.ones((2, 4), np.float32)),
    prefill_counts=np.array([[1, 2], [3, 4], [5, 6]]),
    decode_counts=np.array([[10, 20], [30, 40], [50, 60]]),
    accuracy={
        "raw": np.array([0.9, 0.25, 0.75], np.float32),
        "residual": np.array([0.8, 0.375, 0.625], np.float32),
        "first": np.array([0.7, 0.1, 0.2], np.float32),
    },
    similarity=np.array([0.25, 0.5, 1.0], np.float32),
    needed=np.array([[0, 1, 0], [0, 0.5, 0.5], [0.25, 0.25, 0.5]], np.float32),
    sensitivity=np.array([0.5, 12345, 3], np.float32),
)
BARE = replace(FOUND, hit_rates={}, needed=None, sensitivity=None, threshold=None, first_gate=None)


def test_each_number_of_a_summary() -> None:
    """Raw and residual predictions begin with the second layer, the first gate's are of the first alone."""
    assert summary(FOUND, {"model": "m"}) == {
        "model": "m",
        "accuracy": {"raw": 0.5, "residual": 0.5, "first": pytest.approx(0.7), "mlp": None},
        "similarity": pytest.approx(1.75 / 3),
        "threshold": 0.0625,
        "up": "",
        "max_loss": None,
        "sparsity": None,
        "single_expert_share": pytest.approx(1.75 / 3),
        "experts_per_token": pytest.approx((1 + 1.5 + 1.25) / 3),
    }
    accuracy = FOUND.accuracy | {"residual": np.array([0, 0.5, 1], np.float32)}
    assert summary(replace(FOUND, accuracy=accuracy), {})["accuracy"]["residual"] == 0.75


def test_numbers_that_were_not_measured_are_none() -> None:
    found = summary(BARE, {})
    names = ("threshold", "single_expert_share", "experts_per_token")
    assert [found[name] for name in names] == [None] * 3
    assert found["accuracy"] == {"raw": 0.5, "residual": 0.5, "first": None, "mlp": None}
    one = plain_calibration(1, 2, first_gate=np.ones((2, 4), np.float32))
    assert summary(one, {})["accuracy"] == {"raw": None, "residual": None, "first": 1.0, "mlp": None}


def test_accuracy_with_mlps_is_that_of_the_better_gate_of_each_layer() -> None:
    """Raw: 0.25 and 0.75."""
    for found, mean in (([0.75], 0.75), ([0.125], 0.5), ([0.5, 0.875], 0.6875)):
        mlps = replace(FOUND, mlp_accuracy=np.array(found, np.float32))
        assert summary(mlps, {})["accuracy"]["mlp"] == mean


ABOUT = {"model": "m", "loss": None, "hits": {"own": 0.123456, "of": 7}, "notes": ["a", "b"], "empty": []}
TOP = """\
Calibration of m

model: m
loss: none
hits: own 0.1235, of 7
notes: a; b
empty: none
"""
BOTTOM = """
rows by expert in prefill, a line for each layer
1 2
3 4
5 6

rows by expert in decode, a line for each layer
10 20
30 40
50 60
"""


def test_text_file_of_a_calibration() -> None:
    numbers = """\
accuracy: raw 0.5, residual 0.5, first 0.7, mlp none
similarity: 0.5833
threshold: 0.0625
up: int2
max_loss: 2
sparsity: 0.6
single_expert_share: 0.5833
experts_per_token: 1.25

3 layers of 2 experts

layer  raw %  residual %  cosine raw  cosine residual  similarity  sensitivity  experts/token
    0                                                       0.250          0.5           1.00
    1   25.0        37.5       0.125            0.250       0.500     1.23e+04           1.50
    2   75.0        62.5       0.375            0.500       1.000            3           1.25

a batch's experts of most tokens, named by the prediction, %: raw, residual
rows        top 1        top 2
   1   10.0, 30.0   20.0, 40.0
  16  50.0, 100.0   60.0, 80.0
"""
    for name in ("lcp", "lru", "lfu"):
        numbers += f"\nhits of a cache in decode, by {name}, of 0 to 2 experts a layer, a line for each, %\n"
        numbers += "0.0 50.0 100.0\n" * 3
    prefetch = {
        "rows": [1, 16],
        "top": [1, 2],
        "accuracy": {"raw": [[0.1, 0.2], [0.5, 0.6]], "residual": [[0.3, 0.4], [1.0, 0.8]]},
        "cosines": {"raw": [0.125, 0.375], "residual": [0.25, 0.5]},
    }
    numbers += "\n|u| below which 50, 70, 80, 90 % of the channels are, and their share of its sum, %\n"
    numbers += "0.5, 25.0  0.7, 35.0  0.8, 40.0  0.9, 45.0\n" * 3
    steps = np.tile(np.arange(10, dtype=np.float32) / 10, (3, 1))
    sparse = {"magnitudes": steps, "left_mass": steps / 2, "up": "int2", "max_loss": 2.0, "sparsity": 0.6}
    found = describe(replace(FOUND, **sparse), ABOUT | {"prefetch": prefetch})
    assert found == TOP + numbers + BOTTOM


def test_text_file_of_a_calibration_without_gates() -> None:
    numbers = """\
accuracy: raw 0.5, residual 0.5, first none, mlp none
similarity: 0.5833
threshold: none
up: none
max_loss: none
sparsity: none
single_expert_share: none
experts_per_token: none

3 layers of 2 experts

layer  raw %  residual %  cosine raw  cosine residual  similarity  sensitivity  experts/token
    0                                                       0.250
    1   25.0        37.5                                    0.500
    2   75.0        62.5                                    1.000
"""
    found = "\n".join(line.rstrip() for line in describe(BARE, ABOUT).split("\n"))
    assert found == TOP + numbers + BOTTOM
    assert describe(BARE, {}).startswith("Calibration of a model\n\naccuracy: ")
