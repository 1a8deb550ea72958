"""The quantized formats equal transformers on the same quantized weights, whoever computes a tile.

Activations are rounded to int8 steps. A float32 sum that ends on the other side of such a step's edge moves
a code by one, and that moves others in later layers. How far is asked of the oracle itself: it is run with
noise of float32's size in its hidden states, and the engine may be no further off than that takes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from equality import near_tie_or_equal
from numpy.typing import NDArray
from quantized_oracle import QuantizedOracle
from test_parity import CHUNK, NEW, scored, tokenized

from launch.equality import rounding_bound
from pipeline.assets import model_dir
from pipeline.config import EngineConfig

# Relative. A float32 sum of some hundred numbers is off by as much; and beside a quantized backbone
# attention is done in bfloat16, whose numbers are.
NOISE = {"f32": 3e-7, "int8": 2**-9, "int4": 2**-9}
NOISES = 4  # seeds
ROOM = 2.0  # beyond the largest of so few
POLICIES = [
    ("all-host", {}),
    ("on-demand", {}),
    ("random", {"seed": "8", "churn": "1"}),
]


@dataclass(frozen=True)
class Distance:
    """Between log-probabilities, in nats: the mean and the 99.9 % quantile."""

    mean: float
    tail: float

    @classmethod
    def between(cls, ours: list[NDArray[np.float32]], theirs: list[NDArray[np.float32]]) -> Distance:
        error = np.abs(np.concatenate(ours) - np.concatenate(theirs))
        return cls(float(error.mean()), float(np.quantile(error, 0.999)))

    def within(self, other: Distance) -> bool:
        return self.mean <= other.mean and self.tail <= other.tail


def reach(
    oracle: QuantizedOracle, backbone: str, texts: list[tuple[int, ...]], exact: list[NDArray[np.float32]]
) -> Distance:
    """What noise may do."""
    noisy = [[oracle.with_noise(t, NOISE[backbone], seed) for t in texts] for seed in range(NOISES)]
    found = [Distance.between(n, exact) for n in noisy]
    return Distance(ROOM * max(d.mean for d in found), ROOM * max(d.tail for d in found))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("setting", "workers", "tile"),
    [
        pytest.param(("int8", "f32"), 2, 128, id="int8"),
        pytest.param(("int4", "f32"), 3, 64, id="int4"),
        pytest.param(("int4-g128", "f32"), 1, None, id="int4-g128"),
        pytest.param(("int4", "int4"), 2, 128, id="all-int4"),
        pytest.param(("int8", "int8"), 1, None, id="all-int8"),
    ],
)
async def test_equals_transformers_on_the_same_weights(setting, workers, tile, start_engine) -> None:
    experts, backbone = setting
    oracle = QuantizedOracle(model_dir(), experts, None if backbone == "f32" else backbone)
    texts = [tokenized("python"), tokenized("german")]
    expected = [oracle.logprobs(t) for t in texts]
    allowed = reach(oracle, backbone, texts, expected)
    tokens, chosen_from = oracle.greedy(texts[0], NEW)
    config = EngineConfig(
        format=experts, backbone_dtype=backbone, workers=workers, tile=tile, chunk=CHUNK, expert_cache=0.4
    )
    wrong: list[str] = []
    async with start_engine(config) as (_, client):
        for policy, options in POLICIES:
            await client.set_policy(policy, options)
            for stepwise in (False, True):
                ours = Distance.between([await scored(client, t, stepwise) for t in texts], expected)
                if not ours.within(allowed):
                    wrong.append(f"{policy} {options} stepwise={stepwise}: {ours}, allowed {allowed}")
            answer = client.generate(token_ids=texts[0], max_tokens=NEW, ignore_eos=True)
            new = [t.token async for t in answer]
            if not near_tie_or_equal(new, tokens, chosen_from, rounding_bound(experts, backbone)):
                wrong.append(f"{policy} {options} generate: {new} instead of {tokens}")
    assert not wrong, "\n".join(wrong)
