"""Many clients of an engine with KV cache for four requests: all are served, in a fair order, and all memory
is released."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import psutil
import pytest
import pytest_asyncio
from raw_client import idle

from launch.equality import Verdict, compare
from launch.processes.supervisor import Supervisor
from protocol.client import Client
from protocol.sockets import Identity

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = 24
LENGTH = 12  # new tokens of an answer
PROMPT = CONTEXT - LENGTH
BOUND = 1e-4
CLIENTS = 16


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small(start_engine, plain_config) -> AsyncIterator[tuple[Supervisor, Client]]:
    """A KV cache of four contexts, and each request fills one."""
    async with start_engine(replace(plain_config, context=CONTEXT, kv_tokens=4 * CONTEXT)) as running:
        yield running


def prompt_of(number: int) -> list[int]:
    return [10 + number + i for i in range(PROMPT)]


async def test_requests_of_many_clients_are_served_fairly(small) -> None:
    supervisor, first = small
    alone = {}
    for i in range(8):
        answer = first.generate(token_ids=prompt_of(i), max_tokens=LENGTH, ignore_eos=True)
        alone[i] = [token async for token in answer]
    served: list[int] = []  # the clients, in the order of their first tokens

    async def ask(client: Client, number: int, which: int) -> None:
        answer = client.generate(token_ids=prompt_of(which), max_tokens=LENGTH, ignore_eos=True)
        tokens = []
        async for token in answer:
            if not tokens:
                served.append(number)
            tokens.append(token.token)
        assert answer.done is not None
        assert answer.done.reason == "length"
        assert compare(tokens, alone[which], BOUND).verdict is not Verdict.MISMATCH

    memory = []
    coordinator = psutil.Process(supervisor.pids[Identity("coordinator", 0, 0)])
    for wave in range(2):
        served.clear()
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(Client.connect(supervisor.endpoint)) for _ in range(CLIENTS)
            ]
            async with asyncio.TaskGroup() as group:
                for i in range(4 * CLIENTS):  # a client's four at once, one client after the other
                    group.create_task(ask(clients[i // 4], i // 4, i % 8))
            assert [client.strays for client in clients] == [0] * CLIENTS
        assert Counter(served) == {i: 4 for i in range(CLIENTS)}, wave
        # The first client's four may run before other clients connect; from then on clients take turns.
        assert max(Counter(served[:CLIENTS]).values()) <= 4
        assert len(set(served[: CLIENTS + 20])) == CLIENTS
        memory.append(coordinator.memory_info().rss)
    await idle(first, kept=False)
    assert memory[1] < memory[0] + (16 << 20)
