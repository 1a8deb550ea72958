"""The quantized formats equal transformers on the same quantized weights, whichever process computes a tile.

Activations are rounded to int8 steps. A float32 sum that ends on the other side of such a step's edge moves
a code by one, and that moves others in later layers. The oracle itself shows how far: it is run with noise of
float32's size in its hidden states, several times, and the engine's log-probabilities may be no further off
(rounding.py).
"""

from __future__ import annotations

import pytest
from comparison import check_policies, within
from quantized_oracle import QuantizedOracle
from rounding import Rounding, Rows
from test_parity import CHUNK, NEW, passages

from launch.equality import rounding_bound
from pipeline.assets import model_dir
from pipeline.config import EngineConfig

# Relative. A float32 sum of some hundred numbers is off by as much; and beside a quantized backbone
# attention computes in bfloat16, which rounds as much.
NOISE = {"f32": 3e-7, "int8": 2**-9, "int4": 2**-9}
LENGTH = 40  # tokens of each text; a prefill takes two chunks
TEXTS = 14
SEEDS = 12  # of noise
# How much more all of an engine's sums may do than noise in one place. Beside quantized backbones they do
# 1.02 to 1.15 times as much on average over the texts, 1.01 to 1.10 over those alone, 1.09 in calm rows.
FACTOR = 1.4
ANYWHERE = ("random", {"seed": "8", "churn": "1"})


def reach(
    oracle: QuantizedOracle, backbone: str, texts: list[tuple[int, ...]], exact: list[Rows], seeds: int
) -> Rounding:
    """The distances that noise causes."""
    return Rounding.of(oracle.noisy(texts, NOISE[backbone], seeds), exact, FACTOR)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("setting", "workers", "tile", "policy"),
    [
        pytest.param(("int8", "f32"), 2, 128, "on-demand", id="int8"),
        pytest.param(("int4", "f32"), 3, 64, "all-host", id="int4"),
        pytest.param(("int4-g128", "f32"), 1, None, "on-demand", id="int4-g128"),
        pytest.param(("int4", "int4"), 2, 128, "on-demand", id="all-int4"),
        pytest.param(("int8", "int8"), 1, None, "all-host", id="all-int8"),
    ],
)
async def test_equals_transformers_on_the_same_weights(setting, workers, tile, policy, start_engine) -> None:
    """Each format of experts under each policy; int4-g128 under all-host in test_family_formats.py."""
    experts, backbone = setting
    oracle = QuantizedOracle(model_dir(), experts, None if backbone == "f32" else backbone)
    texts = passages(TEXTS, LENGTH)
    expected = oracle.batch(texts)
    check = within(reach(oracle, backbone, texts, expected, SEEDS), expected)
    greedy, bound = oracle.greedy(texts[0], NEW), rounding_bound(experts, backbone)
    config = EngineConfig(
        format=experts, backbone_dtype=backbone, workers=workers, tile=tile, chunk=CHUNK, expert_cache=0.4
    )
    async with start_engine(config) as (_, client):
        await check_policies(client, [(policy, {}), ANYWHERE], texts, check, texts[0], greedy, bound)
