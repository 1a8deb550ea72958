"""Every part of every preset acts in a running engine on the embedded model, and with its exact parts on a
preset computes what transformers computes."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pytest
import torch
from comparison import exactly
from oracle import EXACT, Oracle
from preset_runs import CAPACITY, LENGTH, TILES, PresetRun, PresetRuns, preset_runs
from rounding import Rows

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


@pytest.fixture(scope="module")
def expected() -> list[Rows]:
    return Oracle(model_dir(), torch.float32).batch(TEXTS)


EXACT_RUNS: list[tuple[str, dict[str, str]]] = [
    ("all-host", {}),
    ("on-demand", {}),
    ("mixtral-offloading", {}),
    ("whole-layer", {}),
    ("layerwise", {}),
    ("fiddler", {}),
    ("hybrimoe", {}),
    ("bandwidth-split", {}),
    ("dali", {"prefetch": "2"}),
    ("adapmoe", {"threshold": "0"}),
    ("moepic", {}),
    ("daop", {"predict": "0"}),
]


@pytest.mark.parametrize(("preset", "options"), EXACT_RUNS, ids=[preset for preset, _ in EXACT_RUNS])
def test_exact_parts_together_equal_transformers(
    preset: str, options: dict[str, str], runs: PresetRuns, expected: list[Rows]
) -> None:
    run = runs.read(preset, **options)
    assert exactly(expected, EXACT)(run.logprobs) == ""
    assert not any(share for kind, share in run.decode["fidelity"].items() if kind != "weight")


def prefetches(run: PresetRun, distances: set[int], rarely: Collection[int] = ()) -> None:
    """Predictions of decode reached these layers ahead, and some of them others; they came true in part at
    each distance, nearly all that were wanted were ordered, and their tiles were used."""
    found, counted = run.distances(), run.decode
    assert distances <= found.keys() <= {*distances, *rarely}
    assert all(run.came_true(distance) > 0 for distance in distances)
    assert counted["issued_experts"] > 0.9 * counted["wanted_experts"] > 0
    assert counted["predicted_tiles"] >= counted["useful_tiles"] > 0
    assert counted["paused_steps"] == 0


def both_sides(run: PresetRun) -> bool:
    """Whether a layer of decode had whole experts on the host and others on the device, some of them
    fetched."""
    fetched = any(
        cut == TILES and missing
        for d in run.decoded
        for cut, missing in zip(d.cut, d.missing, strict=True)
        if 0 in d.cut
    )
    return fetched and all(run.decode[f"{kind}_tiles"] > 0 for kind in ("host", "resident", "fetched"))


def test_dali_prefetches_two_experts_swaps_and_divides(runs: PresetRuns) -> None:
    run = runs.read("dali", prefetch="2")
    prefetches(run, {1})
    assert max(len(p.experts) for p in run.predicted) == 2
    assert run.swapped(1) > 0, "the workload's window ends every four steps"
    assert both_sides(run)
    assert {cut for d in run.decoded for cut in d.cut} == {0, TILES}


def test_moepic_keeps_leading_tiles_and_prefetches_the_others(runs: PresetRuns) -> None:
    """Also of experts that it keeps in part; with a theta for each layer, and with one for all."""
    run = runs.read("moepic", theta="0.5")
    prefetches(run, {1})
    for targets in run.targets:
        assert set(targets.ravel()) == {0, 1}
        assert targets.sum() == CAPACITY - 4 * TILES, "two layers' predicted experts have a reserve"
    assert run.swapped(1) > 0
    assert {cut for d in run.decoded for cut in d.cut} == {TILES}
    configured = runs.read("moepic")
    prefetches(configured, {1})
    assert all(0.9 * CAPACITY < targets.sum() + 4 * TILES <= CAPACITY for targets in configured.targets)


def test_adapmoe_s_gate_skips_by_its_threshold(runs: PresetRuns) -> None:
    run, kept = runs.read("adapmoe"), runs.read("adapmoe", threshold="0")
    assert run.decode["fidelity"]["skipped"] > 0
    assert run.counted["prefill"]["fidelity"]["skipped"] == 0
    assert sum(run.decode["layers"]["active"]) < sum(kept.decode["layers"]["active"])


def test_adapmoe_looks_ahead_beyond_resident_layers_and_to_the_next_token(runs: PresetRuns) -> None:
    """Layers whose predicted experts are all resident are passed; from the last layer the trained gate
    predicts the next token's first layer, where that is not resident as a whole."""
    prefetches(runs.read("adapmoe", sizes="even"), {1, 2, 1 - LAYERS}, rarely=[3])


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


def test_hybrimoe_prefetches_by_impact_and_evicts_by_score(runs: PresetRuns) -> None:
    run = runs.read("hybrimoe")
    prefetches(run, {1, 2, 3})
    assert max(len(p.experts) for p in run.predicted) == 1
    assert run.swapped(1) > 0
    assert both_sides(run)


def test_mixtral_offloading_prefetches_and_keeps_the_recently_used(runs: PresetRuns) -> None:
    run, demanded = runs.read("mixtral-offloading"), runs.read("on-demand")
    prefetches(run, {1})
    assert run.decode["fetched_tiles"] < demanded.decode["fetched_tiles"]
    assert demanded.decode["resident_tiles"] > 0
    after, end = (targets > 0 for targets in demanded.targets[1:])
    assert (after & ~end).any(), "evictions"


def test_pre_gated_layers_are_fetched_before_they_begin(runs: PresetRuns) -> None:
    run = runs.read("pre-gated")
    prefetches(run, {1})
    counted = run.decode["fidelity"]
    assert counted["predicted"] == pytest.approx(counted["weight"] * (LAYERS - 1) / LAYERS)
    assert run.decode["wasted_tiles"] == 0


def test_whole_layers_are_there_when_they_begin(runs: PresetRuns) -> None:
    run = runs.read("whole-layer")
    prefetches(run, {1})
    assert max(len(p.experts) for p in run.predicted) == EXPERTS
    assert not any(any(d.missing) for d in run.decoded)


def test_fiddler_fetches_where_that_is_faster(runs: PresetRuns) -> None:
    """By the number of rows of a missing expert."""
    run = runs.read("fiddler")
    of_missing = {c for d in run.decoded for c, missing in zip(d.cut, d.missing, strict=True) if missing}
    assert of_missing == {0, TILES}
    assert run.swapped(0) == run.swapped(1) == 0


def test_layerwise_computes_each_layer_where_it_is(runs: PresetRuns) -> None:
    cuts = [
        {c for d in runs.read("layerwise").decoded if d.layer == layer for c in d.cut}
        for layer in range(LAYERS)
    ]
    assert cuts == [{TILES}] * 4 + [{0}] * 4
    assert runs.read("layerwise").decode["fetched_tiles"] == 0


def test_bandwidth_split_divides_experts(runs: PresetRuns) -> None:
    run = runs.read("bandwidth-split")
    assert {c for d in run.decoded for c in d.cut} == set(range(TILES + 1))
    assert run.decode["fetched_tiles"] > 0
