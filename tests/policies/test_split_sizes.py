"""MoEpic's configuration: each step against brute force."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.policies.split import Division, LayerLoads, configured


@st.composite
def loads(draw: st.DrawFn, tiles: int | None = None, experts: int | None = None) -> LayerLoads:
    experts = experts or draw(st.integers(1, 6))
    shares = np.cumsum([0, *sorted((draw(st.integers(0, 9)) for _ in range(experts)), reverse=True)])
    return LayerLoads(
        hits=(shares / max(shares[-1], 1)).tolist(),  # each further expert adds no more than the one before
        used=draw(st.integers(1, min(experts, 4))),
        accuracy=draw(st.sampled_from([0.0, 0.3, 0.8, 1.0])),
        window=draw(st.sampled_from([0.0, 1.0, 3.0, 5.5, 100.0])),
        tile=draw(st.sampled_from([0.1, 0.5, 1.0])),
        fetch=draw(st.sampled_from([0.0, 0.2])),
        tiles=tiles or draw(st.integers(1, 6)),
    )


def ways(one: LayerLoads, kept: int, cached: int) -> Iterator[tuple[float, list[int]]]:
    """Yields in which ways the used experts are cached or not: the probability, and the tiles of each that
    are missing."""
    hit = one.hits[cached]
    for each in product([True, False], repeat=one.used):
        missing = [one.tiles - kept if here else one.tiles for here in each]
        yield prod(hit if here else 1 - hit for here in each), missing


def exposed(one: LayerLoads, kept: int, cached: int) -> float:
    """Over all ways in which the experts are cached or not, and all are predicted right or none."""
    found = 0.0
    for share, missing in ways(one, kept, cached):
        load = sum(one.fetch + one.tile * count for count in missing if count)
        found += share * one.accuracy * max(0.0, load - one.window) + share * (1 - one.accuracy) * load
    return found


@settings(max_examples=200)
@given(one=loads(), data=st.data())
def test_a_layer_s_division_is_the_best_one(one: LayerLoads, data: st.DataObject) -> None:
    experts = len(one.hits) - 1
    budget = data.draw(st.integers(0, one.tiles * experts + 3))
    found = one.division(budget)
    assert found.kept * found.experts <= budget
    every = {
        (kept, cached): exposed(one, kept, cached)
        for kept in range(1, one.tiles + 1)
        for cached in range(experts + 1)
        if kept * cached <= budget
    }
    assert found.seconds == pytest.approx(every[found.kept, found.experts], abs=1e-9)
    assert found.seconds == pytest.approx(min(every.values()), abs=1e-9)


def total(divisions: list[Division]) -> float:
    return sum(division.seconds for division in divisions)


@st.composite
def models(draw: st.DrawFn) -> list[LayerLoads]:
    tiles, experts = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    return [draw(loads(tiles, experts)) for _ in range(draw(st.integers(1, 4)))]


@settings(max_examples=150)
@given(layers=models(), data=st.data())
def test_moves_end_where_none_helps(layers: list[LayerLoads], data: st.DataObject) -> None:
    """From the even division the sum only falls, and between no two layers an expert's worth would help."""
    tiles, count = layers[0].tiles, len(layers)
    most = len(layers[0].hits) - 1
    budget = data.draw(st.integers(0, tiles * most * count))
    found = configured(layers, budget)
    each, more = divmod(budget // tiles, count)
    even = [each * tiles + tiles * (place < more) for place in range(count)]
    even[0] += budget % tiles
    assert (
        total(found) <= total([one.division(given) for one, given in zip(layers, even, strict=True)]) + 1e-9
    )
    # every division of the tiles in whole experts' worth, as the moves reach them
    reached = []
    for counts in product(range(budget // tiles + 1), repeat=count):
        if sum(counts) == budget // tiles:
            given_tiles = [tiles * c + budget % tiles * (place == 0) for place, c in enumerate(counts)]
            divided = [one.division(given) for one, given in zip(layers, given_tiles, strict=True)]
            reached.append((counts, divided))
    match = [counts for counts, divided in reached if divided == found]
    assert match
    assert any(
        all(
            total(divided) >= total(found) - 1e-9
            for counts, divided in reached
            if sum(abs(a - b) for a, b in zip(counts, start, strict=True)) == 2
        )
        for start in match
    )


def test_parts_of_more_experts_hide_more_where_whole_ones_are_too_long() -> None:
    """Two experts of four tiles are used, and the layer before has time for four tiles. With two of four
    experts cached, a token that hits none waits; with half of each of the four, every token's load fits."""
    hits = [0.0, 0.25, 0.5, 0.75, 1.0]
    one = LayerLoads(hits, used=2, accuracy=1.0, window=4.0, tile=1.0, fetch=0.0, tiles=4)
    assert one.exposed(4, 2) == pytest.approx(1.0)
    assert one.division(8) == Division(2, 4, 0.0)
    assert one.division(16) == Division(4, 4, 0.0)
    unpredicted = LayerLoads(hits, used=2, accuracy=0.0, window=4.0, tile=1.0, fetch=0.0, tiles=4)
    assert unpredicted.division(8).kept == 4, "nothing is hidden: whole experts are as good"


def test_tiles_move_to_the_layer_that_is_not_predicted() -> None:
    hits = [0.0, 0.4, 0.7, 0.9, 1.0]
    layers = [LayerLoads(hits, 2, accuracy, 9.0, 1.0, 0.0, 4) for accuracy in (0.0, 1.0, 1.0)]
    found = configured(layers, 24)
    assert found[0] == Division(4, 4, 0.0)
    assert total(found) == 0.0


def ready_of(one: LayerLoads, kept: int, cached: int) -> float:
    """Over all ways in which the experts are cached or not, and all are predicted right or none."""
    found = 0.0
    for share, missing in ways(one, kept, cached):
        lacks = sorted(missing)
        whole = lacks.count(0)
        time, landed = 0.0, whole
        for missing in lacks[whole:]:
            time += one.fetch + one.tile * missing
            landed += time <= one.window + 1e-9
        found += share * (one.accuracy * landed + (1 - one.accuracy) * whole)
    return found


@settings(max_examples=100)
@given(one=loads(), data=st.data())
def test_the_paper_s_objective_has_most_experts_ready(one: LayerLoads, data: st.DataObject) -> None:
    """No division of the budget has more of a step's experts whole when their layer begins."""
    experts = len(one.hits) - 1
    budget = data.draw(st.integers(0, one.tiles * experts + 3))
    found = one.division(budget, "ready")
    assert found.seconds == pytest.approx(one.exposed(found.kept, found.experts))
    every = [ready_of(one, kept, min(experts, budget // kept)) for kept in range(1, one.tiles + 1)]
    assert ready_of(one, found.kept, found.experts) == pytest.approx(max(every), abs=1e-6)


def test_the_two_objectives_differ() -> None:
    """The window has time for one of four tiles. With two whole experts one of two is ready at the mean; with
    halves of four none is, and less is left to load."""
    one = LayerLoads([0.0, 0.25, 0.5, 0.75, 1.0], 2, accuracy=1.0, window=1.0, tile=1.0, fetch=0.0, tiles=4)
    assert one.division(8) == Division(2, 4, 3.0)
    assert one.ready(2, 4) == 0
    assert one.division(8, "ready") == Division(4, 2, 3.25)
    assert one.ready(4, 2) == pytest.approx(1)
