"""The quantized formats equal transformers on the same quantized weights, whichever process computes a tile.

Activations are rounded to int8 steps. A float32 sum that ends on the other side of such a step's edge moves
a code by one, and that moves others in later layers. The oracle itself shows how far: it is run with noise of
float32's size in its hidden states, and the engine's log-probabilities may be no further off (rounding.py).
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
LENGTH = 48  # tokens of each text; a prefill takes two chunks
DISTRIBUTION = 56  # texts from which the reach of noise is known
TEXTS = 14  # of them, which an engine scores
FACTOR = 2.0  # how much more all of an engine's sums may do on average than noise in one place
POLICIES = [
    ("all-host", {}),
    ("on-demand", {}),
    ("random", {"seed": "8", "churn": "1"}),
]


def reach(
    oracle: QuantizedOracle, backbone: str, texts: list[tuple[int, ...]], exact: list[Rows]
) -> Rounding:
    """The distances that noise causes."""
    with oracle.noise(NOISE[backbone], seed=0):
        return Rounding.between(oracle.batch(texts), exact)


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
    texts = passages(DISTRIBUTION, LENGTH)
    expected = oracle.batch(texts)
    allowed = reach(oracle, backbone, texts, expected)
    check = within(allowed, texts[:TEXTS], expected[:TEXTS], factor=FACTOR)
    greedy, bound = oracle.greedy(texts[0], NEW), rounding_bound(experts, backbone)
    config = EngineConfig(
        format=experts, backbone_dtype=backbone, workers=workers, tile=tile, chunk=CHUNK, expert_cache=0.4
    )
    async with start_engine(config) as (_, client):
        await check_policies(client, POLICIES, check, texts[0], greedy, bound)
