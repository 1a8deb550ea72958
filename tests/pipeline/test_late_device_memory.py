"""An engine with a first policy that keeps no experts on the device: the slab is allocated when a later
policy needs it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from launch.equality import Verdict, compare
from launch.runtime import segments
from protocol.errors import RequestFailed
from protocol.sockets import Identity

PREFETCHER = Identity("prefetcher", 0, 0)
PROMPT = list(range(5, 25))


async def test_slab_and_prefetcher_start_with_the_first_policy_that_needs_them(
    start_engine, plain_config
) -> None:
    async with start_engine(plain_config) as (supervisor, client):
        runtime = Path(supervisor.endpoint.removeprefix("ipc://")).parent

        async def answer() -> list:
            return [t async for t in client.generate(token_ids=PROMPT, max_tokens=30, ignore_eos=True)]

        reference = await answer()
        assert PREFETCHER not in supervisor.pids
        assert "cache" not in await client.stats()
        with pytest.raises(RequestFailed, match="did you mean"):
            await client.set_policy("on-deman")
        assert not any("-slab-" in path.name for path in segments(runtime))
        running = asyncio.create_task(answer())  # the request pauses for the new policy and continues
        await client.set_policy("on-demand")
        assert PREFETCHER in supervisor.pids
        assert (await client.stats())["cache"]["capacity_tiles"] > 0
        for tokens in (await running, await answer()):
            verdict = compare([t.token for t in tokens], reference, 1e-4).verdict
            assert verdict is not Verdict.MISMATCH
        assert (await client.stats())["engine"]["decode"]["fetched_tiles"] > 0
        before = dict(supervisor.pids)
        await client.set_policy("all-host")
        await client.set_policy("layerwise")
        assert supervisor.pids == before
