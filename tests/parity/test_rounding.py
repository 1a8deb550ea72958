"""The rule of rounding.py refuses mistakes that an engine could make, and accepts the oracle's rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from families import drawn_texts, save
from family_cases import CASES, place
from quantized_oracle import QuantizedOracle
from rounding import FALSE_ALARM, Rounding, gumbel_limit, rank_high, t_quantile
from test_family_formats import DISTRIBUTION, SCORED
from test_quantized import FACTOR, NOISE, reach
from torch import nn

CASE = next(case for case in CASES if case.family == "deepseek_v2" and place(case) == 3)
TOKENS = 75  # of each text
GROUP = 16  # half a group of int4: no model here has two whole ones


class Scene:
    """A model's log-probabilities of the texts that an engine would score, and the distances that noise
    causes."""

    def __init__(self, folder: Path, backbone: str) -> None:
        self._folder, self.backbone = folder, backbone
        many, oracle = drawn_texts(CASE, DISTRIBUTION), self.oracle()
        exact = oracle.batch(many)
        self._texts, self._exact = many[:SCORED], exact[:SCORED]
        self._allowed = reach(oracle, backbone, many, exact)

    def oracle(self) -> QuantizedOracle:
        return QuantizedOracle(self._folder, "int4", None if self.backbone == "f32" else self.backbone)

    def refusal(self, oracle: QuantizedOracle, seed: int) -> str:
        """Of an engine that computes as this oracle does, with rounding of its own."""
        with oracle.noise(NOISE[self.backbone], seed):
            ours = Rounding.between(oracle.batch(self._texts), self._exact)
            return self._allowed.refusal(ours, FACTOR)


@pytest.fixture(scope="module", params=["f32", "int4"])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("rounding")
    save(CASE, folder)
    return Scene(folder, request.param)


def test_other_roundings_of_the_oracle_are_accepted(scene: Scene) -> None:
    oracle = scene.oracle()
    assert [refusal for seed in range(1, 6) if (refusal := scene.refusal(oracle, seed))] == []


def wrong_scale(oracle: QuantizedOracle) -> None:
    """One group of one expert a layer."""
    for experts in oracle.experts:
        experts.decoded[0][0][:, :GROUP] *= 2


def swapped_groups(oracle: QuantizedOracle) -> None:
    for experts in oracle.experts:
        gate = experts.decoded[0][0]
        gate[:, : 2 * GROUP] = gate[:, : 2 * GROUP].roll(GROUP, 1)


def missing_shared_expert(oracle: QuantizedOracle) -> None:
    """In one layer."""
    (*_, layer) = (layer.mlp for layer in oracle.model.model.layers if hasattr(layer.mlp, "shared_experts"))
    layer.shared_experts.forward = torch.zeros_like


def bf16_sums(oracle: QuantizedOracle) -> None:
    """An expert's partial sum in bfloat16."""
    for experts in oracle.experts:
        experts.register_forward_hook(lambda module, inputs, y: y.bfloat16().float())


def stale_row(oracle: QuantizedOracle) -> None:
    """One token of each text gets its neighbour's experts."""

    def repeated(module: nn.Module, inputs: object, y: torch.Tensor) -> torch.Tensor:
        y = y.clone()
        y[40::TOKENS] = y[39::TOKENS]
        return y

    oracle.experts[0].register_forward_hook(repeated)


@pytest.mark.parametrize(
    "mistake", [wrong_scale, swapped_groups, missing_shared_expert, bf16_sums, stale_row]
)
def test_wrong_computations_are_refused(mistake: Callable[[QuantizedOracle], None], scene: Scene) -> None:
    if mistake is bf16_sums and scene.backbone != "f32":
        pytest.skip("the oracle's noise is as large, because attention beside int4 computes in bfloat16")
    oracle = scene.oracle()
    mistake(oracle)
    assert scene.refusal(oracle, seed=1)


def test_ranks_of_one_distribution_are_not_high() -> None:
    random = np.random.default_rng(0)
    for _ in range(1000):
        assert not rank_high(random.standard_cauchy(SCORED), random.standard_cauchy(DISTRIBUTION))
    assert rank_high(np.arange(70.0, 84.0), np.arange(0.0, 72.0))


def test_quantiles_are_those_of_the_distributions() -> None:
    # By numerical integration of the t-distribution's density.
    for freedom, quantile in ((20, 7.7202), (55, 5.94142), (83, 5.67232)):
        assert t_quantile(freedom) == pytest.approx(quantile, abs=0.01)
    drawn = np.random.default_rng(0).gumbel(3.0, 0.5, 100_000)
    exact = 3.0 - 0.5 * np.log(-np.log1p(-FALSE_ALARM))
    assert gumbel_limit(drawn, 1) == pytest.approx(exact, abs=0.1)
