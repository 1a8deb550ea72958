"""Routing that is drawn from a profile has the locality that was published for its model."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.models.routing import Softmax
from pipeline.policies.view import ModelShape
from pipeline.traces.synthetic import PROFILES, SyntheticText
from pipeline.traces.trace import Header

Used = NDArray[np.bool_]  # [tokens, L, E]


def drawn(name: str, experts: int, top_k: int, layers: int = 4) -> SyntheticText:
    shape = ModelShape(layers, experts, 1, top_k)
    return SyntheticText(Header(name, "0" * 16, "0" * 16, shape, 1, Softmax(top_k, True), 0), PROFILES[name])


def used(text: SyntheticText, tokens: int) -> Used:
    """The experts that each token of another text uses."""
    steps = text.steps(prompt=0, chunk=1, tokens=tokens)
    chosen = np.array([[layer.router_routing.experts[0] for layer in step.layers] for step in steps])
    used = np.zeros((*chosen.shape[:2], text.header.shape.experts), bool)
    np.put_along_axis(used, chosen, True, axis=2)
    return used


def repeated(used: Used, within: int = 1) -> float:
    """The share of uses of which the expert was used in one of so many tokens before."""
    before = np.zeros_like(used[within:])
    for back in range(1, within + 1):
        before |= used[within - back : -back]
    return float((used[within:] & before).sum() / used[within:].sum())


def lru(used: Used, slots: int, warm: int) -> float:
    """The hits of a cache of so many experts a layer, after so many tokens."""
    hits, last = 0, np.full(used.shape[1:], -1)
    for token, now in enumerate(used):
        if token >= warm:
            latest = np.argsort(-last, axis=1, kind="stable")[:, :slots]
            held = np.zeros_like(now)
            np.put_along_axis(held, latest, True, axis=1)
            hits += int((now & held & (last >= 0)).sum())
        last[now] = token
    return hits / int(used[warm:].sum())


def share_of(counts: NDArray[np.int64], chosen: NDArray[np.intp]) -> float:
    """The share of the uses that the chosen experts [L, n] of each layer have."""
    return float(np.take_along_axis(counts, chosen, axis=1).sum() / counts.sum())


def test_mixtrals_tokens_repeat_experts_most_in_the_middle() -> None:
    """Its paper's table 5, StackExchange: first or second choice repeated, of layers 0, 15 and 31."""
    every = used(drawn("mixtral-8x7b", 8, 2, layers=33), 600)
    either = (every[1:] & every[:-1]).any(axis=2).mean(axis=0)
    found = [either[part].mean() for part in (slice(0, 2), slice(15, 18), slice(31, 33))]
    assert found == pytest.approx([0.482, 0.646, 0.536], abs=0.04)


def test_qwen3_reuses_what_a_text_has_used() -> None:
    text = drawn("qwen3-30b-a3b", 128, 8)
    of_others = text.counts(2000)
    every = used(text, 400)
    assert repeated(every) == pytest.approx(0.45, abs=0.03)
    assert repeated(every, within=8) == pytest.approx(0.80, abs=0.03)
    assert (missed := 1 - lru(every, 51, warm=64)) == pytest.approx(1 - 0.933, abs=0.02)
    static = np.argsort(-of_others, axis=1)[:, :51]  # misses four to five times as often
    assert (1 - share_of(every.sum(axis=0), static)) / missed == pytest.approx(4.5, abs=1)


def test_caches_of_qwen38_flash_next_hit_as_often_as_it_was_measured() -> None:
    text = drawn("qwen3.8-flash-next", 512, 10, layers=2)
    known = np.argsort(-text.counts(4000), axis=1)[:, :32]
    assert share_of(text.counts(4000), known) == pytest.approx(0.10, abs=0.02)
    every = used(text, 300)
    found = [lru(every, slots, warm=100) for slots in (64, 128)]
    assert found == pytest.approx([0.67, 0.81], abs=0.04)


@pytest.mark.slow
def test_caches_of_qwen38_flash_next_fill_as_it_was_measured_in_another_run() -> None:
    every = used(drawn("qwen3.8-flash-next-cold", 512, 10, layers=2), 300)
    found = [lru(every, slots, warm=0) for slots in (93, 186, 279, 372, 512)]
    assert found == pytest.approx([0.435, 0.62, 0.72, 0.789, 0.85], abs=0.05)


def test_gemma4s_uses_are_uneven_and_repeat() -> None:
    every = used(drawn("gemma-4-26b-a4b", 128, 8), 400)
    counts = np.sort(every.sum(axis=0), axis=1)
    gini = 1 - 2 * (counts.cumsum(axis=1) / counts.sum(axis=1, keepdims=True)).mean() + 1 / 128
    assert gini == pytest.approx(0.76, abs=0.03)
    assert repeated(every) == pytest.approx(0.44, abs=0.03)


def test_half_of_olmoes_experts_have_three_quarters_of_the_uses() -> None:
    counts = used(drawn("olmoe-1b-7b", 64, 8), 1000).sum(axis=0)
    assert share_of(counts, np.argsort(-counts, axis=1)[:, :32]) == pytest.approx(0.765, abs=0.02)
