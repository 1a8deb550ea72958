"""A killed or stopped coordinator: its clients get an error at once, the engine restarts on the same store
with the same policy; an engine that cannot be restarted stops with one line."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from fault_engines import KILL, LIMIT, PROMPT, STOP, State, answer, bits, config, same
from waiting import until

from launch.errors import EngineFailed
from launch.processes.monitor import Limits
from launch.processes.supervisor import Supervisor
from protocol.client import Client
from protocol.errors import EngineGone, RequestFailed
from shm.segment import SHM_FOLDER
from shm.store import store_name

pytestmark = pytest.mark.timeout(300)  # starts of engines, on a machine that may be busy

SHM = Path(SHM_FOLDER)

RESTARTED = 60.0  # seconds for a restart of the engine; three on an idle machine
MANY = 30  # answers of 200 tokens, five batches: the last is unfinished when the first is seen to run
SLOTS = [("coordinator", 0), ("prefetcher", 0), ("text", 0), ("worker", 0), ("worker", 1)]


async def loaders(supervisor: Supervisor) -> set[int]:
    """Collect the process ids of loaders until cancelled."""
    seen: set[int] = set()
    try:
        while True:
            seen |= {pid for child, pid in supervisor.pids.items() if child.role == "loader"}
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        return seen


def the_store(client: Client) -> os.stat_result:
    return (SHM / store_name(client.welcome.fingerprint)[1:]).stat()


async def loses_its_engine(client: Client) -> None:
    async with asyncio.timeout(LIMIT):
        assert isinstance(await client.lost(), EngineGone)


async def test_engine_restarts_when_killed_in_decode(start_engine, tiny_model) -> None:
    """With a policy that was set late and needs device memory, which must not leak."""
    async with start_engine(config(tiny_model)) as (supervisor, client), AsyncExitStack() as clients:
        await client.set_policy("on-demand", {"sizes": "even"})
        state = State(supervisor, client)
        await state.wait_recovered()
        await until(lambda: supervisor.config.policy == "on-demand")  # a restarted coordinator has it
        reference, store = await answer(client, reuse=True), the_store(client)
        assert (await client.stats())["scheduler"]["kv_tokens_kept"] > 0
        watching = asyncio.create_task(loaders(supervisor))
        slabs = [name for name in state.segments() if "-slab-" in name]
        assert len(slabs) == 1
        running = [asyncio.create_task(answer(client, count=200)) for _ in range(MANY)]
        await state.is_computing()
        state.send(KILL, "coordinator")
        await loses_its_engine(client)
        ended = await asyncio.gather(*running, return_exceptions=True)
        assert isinstance(ended[-1], EngineGone)
        assert all(isinstance(end, EngineGone | list) for end in ended)  # a list: done before the kill
        with pytest.raises(EngineGone):
            client.generate(token_ids=[5])
        client = await clients.enter_async_context(Client.connect(supervisor.endpoint, timeout=RESTARTED))
        state.client = client
        assert client.welcome.policy == "on-demand"
        stats = await client.stats()
        assert stats["policy_options"] == {"sizes": "even"}
        assert stats["scheduler"]["kv_tokens_kept"] == 0  # all that is lost
        assert [t.token for t in await answer(client)] == [t.token for t in reference]
        found = the_store(client)
        assert (found.st_ino, found.st_mtime_ns) == (store.st_ino, store.st_mtime_ns)
        assert len([name for name in state.segments() if "-slab-" in name]) == 1
        assert state.generation("coordinator") == 1
        assert sorted((child.role, child.index) for child in supervisor.pids) == SLOTS
        state.send(KILL, "worker", 0)  # a worker of the restarted engine is restarted as before
        assert len(await answer(client)) == len(reference)
        await until(lambda: sorted((child.role, child.index) for child in supervisor.pids) == SLOTS, LIMIT)
        watching.cancel()
        assert await watching == set()
    assert state.segments() == []


async def test_stopped_coordinator_is_restarted_while_a_worker_is_killed(start_engine, tiny_model) -> None:
    async with start_engine(config(tiny_model), Limits(stopped_checks=2)) as (supervisor, client):
        state = State(supervisor, client)
        reference, old = await answer(client), state.pid("coordinator")
        generation = state.generation("worker", 0)
        state.send(STOP, "coordinator")
        await loses_its_engine(client)
        await state.kill_next("worker", 0, generation)  # a generation of the restarted engine
        async with Client.connect(supervisor.endpoint, timeout=RESTARTED) as restarted:
            assert state.pid("coordinator") != old
            assert bits(await answer(restarted)) == bits(reference)
            state.client = restarted
            await state.wait_recovered()
    assert state.segments() == []


async def test_early_exits_in_a_row_stop_the_engine_with_one_line(start_engine, tiny_model) -> None:
    killed, seen = [-1], []

    async def run_and_kill() -> None:
        async with start_engine(config(tiny_model), Limits(longest_pause=0.1)) as (supervisor, client):
            state = State(supervisor, client)
            seen.append(state)
            while True:
                killed.append(await state.kill_next("coordinator", 0, killed[-1], signal.SIGSEGV))

    with pytest.raises(
        EngineFailed, match=r"^the coordinator was killed by SIGSEGV, \d times in a row"
    ) as failure:
        await run_and_kill()
    assert "\n" not in str(failure.value)
    assert 4 <= killed[-1] <= 5
    assert seen[0].supervisor.pids == {}
    assert seen[0].segments() == []


async def test_restarted_coordinator_that_exits_early_stops_an_engine_that_ran_long(
    start_engine, tiny_model
) -> None:
    """Early is counted from the latest restart, not from the engine's first start."""
    limits = Limits(early=2.0, coordinator_exits=2)
    killed = []

    async def run_and_kill() -> None:
        async with start_engine(config(tiny_model), limits) as (supervisor, client):
            state = State(supervisor, client)
            await asyncio.sleep(limits.early)
            killed.append(await state.kill_next("coordinator", 0, -1, signal.SIGSEGV))
            async with Client.connect(supervisor.endpoint, timeout=RESTARTED):
                killed.append(await state.kill_next("coordinator", 0, killed[-1], signal.SIGSEGV))
            await state.kill_next("coordinator", 0, killed[-1], signal.SIGSEGV)  # if it is restarted
            killed.append(-1)
            await asyncio.sleep(LIMIT)

    with pytest.raises(EngineFailed, match=r"^the coordinator was killed by SIGSEGV, 2 times in a row"):
        await run_and_kill()
    assert killed == [0, 1]


async def test_worker_that_cannot_start_stops_the_engine_with_one_line(start_engine, tiny_model) -> None:
    """A restarted worker finds its segment removed. Meanwhile the other worker computes."""
    seen = []

    async def run_and_kill() -> None:
        async with start_engine(config(tiny_model), Limits(longest_pause=0.1)) as (supervisor, client):
            state = State(supervisor, client)
            seen.append(state)
            reference = await answer(client)
            (control,) = [name for name in state.segments() if "-control-" in name]
            (SHM / control).unlink()
            state.send(KILL, "worker", 1)
            assert bits(await answer(client)) == bits(reference)
            await asyncio.sleep(LIMIT)

    with pytest.raises(EngineFailed, match=r"does not exist, 8 times in a row") as failure:
        await run_and_kill()
    assert "\n" not in str(failure.value)
    assert seen[0].supervisor.pids == {}
    assert seen[0].segments() == []


async def test_engine_restarts_when_killed_while_a_prefetcher_starts(start_engine, tiny_model) -> None:
    """The new policy needs it; its SetPolicy fails with EngineGone unless it was done, and the engine
    recovers."""
    async with start_engine(config(tiny_model)) as (supervisor, client):
        state = State(supervisor, client)
        reference = await answer(client)
        setting = asyncio.create_task(client.set_policy("on-demand"))
        await until(lambda: any(child.role == "prefetcher" for child in supervisor.pids), LIMIT)
        state.send(KILL, "coordinator")
        await asyncio.wait([setting], timeout=LIMIT)
        assert isinstance(setting.exception(), EngineGone | None)
        async with Client.connect(supervisor.endpoint, timeout=RESTARTED) as restarted:
            assert same(await answer(restarted), reference)
            await restarted.set_policy("on-demand")
            assert [t.token for t in await answer(restarted)] == [t.token for t in reference]
            assert sorted((child.role, child.index) for child in supervisor.pids) == SLOTS


async def crash(state: State, number: int, computing: int) -> set[int]:
    """End the coordinator by this signal while it computes so many requests in one step; returns their
    keys."""
    assert state.supervisor._monitor is not None
    control, generation = state.supervisor._monitor._control, state.generation("coordinator")
    async with asyncio.timeout(LIMIT):
        while len(named := control.requests) != computing:
            state.send(signal.SIGCONT, "coordinator")
            await asyncio.sleep(0.002)
            state.send(STOP, "coordinator")
            await asyncio.sleep(0.002)
    for sent in (signal.Signals(number), signal.SIGCONT):
        state.send(sent, "coordinator")
    await until(lambda: state.generation("coordinator") > generation, LIMIT)
    return {key for key, _ in named}


async def test_request_that_was_computed_at_two_crashes_is_refused_and_no_other(
    start_engine, tiny_model
) -> None:
    """After a crash each request of its step is computed alone."""
    limits = Limits(stopped_checks=1000, silent_checks=1000, coordinator_exits=100)
    async with (
        start_engine(config(tiny_model), limits) as (supervisor, client),
        Client.connect(supervisor.endpoint, retry=RESTARTED) as patient,
        Client.connect(supervisor.endpoint, retry=RESTARTED) as other,
    ):
        state = State(supervisor, client)
        prompts = [PROMPT[n:] for n in range(3)]
        whole = [await answer(client, prompt, 48) for prompt in prompts]
        running = [
            asyncio.create_task(answer(sender, prompt, 48))
            for sender, prompt in zip((patient, patient, other), prompts, strict=True)
        ]
        together = await crash(state, signal.SIGSEGV, 3)
        (alone,) = await crash(state, signal.SIGSEGV, 1)
        assert alone in together
        ended = await asyncio.gather(*running, return_exceptions=True)
        (failed,) = [place for place, end in enumerate(ended) if isinstance(end, Exception)]
        reason = "^the engine crashed 2 times while it was computing this request; it is not computed again"
        with pytest.raises(RequestFailed, match=reason):
            raise ended[failed]
        assert all(same(end, whole[place]) for place, end in enumerate(ended) if place != failed)
        with pytest.raises(RequestFailed, match=reason):  # also when another client sends it
            await answer(other, prompts[failed], 48)
        assert state.generation("coordinator") == 2
    assert state.segments() == []


async def test_engine_of_one_process_restarts_with_the_same_answers(
    start_engine, tiny_model, tmp_path: Path
) -> None:
    """Without workers, and without a tokenizer for a text process."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_model / name, tmp_path)
    async with (
        start_engine(config(tmp_path, workers=0)) as (supervisor, client),
        AsyncExitStack() as clients,
    ):
        whole = bits(await answer(client))
        state = State(supervisor, client)
        state.send(KILL, "coordinator")
        await loses_its_engine(client)
        async with asyncio.timeout(RESTARTED):
            again = await clients.enter_async_context(Client.connect(supervisor.endpoint, timeout=RESTARTED))
            assert bits(await answer(again)) == whole
