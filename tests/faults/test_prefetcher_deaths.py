"""A prefetcher that is killed and stopped in a real engine: what it was to bring the workers compute, answers
are the same to rounding, and it is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from fault_engines import KILL, LONG, PROMPT, STOP, State, answer, answer_with_fault, config

from launch.equality import F32_BOUND, Verdict, compare
from protocol.messages import Token

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def state(start_engine, tiny_model) -> AsyncIterator[State]:
    """On demand over a slow link: most of a step is waiting for tiles."""
    settings = {"policy": "on-demand", "expert_cache": 0.3, "link_gbps": 0.01, "host_slowdown": 1.0}
    async with start_engine(config(tiny_model, **settings)) as (supervisor, client):
        state = State(supervisor, client)
        await state.whole()
        yield state


def same(tokens: list[Token], reference: list[Token]) -> bool:
    """By the rule of equality: who computes a tile decides how its sum is rounded."""
    return compare([t.token for t in tokens], reference, F32_BOUND).verdict is not Verdict.MISMATCH


async def recovered(state: State, before: int) -> None:
    stats = await state.whole("prefetcher", before + 1)
    recovery = stats["recovery"]["prefetcher"]
    assert recovery["deaths"] == before + 1
    assert 0 < recovery["ready_s"] <= recovery["whole_s"]
    assert stats["cache"]["resident_tiles"] <= stats["cache"]["capacity_tiles"]


@pytest.mark.parametrize("number", [KILL, STOP], ids=["killed", "stopped"])
async def test_in_decode(state, number) -> None:
    reference, before = await answer(state.client), await state.deaths("prefetcher")
    counters = (await state.client.stats())["engine"]["decode"]
    tokens = await answer_with_fault(state.client, lambda: state.send(number, "prefetcher"))
    assert same(tokens, reference)
    await recovered(state, before)
    after = (await state.client.stats())["engine"]["decode"]
    assert after["host_tiles"] > counters["host_tiles"]  # under this policy, by nothing else
    fetched = after["fetched_tiles"]
    assert same(await answer(state.client), reference)
    final = (await state.client.stats())["engine"]["decode"]
    assert final["fetched_tiles"] > fetched  # and now it brings them again
    assert final["host_tiles"] == after["host_tiles"]


async def test_in_prefill(state) -> None:
    client = state.client
    reference, before = await answer(client, LONG, 8), await state.deaths("prefetcher")
    rows = await state.prefilled()
    running = asyncio.create_task(answer(client, LONG, 8))
    await state.prefilling(1)
    assert await state.prefilled() < rows + len(LONG)  # in the middle of it
    state.send(KILL, "prefetcher")
    assert same(await running, reference)
    await recovered(state, before)


async def test_while_nothing_runs_and_the_cache_is_filled_again(state) -> None:
    reference, before = await answer(state.client), await state.deaths("prefetcher")
    state.send(KILL, "prefetcher")
    await recovered(state, before)
    assert same(await answer(state.client), reference)


async def test_with_a_worker_at_once(state) -> None:
    reference, before = await answer(state.client), await state.deaths("prefetcher")

    def strike() -> None:
        state.send(KILL, "prefetcher")
        state.send(KILL, "worker", 0)

    assert same(await answer_with_fault(state.client, strike), reference)
    await recovered(state, before)


async def test_placed_tiles_are_of_use_while_it_is_gone_and_are_completed_after(state) -> None:
    """A policy that keeps experts on the device, set while the prefetcher dies over and over."""
    client = state.client
    reference = await answer(client, PROMPT)
    before = await state.deaths("prefetcher")
    setting = asyncio.create_task(client.set_policy("layerwise"))
    state.send(KILL, "prefetcher")
    changed = await setting
    assert changed.policy == "layerwise"
    assert same(await answer(client, PROMPT), reference)
    stats = await state.whole("prefetcher", before + 1)
    assert stats["recovery"]["prefetcher"]["deaths"] == before + 1
    assert stats["cache"]["resident_tiles"] == stats["cache"]["capacity_tiles"] // 3 * 3
    await client.set_policy("on-demand")
