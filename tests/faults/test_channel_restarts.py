"""Processes that are killed or stopped while channels are gathered and masks leave others out: answers are
the same to rounding. The engine's link is so slow that most of a step is gathering."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from fault_engines import KILL, STOP, State, answer, bits, config, same

from launch.processes.monitor import Limits
from protocol.client import Client
from protocol.errors import EngineGone

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

FLOE = {"sparsity": "0.5", "pause": "0"}
CONTINUE, PAUSE = signal.SIGCONT, 0.3  # s; the supervisor looks twice, half a second apart
LENGTH = 220  # tokens: seconds on any machine, for the link is slow
FAULTS = [(KILL, ["prefetcher"]), (STOP, ["prefetcher"]), (KILL, ["prefetcher", "worker"])]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def state(start_engine, tiny_model) -> AsyncIterator[State]:
    settings = {"format": "floe-u8-int8", "policy": "floe", "policy_options": FLOE}
    settings |= {"expert_cache": 0.3, "link_gbps": 0.002, "host_slowdown": 1.0}
    async with start_engine(config(tiny_model, **settings), Limits(stopped_checks=2)) as (supervisor, client):
        state = State(supervisor, client)
        await state.wait_recovered()
        yield state


@pytest.mark.parametrize(("number", "roles"), FAULTS, ids=["killed", "stopped", "with a worker"])
async def test_exits_during_gathers_change_no_token(state, number, roles) -> None:
    reference = await answer(state.client)
    before = {role: await state.exits(role) for role in roles}
    counters = (await state.client.stats())["engine"]["decode"]
    assert counters["channels"]["moved"] > 0
    assert counters["channels"]["guessed"] > 0
    assert counters["kept_channels"] < counters["masked_channels"]

    def fault() -> None:
        for role in roles:
            state.send(number, role)

    assert same(await answer(state.client, fault=fault), reference)
    after = (await state.client.stats())["engine"]["decode"]
    assert after["host_tiles"] == counters["host_tiles"]  # nothing is left to the workers
    assert after["channels"]["moved"] > counters["channels"]["moved"]
    await state.place_experts("floe", FLOE)
    for role in roles:
        await state.wait_recovered(role, before[role] + 1)
    assert same(await answer(state.client), reference)


async def test_stopped_coordinator_goes_on(state) -> None:
    """Gathers that were ordered land meanwhile; nobody is restarted."""
    reference, pids = await answer(state.client), state.supervisor.pids
    moved = (await state.client.stats())["engine"]["decode"]["channels"]["moved"]

    def fault() -> None:
        state.send(STOP, "coordinator")
        asyncio.get_running_loop().call_later(PAUSE, state.send, CONTINUE, "coordinator")

    began = time.monotonic()
    found = await answer(state.client, fault=fault)
    assert time.monotonic() - began > PAUSE
    assert bits(found) == bits(reference)
    assert state.supervisor.pids == pids
    after = (await state.client.stats())["engine"]["decode"]
    assert after["channels"]["moved"] > moved


async def test_coordinator_killed_during_gathers_gives_the_same_answer_afterwards(state) -> None:
    """The store's up matrices are attached again, and the new slab holds the same experts."""
    reference = await answer(state.client)
    with pytest.raises(EngineGone):
        await answer(state.client, count=LENGTH, fault=lambda: state.send(KILL, "coordinator"))
    async with Client.connect(state.supervisor.endpoint, timeout=60.0) as client:
        assert client.welcome.policy == "floe"
        assert same(await answer(client), reference)
        counters = (await client.stats())["engine"]["decode"]
        assert counters["channels"]["moved"] > 0
        assert len([name for name in state.segments() if "-slab-" in name]) == 1
