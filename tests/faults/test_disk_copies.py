"""Experts on a device while half of them are on disk: the answers of an engine that has all in memory, under
plans that change what the device has at each step, whoever is killed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fault_engines import KILL, LIMIT, LONG, STOP, answer, bits, same
from test_disk_tier import EXPERTS, HALF, LAYERS, half_on_disk, shortened

from pipeline.config import EngineConfig
from protocol.errors import RequestFailed

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

RANDOM = "random", {"churn": "1"}
FAULTS = {
    "the prefetcher killed": [(KILL, "prefetcher", 0)],
    "the reader stopped, a worker killed": [(STOP, "reader", 0), (KILL, "worker", 0)],
    "the prefetcher stopped, the reader killed": [(STOP, "prefetcher", 0), (KILL, "reader", 0)],
}


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory) -> EngineConfig:
    """With half of the experts in memory, and a third of the tiles on the device."""
    policy, options = RANDOM
    device: dict[str, Any] = {"policy": policy, "policy_options": options, "tile": 32, "expert_cache": 0.34}
    return half_on_disk(tmp_path_factory.mktemp("shape"), **device)


async def test_answers_have_the_bits_of_experts_in_memory(reference, state) -> None:
    assert bits(await answer(state.client)) == bits(reference[0])
    assert bits(await answer(state.client, LONG, 8)) == bits(reference[1])
    stats = await state.client.stats()
    assert stats["disk"]["misses"] > 0
    assert stats["cache"]["resident_tiles"] > 0


@pytest.mark.parametrize("fault", FAULTS)
async def test_no_answer_changes_by_a_bit_when_processes_end(reference, state, fault: str) -> None:
    def happens() -> None:
        for number, role, index in FAULTS[fault]:
            state.send(number, role, index)

    assert bits(await answer(state.client, fault=happens)) == bits(reference[0])
    await state.wait_recovered()


async def test_an_expert_that_cannot_be_read_ends_the_request_and_nothing_else(reference, state) -> None:
    file = Path((await state.client.stats())["disk"]["file"])
    with shortened(file), pytest.raises(RequestFailed, match=r"cached store .*store\.bin became shorter"):
        await answer(state.client, LONG, 8)
    assert bits(await answer(state.client, LONG, 8)) == bits(reference[1])


async def test_a_policy_whose_costs_cannot_be_measured_is_refused_in_one_line(reference, state) -> None:
    await state.client.set_policy("layerwise")  # the device has all of the first layer, and memory nothing
    await answer(state.client, LONG, 8)
    disk = (await state.client.stats())["disk"]
    with shortened(Path(disk["file"])), pytest.raises(RequestFailed, match="became shorter") as refused:
        await state.client.set_policy("tandem")
    assert "\n" not in str(refused.value)
    assert state.generation("coordinator") == 0
    await state.client.set_policy(*RANDOM)
    assert bits(await answer(state.client)) == bits(reference[0])


@pytest.mark.parametrize("policy", ["on-demand", "daop", "tandem"])
async def test_policies_that_move_whole_experts_or_measure_costs(reference, state, policy: str) -> None:
    await state.client.set_policy(policy, {"placement": "popular"} if policy == "daop" else {})
    answered = await answer(state.client)
    assert policy == "daop" or same(answered, reference[0])  # which is an approximation
    await state.client.set_policy(*RANDOM)
    assert bits(await answer(state.client)) == bits(reference[0])


async def test_how_often_experts_are_used_is_kept_beside_their_file(state) -> None:
    file = Path((await state.client.stats())["disk"]["file"])
    before = set(file.parents[1].glob("*/heat.json"))  # of other engines
    await state.client.set_policy("cache")
    await answer(state.client, LONG, 80)
    async with asyncio.timeout(LIMIT):
        while not (file.parent / "heat.json").exists():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.05)
    assert set(file.parents[1].glob("*/heat.json")) - before <= {file.parent / "heat.json"}
    await state.client.set_policy(*RANDOM)


async def test_memory_and_device_add_up_to_all_experts(start_engine, on_disk, reference) -> None:
    """What the device has of a model is not kept in memory as well: in the end nothing is read."""
    two_thirds = LAYERS * EXPERTS * 2 // 3
    held = {"host_memory": HALF * 2 * 2 // 3, "expert_cache": 0.5}
    async with start_engine(replace(on_disk, policy="layerwise", policy_options={}, **held)) as (_, client):
        assert same(await answer(client), reference[0])
        before = (await client.stats())["disk"]
        assert before["capacity_experts"] == two_thirds
        assert same(await answer(client), reference[0])
        after = (await client.stats())["disk"]
        assert after["misses"] == before["misses"]
