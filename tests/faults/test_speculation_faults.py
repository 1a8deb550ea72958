"""An answer whose tokens are guessed ahead loses none and doubles none when processes are killed."""

from __future__ import annotations

import pytest
from fault_engines import KILL, State, answer, config, same

from protocol.client import Client

pytestmark = pytest.mark.timeout(300)  # starts of engines, on a machine that may be busy

RESTARTED = 60.0  # seconds for a restart of the engine
COUNT = 48


async def test_guessed_answer_survives_kills(start_engine, tiny_model) -> None:
    async with start_engine(config(tiny_model, speculate=4)) as (supervisor, client):
        state = State(supervisor, client)
        reference = await answer(client, count=COUNT)
        stats = (await client.stats())["speculation"]
        assert stats["drafted"] >= stats["accepted"] > 0
        found = await answer(client, count=COUNT, fault=lambda: state.send(KILL, "worker"))
        assert same(found, reference)
        async with Client.connect(supervisor.endpoint, retry=RESTARTED) as again:
            found = await answer(again, count=COUNT, fault=lambda: state.send(KILL, "coordinator"))
            assert same(found, reference)
            assert [token.index for token in found] == list(range(COUNT))
