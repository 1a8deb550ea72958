"""Workers that are killed and stopped in a real engine: no answer changes by a bit, and all are replaced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from fault_engines import KILL, LONG, STOP, State, answer, answer_with_fault, bits, config, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

FAULTS = {
    "one killed": [(KILL, 0)],
    "both killed": [(KILL, 0), (KILL, 1)],
    "one stopped, one killed": [(STOP, 0), (KILL, 1)],
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def state(start_engine, tiny_model) -> AsyncIterator[State]:
    async with start_engine(config(tiny_model)) as (supervisor, client):
        state = State(supervisor, client)
        await state.whole()
        yield state


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(start_engine, tiny_model) -> AsyncIterator[State]:
    """Its only worker."""
    async with start_engine(config(tiny_model, workers=1)) as (supervisor, client):
        state = State(supervisor, client)
        await state.whole()
        yield state


async def recovered(state: State, before: int, faults: int) -> None:
    stats = await state.whole("worker", before + faults)
    recovery = stats["recovery"]["worker"]
    assert recovery["deaths"] == before + faults
    assert 0 < recovery["ready_s"] <= recovery["whole_s"]


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
async def test_in_decode(state, faults) -> None:
    reference, before = await answer(state.client), await state.deaths()

    def strike() -> None:
        for number, index in faults:
            state.send(number, "worker", index)

    assert bits(await answer_with_fault(state.client, strike)) == bits(reference)
    await recovered(state, before, len(faults))
    assert bits(await answer(state.client)) == bits(reference)


@pytest.mark.parametrize("faults", [FAULTS["one killed"], FAULTS["both killed"]], ids=["one", "both"])
async def test_in_prefill(state, faults) -> None:
    """A long prompt's; nothing has been answered when they die."""
    client = state.client
    reference, before = await answer(client, LONG, 8), await state.deaths()
    rows = await state.prefilled()
    running = asyncio.create_task(answer(client, LONG, 8))
    await state.prefilling(1)
    assert await state.prefilled() < rows + len(LONG)  # in the middle of it
    for number, index in faults:
        state.send(number, "worker", index)
    assert bits(await running) == bits(reference)
    await recovered(state, before, len(faults))


async def test_while_nothing_runs(state) -> None:
    reference, before = await answer(state.client), await state.deaths()
    lives = state.incarnation("worker", 1)
    state.send(KILL, "worker", 1)
    state.send(STOP, "worker", 0)
    await until(lambda: state.incarnation("worker", 1) > lives)
    assert bits(await answer(state.client)) == bits(reference)
    await recovered(state, before, 2)


async def test_a_successor_that_is_stopped_before_it_has_said_a_word(state) -> None:
    """It is nobody's yet: the supervisor finds it."""
    reference, lives = await answer(state.client), state.incarnation("worker", 0)
    state.send(KILL, "worker", 0)
    stopped = await state.kill_next("worker", 0, lives, STOP)
    await until(lambda: state.incarnation("worker", 0) > stopped)
    await state.whole()
    assert bits(await answer(state.client)) == bits(reference)


@pytest.mark.parametrize("number", [KILL, STOP], ids=["killed", "stopped"])
async def test_the_only_worker(alone, number) -> None:
    reference, before = await answer(alone.client), await alone.deaths()
    began = time.monotonic()
    tokens = await answer_with_fault(alone.client, lambda: alone.send(number, "worker"))
    assert time.monotonic() - began < 15
    assert bits(tokens) == bits(reference)
    await recovered(alone, before, 1)
    assert bits(await answer(alone.client)) == bits(reference)
