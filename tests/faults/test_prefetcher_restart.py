"""A killed or stopped prefetcher in a real engine: demanded tiles need none, answers are the same to
rounding, and it is restarted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from exact_presets import DIVIDING
from fault_engines import KILL, LIMIT, LONG, PROMPT, STOP, State, answer, config, same

from launch.processes.monitor import Limits

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def state(start_engine, tiny_model) -> AsyncIterator[State]:
    """On demand over a slow link: most of a step is waiting for tiles."""
    settings = {"policy": "on-demand", "expert_cache": 0.3, "link_gbps": 0.02, "host_slowdown": 1.0}
    limits = Limits(stopped_checks=2)
    async with start_engine(config(tiny_model, **settings), limits) as (supervisor, client):
        state = State(supervisor, client)
        await state.wait_recovered()
        yield state


async def recovered(state: State, before: int) -> None:
    await state.place_experts("on-demand")
    stats = await state.wait_recovered("prefetcher", before + 1)
    recovery = stats["recovery"]["prefetcher"]
    assert recovery["deaths"] == before + 1
    assert recovery["whole_s"] > 0
    assert stats["cache"]["resident_tiles"] <= stats["cache"]["capacity_tiles"]


@pytest.mark.parametrize("number", [KILL, STOP], ids=["killed", "stopped"])
async def test_demands_in_decode_need_no_prefetcher(state, number) -> None:
    reference, before = await answer(state.client), await state.exits("prefetcher")
    counters = (await state.client.stats())["engine"]["decode"]
    tokens = await answer(state.client, fault=lambda: state.send(number, "prefetcher"))
    assert same(tokens, reference)
    after = (await state.client.stats())["engine"]["decode"]
    assert after["host_tiles"] == counters["host_tiles"]  # nothing is left to the workers
    assert after["fetched_tiles"] > counters["fetched_tiles"]
    await recovered(state, before)
    assert same(await answer(state.client), reference)


async def test_prefetcher_exit_in_prefill(state) -> None:
    client = state.client
    reference, before = await answer(client, LONG, 8), await state.exits("prefetcher")
    running = asyncio.create_task(answer(client, LONG, 8))
    await state.is_computing()
    state.send(KILL, "prefetcher")
    assert same(await running, reference)
    await recovered(state, before)


async def test_prefetcher_exit_while_idle_refills_the_cache(state) -> None:
    reference, before = await answer(state.client), await state.exits("prefetcher")
    state.send(KILL, "prefetcher")
    await recovered(state, before)
    assert same(await answer(state.client), reference)


async def test_prefetcher_and_worker_exit_at_once(state) -> None:
    reference, before = await answer(state.client), await state.exits("prefetcher")

    def kill() -> None:
        state.send(KILL, "prefetcher")
        state.send(KILL, "worker", 0)

    assert same(await answer(state.client, fault=kill), reference)
    await recovered(state, before)


@pytest.mark.parametrize("number", [KILL, STOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("preset", DIVIDING)
async def test_exits_under_a_policy_that_keeps_parts_of_experts(state, preset, number) -> None:
    reference = await answer(state.client)
    await state.client.set_policy(preset, DIVIDING[preset])
    before = await state.exits("prefetcher")
    workers = await state.exits()

    def fault() -> None:
        state.send(number, "prefetcher")
        state.send(number, "worker", 1)

    assert same(await answer(state.client, fault=fault), reference)
    await recovered(state, before)
    await state.client.set_policy("all-host")  # needs the workers
    assert same(await answer(state.client), reference)
    await state.wait_recovered("worker", workers + 1)
    await state.client.set_policy("on-demand")


async def test_placement_is_used_and_completed_after_a_prefetcher_exit(state) -> None:
    """A policy that keeps experts on the device is set while the prefetcher is restarted."""
    client = state.client
    reference = await answer(client, PROMPT)
    before = await state.exits("prefetcher")
    setting = asyncio.create_task(client.set_policy("layerwise"))
    state.send(KILL, "prefetcher")
    changed = await setting
    assert changed.policy == "layerwise"
    assert same(await answer(client, PROMPT), reference)
    stats = await state.wait_recovered("prefetcher", before + 1)
    assert stats["recovery"]["prefetcher"]["deaths"] == before + 1
    async with asyncio.timeout(LIMIT):
        while stats["cache"]["resident_tiles"] != stats["cache"]["capacity_tiles"] // 3 * 3:
            stats = await client.stats()
    await client.set_policy("on-demand")
