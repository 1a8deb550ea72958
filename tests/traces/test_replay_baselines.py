"""Policies that only a replay has, against what no policy can beat; and the verdicts of the papers' pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import inf
from typing import Any

import numpy as np
import pytest
from replay_cases import COSTS
from trace_files import drawn_steps, in_order, make_header, scripted_steps

from benchmarks.baselines import policy_of
from benchmarks.papers import Claim
from pipeline.policies.view import ModelShape
from pipeline.replay.machine import DividedText
from pipeline.replay.steps import counts_of

HEADER = make_header(ModelShape(layers=2, experts=5, tiles=1, top_k=1))


def text_of(steps: Sequence[Sequence[Sequence[int]]]) -> DividedText:
    return DividedText(scripted_steps(HEADER, steps), 0, np.ones((2, 5), np.int64))


def test_belady_misses_as_seldom_as_the_best_of_all_caches() -> None:
    used = np.random.default_rng(4).integers(0, 5, (14, 2)).tolist()
    text = text_of([[[expert] for expert in step] for step in used])
    accesses = [(layer, expert) for step in used for layer, expert in enumerate(step)]

    @cache
    def fewest(place: int, held: frozenset[tuple[int, int]]) -> int:
        if place == len(accesses):
            return 0
        key = accesses[place]
        if key in held:
            return fewest(place + 1, held)
        entered = [held - {victim} | {key} for victim in held] if len(held) == 3 else [held | {key}]
        return 1 + min(fewest(place + 1, after) for after in (held, *entered))

    outcome = text.replay(HEADER, policy_of("on-demand+belady", text), COSTS, 3)
    assert outcome.decode.fetched_tiles == fewest(0, frozenset())


@pytest.mark.parametrize("others", ["on-demand", "on-demand+least-stale", "on-demand:sizes=even"])
def test_belady_hits_no_less_than_others(others: str) -> None:
    header = make_header(ModelShape(layers=4, experts=8, tiles=2, top_k=2))
    steps = in_order(drawn_steps(header, 0, 20), drawn_steps(header, 8, 60))
    text = DividedText(steps, 20, counts_of(steps[:20], 4, 8))
    hits = [
        text.replay(header, policy_of(words, text), COSTS, 24).decode.hits.sum()
        for words in ("on-demand+belady", others)
    ]
    assert hits[0] > hits[1]


def test_least_stale_keeps_what_the_latest_pass_used() -> None:
    """Layer 0 uses expert 0 and then 1, layer 1 always 2: when 1 enters a cache of two, the expert of the
    layer that comes next stays."""
    text = text_of([[[0], [2]], [[1], [2]], [[1], [2]]])
    outcome = text.replay(HEADER, policy_of("on-demand+least-stale", text), COSTS, 2)
    assert outcome.decode.hits.tolist() == [1, 2]


def test_sequences_prefetches_what_the_most_similar_earlier_text_used() -> None:
    header = make_header(ModelShape(layers=3, experts=6, tiles=1, top_k=1))
    texts = [scripted_steps(header, [[[a], [b], [c]]] * 8) for a, b, c in ((0, 1, 2), (3, 4, 5), (3, 4, 5))]
    text = DividedText(in_order(*texts), 16, np.ones((3, 6), np.int64))
    policy = policy_of("mixtral-offloading+sequences", text)
    decode = text.replay(header, policy, COSTS, 4).measured["decode"]
    assert decode["predicted_tiles"] == decode["useful_tiles"] > 0


def test_edge_moe_prefetches_what_followed_the_present_experts() -> None:
    """Of layer 1 expert 3 follows 0 of layer 0, and 4 follows 1, in turn."""
    steps = scripted_steps(HEADER, [[[0], [3]], [[1], [4]]] * 12)
    text, costs = DividedText(steps, 12, np.ones((2, 5), np.int64)), replace(COSTS, link=0.5)
    decode = text.replay(HEADER, policy_of("mixtral-offloading+edge-moe", text), costs, 4).measured["decode"]
    assert decode["useful_tiles"] == decode["predicted_tiles"] > 0


@pytest.mark.parametrize(("link", "on_host"), [(100.0, 4), (0.1, 0)])
def test_lightning_divides_by_a_share_that_was_planned_before(link: float, on_host: int) -> None:
    text = text_of([[[0], [2]], [[1], [3]]])
    policy = policy_of("fiddler+lightning:placement=empty", text)
    outcome = text.replay(HEADER, policy, replace(COSTS, link=link), 0)
    assert outcome.decode.host_tiles == on_host


@pytest.mark.parametrize(
    ("paper", "ours", "claimed", "verdict"),
    [
        ((1.35,), [1.3, 1.45], {}, "reproduced"),
        ((1.35,), [1.3, 1.1], {}, "in part"),
        ((1.35,), [1.05, 1.1], {}, "order alone"),
        ((1.35,), [1.3, 0.9], {}, "mixed"),
        ((1.35,), [0.9], {}, "**not reproduced**"),
        ((1.35,), [1.3, 0.9], {"open": True}, "undecidable"),
        ((1.35,), [0.9, 2.5], {"open": True}, "undecidable"),
        ((1.35,), [1.1, 1.2], {"open": True}, "in part"),
        ((1.35,), [], {}, "undecidable"),
        ((1.2, 1.4), [1.1, 1.5], {}, "reproduced"),
        ((1.0, inf), [1.2, 1.0], {}, "mixed"),
        ((-inf, 1.0), [0.9, 0.3], {}, "reproduced"),
        ((0.1,), [0.06, 0.01], {"unit": "gain"}, "in part"),
        ((0.1,), [0.03, -0.01], {"unit": "gain"}, "mixed"),
        ((1.0,), [0.5], {"unit": "%"}, "**not reproduced**"),
    ],
)
def test_verdict_follows_from_the_figures(
    paper: tuple[float, ...], ours: list[float], claimed: dict[str, Any], verdict: str
) -> None:
    assert Claim("headline", paper, ours, "", **claimed).verdict == verdict
