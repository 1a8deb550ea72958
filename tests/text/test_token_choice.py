"""Penalties and biases before a token is sampled, what is reported of a model's own logits, and greedy
choices made by a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.backbone.step import greedy, greedy_on_host
from pipeline.errors import PipelineError, RequestError
from pipeline.text.generation_defaults import validate_shaping
from pipeline.text.logprobs import Greedy, best_margin, log_softmax, top_logprobs, top_of_rows
from pipeline.text.sampler import Sampler, TokenChooser
from protocol.messages import Sampling, Shaping, TokenBias

GREEDY = Sampling()


def chooser(shaping: Shaping, *, prompt: int = 0, logprobs: int = -1) -> TokenChooser:
    return TokenChooser(Sampler(GREEDY, 0), shaping, prompt=prompt, logprobs=logprobs)


@given(
    st.lists(st.integers(0, 7), max_size=12),
    st.lists(st.integers(0, 7), max_size=4),
    st.floats(-2, 2, width=16),
    st.floats(-2, 2, width=16),
    st.dictionaries(st.integers(0, 7), st.floats(-4, 4, width=16), max_size=3),
)
def test_logits_are_changed_as_the_formula_says(
    answer: list[int], prompt: list[int], presence: float, frequency: float, biases: dict[int, float]
) -> None:
    logits = np.linspace(1, -1, 8).astype(np.float32)[np.random.default_rng(1).permutation(8)]
    shaping = Shaping(presence, frequency, tuple(TokenBias(*pair) for pair in biases.items()))
    chosen = chooser(shaping, prompt=len(prompt)).next(logits, [*prompt, *answer])
    wanted = [
        logits[token]
        - presence * (token in answer)
        - frequency * answer.count(token)
        + biases.get(token, 0.0)
        for token in range(8)
    ]
    assert wanted[chosen.token] == pytest.approx(max(wanted), abs=1e-5)
    assert chosen.margin == pytest.approx(float(np.sort(logits)[-1] - np.sort(logits)[-2]))  # before them


def test_counts_grow_with_the_answer_and_resume_as_they_were() -> None:
    logits = np.array([1.0, 0.9, 0.2], np.float32)
    shaping = Shaping(frequency_penalty=0.08)
    first, tokens = chooser(shaping, prompt=1), [0]
    for _ in range(20):
        tokens.append(first.next(logits, tokens).token)
    assert tokens[1:5] == [0, 0, 1, 0]
    assert chooser(shaping, prompt=1).next(logits, tokens).token == first.next(logits, tokens).token


def test_reported_probabilities_are_the_models_own() -> None:
    logits = np.random.default_rng(3).normal(size=5000).astype(np.float32)
    wanted = log_softmax(logits[None])[0]
    choice = chooser(Shaping(bias=(TokenBias(7, 50.0),)), logprobs=3).next(logits, [])
    assert choice.token == 7
    assert choice.logprob == pytest.approx(float(wanted[7]), abs=1e-5)
    assert choice.top_tokens == tuple(np.argsort(-wanted, kind="stable")[:3])
    assert choice.top_logprobs == pytest.approx(sorted(wanted, reverse=True)[:3], abs=1e-5)
    assert top_logprobs(logits, 1, 0)[1] == ()
    ids, values = top_of_rows(wanted[None], 2)
    assert ids[0].tolist() == list(choice.top_tokens[:2])
    assert values[0] == pytest.approx(choice.top_logprobs[:2], abs=1e-5)
    assert top_of_rows(wanted[None], 0)[0].shape == (1, 0)


@pytest.mark.parametrize(
    ("shaping", "logprobs", "word"),
    [
        (Shaping(presence_penalty=1e9), -1, "presence_penalty"),
        (Shaping(frequency_penalty=-1e9), -1, "frequency_penalty"),
        (Shaping(bias=(TokenBias(1, 1e9),)), -1, "bias"),
        (Shaping(bias=(TokenBias(1, 1.0),) * 5000), -1, "biases"),
        (Shaping(), 1000, "logprobs"),
        (Shaping(), -2, "logprobs"),
    ],
)
def test_values_that_cannot_be_served(shaping: Shaping, logprobs: int, word: str) -> None:
    with pytest.raises(RequestError, match=word):
        validate_shaping(shaping, logprobs)


NUMBERS = st.one_of(
    st.sampled_from([-np.inf, np.inf, np.nan, 0.0, -0.0, 1.0, 3.4e38, -3.4e38]),
    st.floats(-3, 3, width=32),
)


@given(st.integers(1, 9).flatmap(lambda n: st.lists(st.lists(NUMBERS, min_size=n, max_size=n), min_size=1)))
def test_choices_are_the_samplers(rows: list[list[float]]) -> None:
    """Ties, infinities and numbers that are none, in any place."""
    logits = np.array(rows, np.float32)
    on_host, before = greedy_on_host(logits), logits.copy()
    np.testing.assert_array_equal(logits, before)
    on_device = greedy(torch.from_numpy(logits)).numpy()
    for row, made in zip([*logits, *logits], [*on_host, *on_device], strict=True):
        try:
            token = Sampler(Sampling(0.0), 0).next(row, ())
        except PipelineError as e:
            with pytest.raises(PipelineError, match=str(e)):
                Greedy.read(made, len(row))
            continue
        assert Greedy.read(made, len(row)) == (token, *best_margin(row))


def test_a_large_vocabularys_tokens_keep_their_bits() -> None:
    logits = torch.zeros(2, (1 << 18) + 3)
    logits[0, -1], logits[0, -2], logits[1, 1] = 2.0, 1.5, 1.0
    for choices in (greedy(logits).numpy(), greedy_on_host(logits.numpy())):
        first, second = (Greedy.read(row, logits.shape[1]) for row in choices)
        assert first == (logits.shape[1] - 1, 0.5, logits.shape[1] - 2)
        assert second == (1, 1.0, 0)
