"""Routers by themselves: ties, batches, gradients. Each family routes as transformers in tests/parity."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV3Config,
    PhimoeConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter

from pipeline.models.routing import Scored, Softmax, SparseMixer
from pipeline.policies.view import Router


def routed(
    router: torch.nn.Module, logits: np.ndarray, *arguments: torch.Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Return weights and experts [R, k] of a transformers router for these logits: its input is a unit
    vector for each row, and its matrix holds the logits."""
    with torch.no_grad():
        router.weight.copy_(torch.from_numpy(logits.T.copy()))
        _, weights, chosen = router.eval()(torch.eye(len(logits)), *arguments)
    return weights.numpy(), chosen.numpy()


def equal(router: Router, theirs: torch.nn.Module, logits: np.ndarray, *arguments: torch.Tensor) -> None:
    """Assert the same experts with the same weights, in any order; experts of weight 0 may differ."""
    ours = router(logits, 0)
    assert (ours.experts.dtype, ours.weights.dtype) == (np.int32, np.float32)
    weights, chosen = routed(theirs, logits, *arguments)
    for found, wanted in ((ours.experts, ours.weights), (chosen, weights)):
        assert found.shape == wanted.shape
    dense = np.zeros((2, *logits.shape), np.float32)
    np.put_along_axis(dense[0], ours.experts.astype(np.int64), ours.weights, axis=1)
    np.put_along_axis(dense[1], chosen, weights, axis=1)
    np.testing.assert_allclose(dense[0], dense[1], rtol=2e-6, atol=1e-7)


def random_logits(seed: int, rows: int, experts: int, scale: float) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, experts)) * scale).astype(np.float32)


ROUTERS = [
    Softmax(3, rescaled=True),
    Softmax(3, rescaled=False, scale=2.5),
    Softmax(3, rescaled=True, scale=0.5, groups=4, best_groups=2),
    Softmax(5, rescaled=False, groups=4, best_groups=1),
    SparseMixer(0.2),
    Scored("sigmoid", 3, rescaled=True, scale=2.5, bias=random_logits(1, 1, 12, 0.2)),
    Scored("sigmoid", 5, rescaled=False, groups=4, best_groups=2, bias=random_logits(2, 1, 12, 5.0)),
    Scored("softmax", 4, rescaled=True, groups=3, best_groups=2, group_score="max"),
    Scored("sqrtsoftplus", 3, rescaled=True, expert_scale=np.abs(random_logits(3, 1, 12, 1.0))),
]


@pytest.mark.parametrize("row", [[0.0] * 4, [-1.0, -1.0, -1.0, -1.0], [2.0, 2.0, 0.0, 0.0], [0.0, 0, -1, -2]])
def test_sparsemixer_of_equal_logits(row) -> None:
    logits = np.array([row], np.float32)
    equal(SparseMixer(0.01), PhimoeTopKRouter(PhimoeConfig(hidden_size=1, num_local_experts=4)), logits)


@pytest.mark.parametrize("scale", [0.5, 8.0, 200.0])
@pytest.mark.parametrize(("groups", "best"), [(1, 1), (4, 2), (8, 5)])
@pytest.mark.parametrize("rescaled", [True, False])
def test_sigmoid_routing_with_a_bias_equals_deepseek(groups, best, rescaled, scale) -> None:
    logits = random_logits(groups, 100, 48, scale)
    bias = random_logits(1, 3, 48, 0.3)
    config = DeepseekV3Config(
        hidden_size=100,
        n_routed_experts=48,
        num_experts_per_tok=6,
        n_group=groups,
        topk_group=best,
        norm_topk_prob=rescaled,
        routed_scaling_factor=2.5,
    )
    ours = Scored("sigmoid", 6, rescaled, 2.5, groups, best, bias=bias)
    for layer in (0, 2):
        theirs = DeepseekV3TopkRouter(config)
        theirs.e_score_correction_bias.copy_(torch.from_numpy(bias[layer]))
        equal(replace(ours, bias=bias[layer : layer + 1]), theirs, logits)
    by_row = ours(logits, np.arange(100) % 3)
    for layer in range(3):
        alone = ours(logits[layer::3], layer)
        np.testing.assert_array_equal(by_row.experts[layer::3], alone.experts)
        np.testing.assert_array_equal(by_row.weights[layer::3], alone.weights)


def test_formulas_of_scores() -> None:
    logits = np.array([[-90.0, 0.0, 1.0, 30.0]], np.float32)
    wide = logits[0].astype(np.float64)
    for score, numbers in (
        ("sigmoid", 1 / (1 + np.exp(-wide))),
        ("sqrtsoftplus", np.sqrt(np.log1p(np.exp(wide)))),
        ("softmax", np.exp(wide) / np.exp(wide).sum()),
    ):
        router = Scored(
            score, 2, rescaled=False, scale=3.0, expert_scale=np.array([[1.0, 2, 4, 8]], np.float32)
        )
        routing = router(logits, 0)
        assert routing.experts.tolist() == [[3, 2]]
        np.testing.assert_allclose(routing.weights[0], 3 * numbers[[3, 2]] * [8, 4], rtol=1e-6)
        np.testing.assert_allclose(
            router.scores(logits, 0)[0], numbers / numbers.sum(), rtol=1e-6, atol=1e-19
        )
        given = router.weights_of(logits, np.array([[1, 0]], np.int32), 0)
        np.testing.assert_allclose(given[0], 3 * numbers[[1, 0]] * [2, 1], rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("router", ROUTERS, ids=str)
def test_weights_and_scores_agree_with_the_choice(router: Router) -> None:
    logits = random_logits(9, 40, 12, 1.0)
    routing = router(logits, 0)
    rows = np.arange(40)[:, None]
    if isinstance(router, Scored) or router == Softmax(3, rescaled=True):
        np.testing.assert_array_equal(router.weights_of(logits, routing.experts, 0), routing.weights)
    scores = router.scores(logits, 0)
    assert (scores >= 0).all()
    np.testing.assert_allclose(scores.sum(axis=1), 1, rtol=1e-5)
    if getattr(router, "groups", 1) == 1:
        best = np.sort(scores, axis=1)[:, ::-1][:, : routing.experts.shape[1]]
        np.testing.assert_allclose(scores[rows, routing.experts], best, rtol=1e-5)


@pytest.mark.parametrize("router", [router for router in ROUTERS if isinstance(router, Scored)], ids=str)
def test_scored_weights_are_differentiable(router: Scored) -> None:
    logits = torch.from_numpy(random_logits(9, 5, 12, 1.0)).double().requires_grad_()
    routing = router(logits.detach().float().numpy(), 0)
    weights = router.differentiable(logits, routing, 0)
    np.testing.assert_allclose(weights.detach().numpy(), routing.weights, rtol=1e-5)
    assert torch.autograd.gradcheck(lambda x: router.differentiable(x, routing, 0), logits)


@pytest.mark.parametrize("spread", [0.3, 1e30])
def test_many_rows_are_chosen_as_one_by_one(spread: float) -> None:
    """Also of equal logits, of -0 and 0, and of infinite ones."""
    logits = np.random.default_rng(0).standard_normal((64, 40)).astype(np.float32) * np.float32(spread)
    logits = (logits * 4).round() / np.float32(4)  # many are equal
    logits[:, 3], logits[:, 5], logits[::2, 7] = -np.inf, 0.0, -0.0
    router = Softmax(6, rescaled=True)
    batch = router(logits, 0)
    for row, experts in zip(logits, batch.experts, strict=True):
        assert experts.tolist() == sorted(range(40), key=lambda e: (-row[e], e))[:6]
    assert (batch.weights == np.concatenate([router(row[None], 0).weights for row in logits])).all()


def test_large_logits_do_not_overflow() -> None:
    routing = Softmax(2, rescaled=True)(np.array([[3e38, -3e38, 3e38]], np.float32), 0)
    assert routing.experts.tolist() == [[0, 2]]
    assert routing.weights.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("router", ROUTERS, ids=str)
def test_row_is_routed_as_in_a_batch(router: Router) -> None:
    """Bit by bit, so that an answer does not depend on those that are decoded with it."""
    logits = random_logits(5, 50, 12, 2.0)
    together = router(logits, 0)
    for row in range(len(logits)):
        alone = router(logits[row : row + 1], 0)
        assert (alone.experts.dtype, alone.weights.dtype) == (np.int32, np.float32)
        np.testing.assert_array_equal(alone.experts, together.experts[row : row + 1])
        np.testing.assert_array_equal(alone.weights, together.weights[row : row + 1])


@pytest.mark.parametrize("rescaled", [True, False])
def test_weights_of_few_allowed_experts_are_differentiable(rescaled: bool) -> None:
    """Only one group of two experts may be chosen: the third has weight 0, and no gradient."""
    router = Softmax(3, rescaled=rescaled, scale=2.0, groups=2, best_groups=1)
    logits = torch.tensor([[1.0, 0.5, 3.0, 2.0], [4.0, 0.1, 0.2, 0.3]], requires_grad=True)
    routing = router(logits.detach().numpy(), 0)
    assert (routing.weights == 0).sum(axis=1).tolist() == [1, 1]
    weights = router.differentiable(logits, routing, 0)
    np.testing.assert_allclose(weights.detach().numpy(), routing.weights, rtol=1e-6)
    (gradient,) = torch.autograd.grad(weights[torch.from_numpy(routing.weights == 0)].sum(), logits)
    assert gradient.abs().max() == 0
