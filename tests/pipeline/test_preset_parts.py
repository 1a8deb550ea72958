"""The parts of the presets act in a running engine on the embedded model, with a calibration. That exact ones
compute what transformers computes is in tests/parity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from preset_runs import COSTS, LENGTH, TILES, PresetRuns, preset_runs

from pipeline.assets import heldout, model_dir
from pipeline.text.tokenizer import Tokenizer

LAYERS, EXPERTS = 8, 8
TOKENIZER = Tokenizer.load(model_dir())
assert TOKENIZER is not None
TEXTS = [
    TOKENIZER.encode(heldout()[kind].read_text()[:8000])[:LENGTH] for kind in ("python", "german", "english")
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PresetRuns]:
    with preset_runs(tmp_path_factory.mktemp("parts"), TEXTS) as runs:
        yield runs


# The options, the layers that predictions reach ahead of the latest decided one, and those that they do at
# times.
PREFETCHES: dict[str, tuple[dict[str, str], set[int], set[int]]] = {
    "dali": ({"prefetch": "2"}, {1}, set()),
    "moepic": ({}, {1}, set()),
    # before a layer is decided, also the first one
    "moepic before attention": ({"prediction": "before-attention"}, {2, 2 - LAYERS}, set()),
    "hybrimoe": ({}, {1, 2, 3}, set()),
    "mixtral-offloading": ({}, {1}, set()),
    "pre-gated": ({}, {1}, set()),
    "whole-layer": ({}, {1}, set()),
    # AdapMoE predicts beyond layers whose predicted experts are all resident, and by its trained gate
    # from the last layer the next token's first layer.
    "adapmoe": ({"sizes": "even"}, {1, 2, 1 - LAYERS}, {3}),
}


@pytest.mark.parametrize("preset", PREFETCHES)
def test_predictions_come_true_in_part_and_their_tiles_are_used(preset: str, runs: PresetRuns) -> None:
    """At each distance; nearly all that were wanted were ordered."""
    options, distances, rarely = PREFETCHES[preset]
    run = runs.read(preset.partition(" ")[0], **options)
    found, counted = run.distances(), run.decode
    assert distances <= found.keys() <= distances | rarely
    assert all(run.came_true(distance) > 0 for distance in distances)
    assert counted["issued_experts"] > 0.9 * counted["wanted_experts"] > 0
    assert counted["predicted_tiles"] >= counted["useful_tiles"] > 0
    assert counted["paused_steps"] == 0


CUTS = {
    "dali": {0, TILES},
    "fiddler": {0, TILES},
    "hybrimoe": {0, TILES},
    "moepic": {TILES},
    "bandwidth-split": {0, 1, TILES},
}


@pytest.mark.parametrize("preset", CUTS)
def test_experts_are_divided_between_host_and_device(preset: str, runs: PresetRuns) -> None:
    run = runs.read(preset)
    assert {cut for d in run.decoded for cut in d.cut} == CUTS[preset]
    assert run.decode["fetched_tiles"] > 0
    assert run.decode["resident_tiles"] > 0


def test_a_threshold_decides_by_rows_whatever_the_costs_are(runs: PresetRuns) -> None:
    run = runs.read("fiddler", assignment="threshold", rows="1")
    pairs = [pair for d in run.decoded for pair in zip(d.rows, d.cut, strict=True)]
    assert {cut for rows, cut in pairs if rows > 1} == {TILES}
    assert {cut for rows, cut in pairs if rows == 1} == {0, TILES}, "as they are resident"
    assert run.decode["fetched_tiles"] > 0
    assert run.decode["host_tiles"] > 0


@pytest.mark.parametrize("swap", ["higher", "always"])
def test_dali_swaps_a_pair_behind_each_window(swap: str, runs: PresetRuns) -> None:
    """Algorithm 2, by the rows of the window's steps; with `higher` only pairs that gain."""
    run, window = runs.read("dali", swap=swap), 4
    changed = 0
    for step, (before, after) in enumerate(pairwise([run.targets[0], *run.kept]), start=1):
        scores = np.zeros((LAYERS, EXPERTS), int)
        for d in run.decided[LAYERS * (step - window) : LAYERS * step] if step % window == 0 else ():
            scores[d.layer, d.active] += d.rows
        for was, now, score in zip(before > 0, after > 0, scores, strict=True):
            (new,), (old,) = np.nonzero(now & ~was), np.nonzero(was & ~now)
            assert len(new) == len(old) <= (step % window == 0)
            assert swap == "higher" or len(new) == (step % window == 0)
            assert (score[new] == score[~was].max()).all()
            assert (score[old] == score[was].min()).all()
            assert swap == "always" or (score[new] > score[old]).all()
            changed += len(new)
    assert changed


def test_moepic_keeps_the_leading_tiles_of_more_experts(runs: PresetRuns) -> None:
    whole, half = (runs.read("moepic", theta=theta) for theta in ("1", "0.5"))
    for run, tiles in ((whole, TILES), (half, TILES // 2)):
        assert {*run.targets[0].ravel()} == {*run.kept[-1].ravel()} == {0, tiles}
    assert (half.targets[0] > 0).sum() > 1.5 * (whole.targets[0] > 0).sum()
    assert half.decode["resident_tiles"] > 0
    assert half.decode["fetched_tiles"] > whole.decode["fetched_tiles"], "a part of each"


def test_moepic_s_sizes_follow_its_objective(runs: PresetRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a layer hides a part of a token's load, and not all of it."""
    monkeypatch.setattr(runs, "costs", replace(COSTS, link=0.4, other=(0.5, 0.5)))
    kept = {name: runs.read("moepic", objective=name).targets[0] for name in ("latency", "ready")}
    for targets in kept.values():
        assert len({*targets.max(axis=1), *(targets > 0).sum(axis=1)}) > 1, "not alike in all layers"
    assert (kept["latency"] != kept["ready"]).any()


def test_adapmoe_s_gate_skips_by_its_threshold(runs: PresetRuns) -> None:
    run, kept = runs.read("adapmoe"), runs.read("adapmoe", threshold="0")
    assert run.decode["fidelity"]["skipped"] > 0
    assert run.counted["prefill"]["fidelity"]["skipped"] == 0
    assert sum(run.decode["layers"]["active"]) < sum(kept.decode["layers"]["active"])


def test_adapmoe_s_cache_sizes_are_planned_and_follow_the_gate(runs: PresetRuns) -> None:
    gated, ungated, even = (
        (runs.read("adapmoe", **options).targets[0].sum(axis=1) // TILES).tolist()
        for options in ({}, {"threshold": "0"}, {"sizes": "even"})
    )
    assert sum(gated) == sum(ungated) == sum(even)
    assert max(even) - min(even) <= 1
    assert len({*map(tuple, (gated, ungated, even))}) == 3
    # The second layer is the hardest to predict, so that it keeps more than later ones.
    accuracy = runs.calibration.gated_accuracy["raw"][1:, 0]
    assert accuracy.argmin() == 0
    assert ungated[1] > max(ungated[2:])


def test_daop_moves_experts_in_prefill_then_dispatches_early_and_degrades(runs: PresetRuns) -> None:
    run = runs.read("daop")
    assert run.swapped(0) > 0, "Algorithm 1"
    assert run.swapped(1) == 0, "decode moves nothing"
    counted = run.decode["fidelity"]
    assert counted["predicted"] == pytest.approx(counted["weight"] / 2), "layers 4 to 7"
    assert 0 < counted["stale"] < counted["predicted"]
    assert 0 < counted["substituted"] < counted["predicted"]
    assert run.decode["fetched_tiles"] == run.counted["prefill"]["fidelity"]["stale"] == 0
    assert runs.read("daop", predict="0").swapped(0) > 0


def test_pre_gated_layers_are_fetched_before_they_begin(runs: PresetRuns) -> None:
    run = runs.read("pre-gated")
    counted = run.decode["fidelity"]
    assert counted["predicted"] == pytest.approx(counted["weight"] * (LAYERS - 1) / LAYERS)
    assert run.decode["wasted_tiles"] == 0
