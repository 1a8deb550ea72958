"""Whether the engine computes, beside one whose processes are stopped and go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
from gateway_engine import Served
from waiting import until

from pipeline.gateway.engine_links import EngineLinks, Health
from pipeline.gateway.errors import ApiError
from protocol.client import Client

AMPLE = 60.0  # seconds for a step


@asynccontextmanager
async def linked(served: Served) -> AsyncIterator[EngineLinks]:
    links = EngineLinks(served.endpoint)
    links.start()
    try:
        await until(lambda: links.ready)
        yield links
    finally:
        await links.close()


@pytest.mark.parametrize("module", ["workers.expert_worker", "pipeline.coordinator"])
async def test_an_engine_of_which_a_process_is_stopped_is_not_healthy(served: Served, module: str) -> None:
    async with linked(served) as links:
        await Health(links, period=0.0, limit=AMPLE).check()
        supervisor = psutil.Process(served.process.pid)
        stopped = [
            child for child in supervisor.children(recursive=True) if module in child.cmdline()
        ]  # all of them: one worker would compute for another
        supervisor.suspend()  # it would replace them
        for process in stopped:
            process.suspend()
        try:
            with pytest.raises(ApiError, match="the engine hangs") as refused:
                await Health(links, period=0.0, limit=0.5).check()
            assert refused.value.status == 503
        finally:
            for process in stopped:
                process.resume()
            supervisor.resume()
        await Health(links, period=0.0, limit=AMPLE).check()


async def test_looking_at_the_engine_changes_nothing(served: Served) -> None:
    def counted(stats: dict[str, Any]) -> list[Any]:
        steps = [[phase["steps"], phase["rows"]] for phase in stats["engine"].values()]
        names = ("ended", "kv_tokens_used", "kv_tokens_kept", "kv_evicted_blocks", "preemptions")
        return [steps, stats["counted_tokens"], *(stats["scheduler"][name] for name in names)]

    async with linked(served) as links, Client.connect(served.endpoint) as own:
        await own.expert_activity()
        await own.generate(token_ids=(5, 6), max_tokens=2).result()
        before, used = counted(await own.stats()), (await own.expert_activity()).used.sum()
        for _ in range(3):
            await Health(links, limit=AMPLE).check()
        assert counted(await own.stats()) == before
        assert (await own.expert_activity()).used.sum() == used


async def test_no_step_is_asked_for_while_others_make_progress(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    async with linked(served) as links, Client.connect(served.endpoint) as own:
        client = await links.client()
        monkeypatch.setattr(client, "generate", lambda **fields: asked.append(fields))
        answers = [own.generate(token_ids=(5,), max_tokens=500, ignore_eos=True) for _ in range(4)]
        await until(lambda: answers[0].token_ids)
        health = Health(links, limit=AMPLE)
        await asyncio.gather(*(health.check() for _ in range(3)))
        await health.check()  # within the period after a step
        assert not asked
        assert not all(answer.done for answer in answers)
        for answer in answers:
            await answer.cancel()
