"""Channels on the device `cuda`: a whole engine computes there what its workers compute, with and without
masks."""

from __future__ import annotations

import numpy as np
import pytest
from comparison import scored

from pipeline.assets import heldout, model_dir
from pipeline.config import EngineConfig
from pipeline.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

LENGTH = 64  # tokens; half of them are decoded
EXACT = [("floe", {"sparsity": "0"}), ("on-demand", {})]
MASKED = [("floe", {"pause": "0"}), ("floe", {"prediction": "none"}), ("on-demand", {"sparsity": "0.8"})]
DEVICE = "cuda"


async def test_device_and_host_compute_the_same(start_engine) -> None:
    tokenizer = Tokenizer.load(model_dir())
    assert tokenizer is not None
    tokens = tuple(tokenizer.encode(heldout()["english"].read_text()[:1000])[:LENGTH])
    plain = {"device": DEVICE, "format": "floe-u8-int8", "backbone_dtype": "f32", "tile": 64, "workers": 1}
    config = EngineConfig(**plain, expert_cache=0.3)
    async with start_engine(config) as (_, client):
        for host, options, others in (("all-host", {}, EXACT), ("floe-host", {}, MASKED)):
            await client.set_policy(host, options)
            wanted = await scored(client, tokens, stepwise=True)
            for name, given in others:
                await client.set_policy(name, given)
                before = (await client.stats())["engine"]["decode"]
                found = await scored(client, tokens, stepwise=True)
                # A channel near a mask's limit may fall on its other side: few, and each of little weight.
                assert np.abs(found - wanted).max() < (2e-3 if others is EXACT else 0.1), name
                assert np.abs(found - wanted).mean() < (2e-4 if others is EXACT else 5e-3), name
                after = (await client.stats())["engine"]["decode"]
                gathered = after["channels"]["moved"] - before["channels"]["moved"]
                assert (gathered > 0) == (others is MASKED and name == "floe")
                assert after["host_tiles"] == before["host_tiles"]
