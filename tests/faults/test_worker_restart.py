"""Killed and stopped workers in a real engine: no answer changes by a bit, and all are restarted. Where an
answer ends before its fault, the next one notices a stopped worker."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import pytest_asyncio
from fault_engines import KILL, LIMIT, LONG, PROMPT, STOP, State, answer, bits, config, same
from waiting import until

from launch.processes.monitor import Limits

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

MASKED = {  # half of the channels
    "format": "floe-u4-int4",
    "policy": "floe-host",
    "policy_options": {"sparsity": "0.5"},
}
SOON = Limits(start_checks=12, stopped_checks=2)  # a stopped process is noticed soon
FAULTS = {
    "one killed": [(KILL, 0)],
    "both killed": [(KILL, 0), (KILL, 1)],
    "one stopped, one killed": [(STOP, 0), (KILL, 1)],
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def state(start_engine, tiny_model) -> AsyncIterator[State]:
    async with start_engine(config(tiny_model), SOON) as (supervisor, client):
        state = State(supervisor, client)
        await state.wait_recovered()
        yield state


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(start_engine, tiny_model) -> AsyncIterator[State]:
    """An engine with a single worker, which leaves channels out."""
    async with start_engine(config(tiny_model, workers=1, **MASKED), SOON) as (supervisor, client):
        state = State(supervisor, client)
        await state.wait_recovered()
        yield state


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def over_zmq(start_engine, tiny_model) -> AsyncIterator[State]:
    """An engine whose Work goes over sockets; that of the others goes through shared memory."""
    async with start_engine(config(tiny_model, exchange="zmq"), SOON) as (supervisor, client):
        state = State(supervisor, client)
        await state.wait_recovered()
        yield state


async def leaves_out(state: State) -> bool:
    """Whether masks have left channels out."""
    decode = (await state.client.stats())["engine"]["decode"]
    return bool(0 < decode["kept_channels"] < decode["masked_channels"])


async def recovered(state: State, before: int, faults: int) -> None:
    stats = await state.wait_recovered("worker", before + faults)
    recovery = stats["recovery"]["worker"]
    assert recovery["deaths"] == before + faults
    assert recovery["whole_s"] > 0


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
async def test_worker_exits_in_decode(state, faults) -> None:
    reference, before = await answer(state.client), await state.exits()

    def inject() -> None:
        for number, index in faults:
            state.send(number, "worker", index)

    assert bits(await answer(state.client, fault=inject)) == bits(reference)
    assert bits(await answer(state.client)) == bits(reference)
    await recovered(state, before, len(faults))


@pytest.mark.parametrize("faults", [FAULTS["one killed"], FAULTS["both killed"]], ids=["one", "both"])
async def test_worker_exits_in_prefill(state, faults) -> None:
    """In the prefill of a long prompt: it cannot be done before the workers that are stopped are killed."""
    client = state.client
    reference, before = await answer(client, LONG, 8), await state.exits()
    pids = [state.pid("worker", index) for _, index in faults]
    for pid in pids:
        os.kill(pid, STOP)
    running = asyncio.create_task(answer(client, LONG, 8))
    await state.is_computing()
    for pid in pids:
        with suppress(ProcessLookupError):  # it was taken for a hung one
            os.kill(pid, KILL)
    assert bits(await running) == bits(reference)
    await recovered(state, before, len(faults))


async def test_worker_exits_while_idle(state) -> None:
    reference, before = await answer(state.client), await state.exits()
    generation = state.generation("worker", 1)
    state.send(KILL, "worker", 1)
    state.send(STOP, "worker", 0)
    await until(lambda: state.generation("worker", 1) > generation, LIMIT)
    assert bits(await answer(state.client)) == bits(reference)
    await recovered(state, before, 2)


async def test_worker_stopped_before_its_ready_is_restarted(state) -> None:
    """No Work waits for it yet: the supervisor notices the hang."""
    reference, generation = await answer(state.client), state.generation("worker", 0)
    state.send(KILL, "worker", 0)
    stopped = await state.kill_next("worker", 0, generation, STOP)
    await until(lambda: state.generation("worker", 0) > stopped, LIMIT)
    await state.wait_recovered()
    assert bits(await answer(state.client)) == bits(reference)


async def test_workers_killed_at_random_instants_under_load_change_no_token(state) -> None:
    """The instants are numbers of tokens that have arrived, of all answers together."""
    draw, before, arrived = random.Random(7), await state.exits(), Counter[str]()
    prompts = [PROMPT, LONG[:60], PROMPT[5:]]
    references = [bits(await answer(state.client, prompt, 48)) for prompt in prompts]
    running = [
        asyncio.create_task(answer(state.client, prompt, 48, on_token=lambda: arrived.update(".")))
        for prompt in prompts * 2
    ]
    for tokens in sorted(draw.sample(range(1, len(running) * 48 - 24), 8)):
        await until(lambda tokens=tokens: arrived.total() >= tokens, LIMIT)
        index = draw.randrange(2)
        if state.generation("worker", index) >= 0:  # else it is being restarted
            state.send(KILL, "worker", index)
    for task, prompt in zip(running, prompts * 2, strict=True):
        tokens = await task
        assert same(tokens, await answer(state.client, prompt, 48))
    for prompt, reference in zip(prompts, references, strict=True):
        assert bits(await answer(state.client, prompt, 48)) == reference
    await state.wait_recovered("worker", before + 1)


async def test_both_exchanges_give_the_same_bits_and_survive_the_same_exits(state, over_zmq) -> None:
    reference = bits(await answer(state.client))
    exchanges = [(await each.client.stats())["exchange"] for each in (state, over_zmq)]
    assert [each["name"] for each in exchanges] == ["shm", "zmq"]
    for fault in (None, lambda: over_zmq.send(KILL, "worker", 0), lambda: over_zmq.send(STOP, "worker", 1)):
        before = await over_zmq.exits()
        for one in (fault, None):
            assert bits(await answer(over_zmq.client, fault=one)) == reference
        await over_zmq.wait_recovered("worker", before + (fault is not None))


@pytest.mark.parametrize("number", [KILL, STOP], ids=["killed", "stopped"])
async def test_only_worker_exits_in_decode(alone, number) -> None:
    reference, before = await answer(alone.client), await alone.exits()
    tokens = await answer(alone.client, fault=lambda: alone.send(number, "worker"))
    assert bits(tokens) == bits(await answer(alone.client)) == bits(reference)
    await recovered(alone, before, 1)
    assert await leaves_out(alone)
