"""The rule of rounding.py refuses mistakes that an engine could make, and accepts the oracle's rounding."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import pytest
import torch
from comparison import ALONE
from families import drawn_texts, save
from family_cases import CASES, place
from quantized_oracle import NOISE, QuantizedOracle
from rounding import STEEPNESS, Distances, Rows, chance, exceeded, excesses, spread
from test_family_formats import SEEDS, TEXTS, TOKENS
from torch import nn

CASE = next(case for case in CASES if case.family == "deepseek_v2" and place(case) == 3)
# Of the rule and of the oracle, neither of which a change of the program touches.
pytestmark = pytest.mark.slow
GROUP = 16  # half a group of int4: no model here has two whole ones
OTHER_SEEDS = range(100, 105)

Mistake = Callable[[QuantizedOracle], None]


class ScoredModel:
    """A model's log-probabilities of the texts that an engine would score, and the distances that noise
    causes."""

    def __init__(self, folder: Path, backbone: str) -> None:
        self._folder, self.backbone = folder, backbone
        self.texts = drawn_texts(CASE, TEXTS, TOKENS)
        oracle = self.oracle()
        self._exact = oracle.batch(self.texts)
        self._allowed = oracle.rounding(self.texts, self._exact, SEEDS)
        self._right = self.rounded(oracle, OTHER_SEEDS[0])

    def oracle(self) -> QuantizedOracle:
        return QuantizedOracle(self._folder, "int4", self.backbone)

    def rounded(self, oracle: QuantizedOracle, seed: int, much: float = 1.0) -> list[Rows]:
        """An engine's log-probabilities that computes as this oracle does, with rounding of its own."""
        with oracle.noise(much * NOISE[self.backbone], seed):
            return oracle.batch(self.texts)

    def refusal(self, rows: list[Rows], where: Collection[int] = range(TEXTS)) -> str:
        """Of an engine with these log-probabilities of the texts at `where`, and right ones of the others."""
        mixed = [rows[i] if i in where else right for i, right in enumerate(self._right)]
        return self._allowed.refusal(Distances.between(mixed, self._exact), ALONE)


@pytest.fixture(scope="module", params=["f32", "int4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ScoredModel:
    folder = tmp_path_factory.mktemp("rounding")
    save(CASE, folder)
    return ScoredModel(folder, request.param)


def test_other_roundings_of_the_oracle_are_accepted(model: ScoredModel) -> None:
    oracle = model.oracle()
    assert [refusal for seed in OTHER_SEEDS if (refusal := model.refusal(model.rounded(oracle, seed)))] == []


def test_a_quarter_more_rounding_is_accepted(model: ScoredModel) -> None:
    assert model.refusal(model.rounded(model.oracle(), OTHER_SEEDS[0], much=1.25)) == ""


def test_other_kernels_are_accepted(model: ScoredModel) -> None:
    """Products of one text have other shapes, and two threads cut them otherwise: sums in another order."""
    oracle, threads = model.oracle(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        rows = [oracle.logprobs(text) for text in model.texts]
    finally:
        torch.set_num_threads(threads)
    assert model.refusal(rows) == ""


def wrong_scale(oracle: QuantizedOracle) -> None:
    """One group of one expert a layer."""
    for experts in oracle.experts:
        experts.decoded[0][0][:, :GROUP] *= 2


def scale_off_by_a_quarter(oracle: QuantizedOracle) -> None:
    for experts in oracle.experts:
        experts.decoded[0][0][:, :GROUP] *= 1.25


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
        y[27::TOKENS] = y[26::TOKENS]
        return y

    oracle.experts[0].register_forward_hook(repeated)


EVERYWHERE, DECODING_ALONE = range(TEXTS), range(ALONE)
SEVEN_BATCHED, TWO = range(ALONE, ALONE + 7), range(2)
LARGE = [EVERYWHERE, DECODING_ALONE, SEVEN_BATCHED, TWO]
# Where a mistake is refused, beside int4 and beside float32; rounding.py has the chances elsewhere.
REFUSED: dict[Mistake, tuple[list[range], list[range]]] = {
    wrong_scale: (LARGE, LARGE[:3]),
    swapped_groups: (LARGE, LARGE[:3]),
    missing_shared_expert: (LARGE, LARGE[:3]),
    stale_row: (LARGE[:2], LARGE[:3]),
    scale_off_by_a_quarter: (LARGE[:1], LARGE[:3]),
    bf16_sums: ([], LARGE[:3]),  # beside int4 attention computes in bfloat16 anyway
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_wrong_computations_are_refused(mistake: Mistake, model: ScoredModel) -> None:
    beside_int4, beside_f32 = REFUSED[mistake]
    oracle = model.oracle()
    mistake(oracle)
    rows = model.rounded(oracle, OTHER_SEEDS[1])
    for where in beside_f32 if model.backbone == "f32" else beside_int4:
        assert model.refusal(rows, where), where


def test_what_is_no_number_is_refused(model: ScoredModel) -> None:
    rows = [np.full_like(right, np.nan) for right in model.rounded(model.oracle(), OTHER_SEEDS[1])]
    assert model.refusal(rows, [TEXTS - 1])


def test_chance_is_seldom_small_for_texts_of_one_distribution() -> None:
    """A text in five moves a thousandfold, in one rounding of three: as beside float32, but more often."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(2000):
        rare = random.random(TEXTS) < 0.2
        moved = rare & (random.random((SEEDS + 1, TEXTS)) < 0.3)
        distances = random.lognormal(0, 0.1, moved.shape) * np.where(moved, random.lognormal(5, 1), 1)
        ours, noise = distances[0], distances[1:]
        found.append(chance(excesses(ours, noise, 1.0), spread(noise) / STEEPNESS, SEEDS))
    for level in (0.1, 0.01):
        assert np.mean(np.array(found) < level) < 1.3 * level
    assert min(found) > 1e-7


def test_chance_is_that_of_the_distribution() -> None:
    random = np.random.default_rng(0)
    count = random.binomial(7, 1 / 5, 100_000)
    total = random.gamma(np.maximum(count, 1e-9), 0.5)
    likely = np.mean((count >= 2) & (total > 1.5))
    assert chance(np.array([0.75, 0.75, 0, 0, 0, 0, 0]), 0.5, 4) == pytest.approx(likely, rel=0.05)
    assert exceeded(1, 3.0) == pytest.approx(np.exp(-3.0))
    assert chance(np.zeros(7), 0.5, 4) == 1
    assert chance(np.full(7, np.inf), 0.5, 4) < 1e-9
