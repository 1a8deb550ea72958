"""The model's own routing equals transformers' Mixtral router."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from pipeline.models.routing import top_k_softmax


def by_transformers(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights and experts [R, k] that transformers' router takes from these logits: its input is a unit
    vector for each row, and its matrix holds the logits."""
    rows, experts = logits.shape
    router = MixtralTopKRouter(
        MixtralConfig(hidden_size=rows, num_local_experts=experts, num_experts_per_tok=k)
    ).eval()
    with torch.no_grad():
        router.weight.copy_(torch.from_numpy(logits.T.copy()))
        _, weights, chosen = router(torch.eye(rows))
    return weights.numpy(), chosen.numpy()


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
def test_random_logits_route_as_in_transformers(k, scale) -> None:
    logits = (np.random.default_rng(k).standard_normal((200, 8)) * scale).astype(np.float32)
    ours = top_k_softmax(logits, k)
    weights, chosen = by_transformers(logits, k)
    np.testing.assert_array_equal(ours.experts, chosen)
    np.testing.assert_allclose(ours.weights, weights, rtol=2e-6, atol=1e-7)
    assert (ours.experts.dtype, ours.weights.dtype) == (np.int32, np.float32)


FEW_VALUES = arrays(np.float32, (3, 6), elements=st.sampled_from([-1.0, 0.0, 0.5, 2.0]))


@settings(max_examples=40, deadline=None)
@given(FEW_VALUES, st.integers(1, 6))
def test_of_equal_logits_the_lower_expert_is_taken(logits, k) -> None:
    ours = top_k_softmax(logits, k)
    for row, experts in zip(logits, ours.experts, strict=True):
        assert experts.tolist() == sorted(range(6), key=lambda e: (-row[e], e))[:k]
    # which of equals transformers takes is not its promise, but their weights are
    weights, _ = by_transformers(logits, k)
    np.testing.assert_allclose(ours.weights, weights, rtol=2e-6)


def test_large_logits_do_not_overflow() -> None:
    routing = top_k_softmax(np.array([[3e38, -3e38, 3e38]], np.float32), 2)
    assert routing.experts.tolist() == [[0, 2]]
    assert routing.weights.tolist() == [[0.5, 0.5]]
