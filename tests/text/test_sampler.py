"""Sampler: its probabilities against transformers' processors, its draws against its probabilities."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.errors import PipelineError, RequestError
from pipeline.text.generation_defaults import validate
from pipeline.text.logprobs import best_margin, log_softmax
from pipeline.text.sampler import Sampler
from protocol.messages import Sampling


def oracle(sampling: Sampling, logits: NDArray[np.float32], previous: list[int]) -> NDArray[np.float64]:
    """Probabilities [V] by transformers' processors, in the order in which its generation applies them. In
    float64, so that rounding moves no sum across a limit."""
    import torch
    from transformers.generation import logits_process as lp

    processors: list[lp.LogitsProcessor] = []
    if sampling.repetition_penalty != 1:
        processors.append(lp.RepetitionPenaltyLogitsProcessor(penalty=sampling.repetition_penalty))
    if sampling.temperature != 1:
        processors.append(lp.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(lp.TopKLogitsWarper(top_k=sampling.top_k))
    if sampling.top_p < 1:
        processors.append(lp.TopPLogitsWarper(top_p=sampling.top_p))
    if sampling.min_p:
        processors.append(lp.MinPLogitsWarper(min_p=sampling.min_p))
    scores = torch.tensor(logits, dtype=torch.float64)[None]
    for processor in processors:
        scores = processor(torch.tensor([previous], dtype=torch.int64), scores)
    return torch.softmax(scores, dim=-1)[0].numpy()


def probabilities(sampler: Sampler, logits: NDArray[np.float32], previous: list[int]) -> NDArray[np.float64]:
    ids, weights = sampler.candidates(logits, previous)
    assert np.array_equal(ids, np.unique(ids))
    full = np.zeros(len(logits))
    full[ids] = weights / weights.sum()
    return full


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, 50, 400, 100_000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.1, 0.7, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
)


@settings(max_examples=80)
@given(
    sampling=SAMPLINGS,
    size=st.sampled_from([1, 2, 7, 100, 1000, 5000, 33_001]),
    spread=st.sampled_from([0.01, 1.0, 4.0, 20.0]),
    seed=st.integers(0, 2**16),
)
def test_probabilities_equal_those_of_transformers(sampling, size, spread, seed) -> None:
    validate(sampling)
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=size) * spread).astype(np.float32)
    logits[rng.random(size) < 0.05] = -np.inf
    logits[0] = 1.0
    logits = logits + np.arange(size, dtype=np.float32) * np.float32(1e-7)
    previous = rng.integers(0, size, 30).tolist()
    before = logits.copy()
    sampler = Sampler(sampling, 0)
    for length in (10, 30):  # the history grows from call to call
        ours = probabilities(sampler, logits, previous[:length])
        theirs = oracle(sampling, logits, previous[:length])
        # transformers does not define which of several equal logits top-p keeps; see the test of ties
        if len(np.unique(logits[np.isfinite(logits)])) == np.isfinite(logits).sum():
            assert np.array_equal(ours > 0, theirs > 0)
            assert np.allclose(ours, theirs, rtol=1e-9, atol=1e-15)
        assert np.allclose(np.sort(ours), np.sort(theirs), rtol=1e-9, atol=1e-15)
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("top_k", [0, 1, 3, 300])
def test_ties_at_a_limit(top_k: int) -> None:
    """top-k keeps all ties of its last token, as transformers does; top-p those of smaller id."""
    logits = np.array([1, 3, 3, 2, 3, 2, 0] * 500, dtype=np.float32)
    sampling = Sampling(temperature=1.0, top_k=top_k)
    ours = probabilities(Sampler(sampling, 0), logits, [])
    assert np.allclose(ours, oracle(sampling, logits, []), rtol=1e-9)
    if top_k:
        assert np.array_equal(np.flatnonzero(ours), np.flatnonzero(logits == 3))
    share = 1200.5 / 1500 * ours[logits == 3].sum()
    kept, _ = Sampler(Sampling(temperature=1.0, top_k=top_k, top_p=share), 0).candidates(logits, [])
    assert np.array_equal(kept, np.flatnonzero(logits == 3)[:1201])


def test_top_p_ends_with_the_token_that_reaches_it() -> None:
    logits = np.log(np.array([0.25, 0.5, 0.125, 0.125], dtype=np.float32))
    for share, kept in ((0.5, [1]), (0.75, [0, 1]), (0.76, [0, 1, 2])):
        assert Sampler(Sampling(temperature=1.0, top_p=share), 0).candidates(logits, [])[0].tolist() == kept


def test_temperature_0_is_greedy() -> None:
    logits = np.array([1, 5, 5, -2], dtype=np.float32)
    # filters have no effect, and the first of equal logits is chosen
    assert Sampler(Sampling(top_k=3, top_p=0.1, min_p=0.5), 0).next(logits, [1]) == 1
    sampler = Sampler(Sampling(repetition_penalty=2.0), 0)
    assert sampler.next(logits, []) == 1
    assert sampler.next(logits, [1]) == 2
    assert sampler.next(logits, [1, 2, 2]) == 1
    assert Sampler(Sampling(repetition_penalty=10.0), 0).next(logits, [1, 2]) == 0
    assert Sampler(Sampling(repetition_penalty=4.0), 0).next(-logits, [3, 0]) == 3


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
    ],
)
def test_draws_follow_the_probabilities(sampling: Sampling) -> None:
    """A chi-square statistic within six standard deviations of its mean: a correct sampler always passes
    (the seed is fixed), and a sampler that is wrong by a few per cent fails."""
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=60) * 1.5).astype(np.float32)
    previous = [3, 4, 5]
    sampler = Sampler(sampling, 11)
    wanted = probabilities(sampler, logits, previous)
    draws = 8_000
    counts = Counter(sampler.next(logits, previous) for _ in range(draws))
    assert all(wanted[token] > 0 for token in counts)
    expected = wanted[wanted > 0] * draws
    found = np.array([counts[int(token)] for token in np.flatnonzero(wanted)])
    statistic = float(((found - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    assert abs(statistic - freedom) < 6 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [1.0, 0.3, 1e-300, 1e300])
@pytest.mark.parametrize("size", [1, 255, 256, 257, 33_001])
def test_draw_from_all_tokens_falls_where_the_probabilities_say(size: int, temperature: float) -> None:
    rng = np.random.default_rng(size)
    logits = (rng.normal(size=size) * 4).astype(np.float32)
    logits[rng.random(size) < 0.3] = -np.inf
    logits[-1] = 2.0
    sampling = Sampling(temperature=temperature)
    wanted = probabilities(Sampler(sampling, 0), logits, [])
    ends = np.cumsum(wanted)
    sampler, numbers = Sampler(sampling, 5), np.random.default_rng(5)
    for _ in range(200):
        token, drawn = sampler.next(logits, []), numbers.random()
        assert wanted[token] > 0
        assert ends[token] - wanted[token] - 1e-6 <= drawn <= ends[token] + 1e-6


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_resumed_sampler_continues_as_the_first(temperature: float) -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(30, 500)).astype(np.float32)
    sampling = Sampling(temperature=temperature, top_p=0.95, repetition_penalty=1.3)
    prompt = [3, 4]
    tokens = list(prompt)
    first = Sampler(sampling, 5)
    for row in rows:
        tokens.append(first.next(row, tokens))
    for drawn in range(len(rows)):
        again = tokens[: len(prompt) + drawn]
        second = Sampler(sampling, 5, drawn)
        for row in rows[drawn:]:
            again.append(second.next(row, again))
        assert again == tokens


def test_extreme_settings_that_are_allowed() -> None:
    logits = np.array([-1e38, 1e38, 3e38, -np.inf], dtype=np.float32)
    for sampling in (
        Sampling(temperature=1e-300),
        Sampling(temperature=1.0, top_p=1e-300, repetition_penalty=100.0),
        Sampling(temperature=1e-5, top_k=10**18, min_p=1.0),
        Sampling(temperature=1.0, repetition_penalty=0.01),
    ):
        validate(sampling)
        assert Sampler(sampling, 0).next(logits, [0, 1, 2, 3] if sampling.top_k else []) == 2
    validate(Sampling(temperature=1e300))
    assert Sampler(Sampling(temperature=1e300), 0).next(logits, []) in range(4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_raise(temperature: float, bad: float) -> None:
    logits = np.array([1, bad, 2], dtype=np.float32)
    for row in (logits, np.full(3, -np.inf, dtype=np.float32)):
        with pytest.raises(PipelineError, match="not finite"):
            Sampler(Sampling(temperature=temperature, top_k=2), 0).next(row, [])


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (Sampling(temperature=-0.1), "temperature is -0.1"),
        (Sampling(temperature=float("nan")), "temperature is nan"),
        (Sampling(temperature=float("inf")), "temperature is inf"),
        (Sampling(top_k=-1), "top_k is -1"),
        (Sampling(top_p=0.0), "top_p is 0.0; it must be above 0"),
        (Sampling(top_p=1.01), "top_p is 1.01"),
        (Sampling(min_p=-0.1), "min_p"),
        (Sampling(min_p=float("nan")), "min_p"),
        (Sampling(repetition_penalty=0.0), "repetition_penalty"),
        (Sampling(repetition_penalty=float("inf")), "repetition_penalty"),
        (Sampling(seed=-1), "seed is -1"),
    ],
)
def test_invalid_settings_are_refused(sampling: Sampling, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        validate(sampling)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("logits", "rival", "wanted"),
    [
        ([1.0, 3.5, 2.0], 0, (2.5, 0)),
        ([1.0, 3.5, 2.0], 1, (0.0, 1)),
        ([1.0, 3.5, 2.0], 2, (1.5, 2)),
        ([5.0], None, (0.0, -1)),
        ([1.0, 3.5, 2.0], None, (1.5, 2)),
        ([3.0, 1.0, 3.0], None, (0.0, 2)),
        ([2.0, 5.0, 2.0], None, (3.0, 0)),
        ([4.0, 1.0, 2.0], None, (2.0, 2)),
        ([1.0, 2.0, 4.0], None, (2.0, 1)),
    ],
)
def test_margin_and_runner_up(logits: list[float], rival: int | None, wanted: tuple[float, int]) -> None:
    assert best_margin(np.array(logits, np.float32), rival) == wanted


def test_log_softmax_of_each_row() -> None:
    rows = (np.random.default_rng(0).normal(size=(4, 9)) * 3).astype(np.float32)
    wide = rows.astype(np.float64)
    wanted = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    assert np.allclose(log_softmax(rows), wanted, rtol=1e-6, atol=1e-6)
    assert np.allclose(log_softmax(rows + np.float32(1e4)), wanted, atol=1e-2)  # exp alone would overflow
    assert log_softmax(rows).dtype == np.float32
