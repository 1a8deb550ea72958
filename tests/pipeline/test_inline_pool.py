"""An engine without workers: the coordinator computes the host's share, with the same numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.config import EngineConfig

TOKENS = tuple(range(5, 65))


async def scores(client, stepwise: bool) -> np.ndarray:
    blocks = client.score(token_ids=TOKENS, full=True, stepwise=stepwise, prefill=20)
    return np.concatenate([block.logprobs async for block in blocks])


@pytest.mark.parametrize("format", ["f32", "bf16", "int4"])
async def test_coordinator_computes_the_same_as_workers(start_engine, tiny_model: Path, format) -> None:
    found = {}
    for workers in (0, 2):
        config = EngineConfig(
            model=tiny_model, format=format, backbone_dtype="f32", workers=workers, chunk=16, expert_cache=0.3
        )
        async with start_engine(config) as (_, client):
            peers = (await client.stats())["peers"]
            assert sorted(p["index"] for p in peers if p["role"] == "worker") == list(range(workers))
            for policy in ("all-host", "random"):
                await client.set_policy(policy, {})
                for stepwise in (False, True):
                    found[workers, policy, stepwise] = await scores(client, stepwise)
            host = (await client.stats())["engine"]["decode"]
            assert host["host_tiles"] > 0
            assert host["host_busy_s"] > 0
    # Another cut has other sums: rounding, which the rounding of activations amplifies in int4.
    bound = 0.05 if format == "int4" else 1e-4
    for (workers, *which), ours in found.items():
        if workers == 0:
            np.testing.assert_allclose(ours, found[2, *which], atol=bound, rtol=0, err_msg=f"{which}")


async def test_slower_host_is_emulated(start_engine, tiny_model: Path) -> None:
    """Without it the host's share takes less than half of a step."""
    config = EngineConfig(model=tiny_model, format="bf16", workers=0, chunk=16, host_slowdown=200.0)
    async with start_engine(config) as (_, client):
        await scores(client, True)
        decode = (await client.stats())["engine"]["decode"]
    assert decode["host_busy_s"] > 0.8 * sum(decode["seconds"].values())
