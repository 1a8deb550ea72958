"""Exits of each process of an engine whose layers are on two devices: the answers do not change."""

from __future__ import annotations

import asyncio

import pytest
from fault_engines import KILL, LIMIT, State, answer, bits, config, same
from waiting import until

from protocol.client import Client
from protocol.errors import EngineGone

pytestmark = pytest.mark.timeout(300)

DEVICES = "cpu:2000000000,cpu:1000000000"


async def test_answers_do_not_change_whoever_exits(start_engine, tiny_model) -> None:
    """The devices' memory is opened late, so that both prefetchers are started by a message."""
    settings = {"expert_cache": 0.3, "link_gbps": (0.04, 0.02), "host_slowdown": 1.0}
    async with start_engine(config(tiny_model, device=DEVICES, **settings)) as (supervisor, client):
        await client.set_policy("on-demand")
        await until(lambda: supervisor.config.policy == "on-demand")
        state = State(supervisor, client)
        await state.wait_recovered()
        assert [child.index for child in supervisor.pids if child.role == "prefetcher"] == [0, 1]
        stats = await client.stats()
        assert [device["layers"] for device in stats["devices"]] == [[0, 1], [1, 2]]
        reference = await answer(client)
        exits = 0
        for role, index in (("prefetcher", 0), ("prefetcher", 1), ("worker", 1)):
            found = await answer(client, fault=lambda: state.send(KILL, role, index))  # noqa: B023
            assert same(found, reference)
            exits += role == "prefetcher"
            await state.wait_recovered(role, exits if role == "prefetcher" else 1)
        running = asyncio.create_task(answer(client, count=200))
        await state.is_computing()
        state.send(KILL, "coordinator")
        async with asyncio.timeout(LIMIT):
            assert isinstance(await client.lost(), EngineGone)
        with pytest.raises(EngineGone):
            await running
        async with Client.connect(supervisor.endpoint, timeout=LIMIT) as again:
            state.client = again
            await state.wait_recovered()
            assert bits(await answer(again)) == bits(reference)  # the cuts are the same
    assert state.segments() == []
