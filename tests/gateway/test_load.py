"""Many streams at once while processes of the engine are killed: none is lost, none is mixed up."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator

import httpx2 as httpx
import pytest
from gateway_engine import Served, serve

STREAMS = 64
TOKENS = 80


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as running:
        yield running


def own_token(number: int) -> int:
    """The token that a stream repeats, which no other stream does."""
    return 300 + 7 * number


async def read(http: httpx.AsyncClient, number: int) -> tuple[str, str, int]:
    """Text, reason and tokens of a stream that a bias makes repeat its own token."""
    body = {
        "prompt": [*range(10, 30), own_token(number)],
        "max_tokens": TOKENS - number % 7,
        "temperature": 0,
        "logit_bias": {str(own_token(number)): 100},
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    text, reason, tokens = "", "", 0
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            if event["usage"] is not None:
                tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                text += choice["text"]
                reason = choice["finish_reason"] or reason
    return text, reason, tokens


async def expected(http: httpx.AsyncClient, number: int) -> str:
    ids = [own_token(number)] * (TOKENS - number % 7)
    return str((await http.post("/detokenize", json={"tokens": ids})).json()["prompt"])


@pytest.mark.timeout(240)
async def test_streams_survive_the_death_of_workers_and_of_the_coordinator(served: Served) -> None:
    limits = httpx.Limits(max_connections=STREAMS + 1)
    async with httpx.AsyncClient(base_url=served.url, timeout=200, limits=limits) as http:
        gateway = served.child("pipeline.gateway.process").pid
        running = [asyncio.create_task(read(http, number)) for number in range(STREAMS)]
        await asyncio.sleep(0.5)
        served.child("workers.expert_worker").send_signal(signal.SIGKILL)
        await asyncio.sleep(0.5)
        served.child("pipeline.coordinator").send_signal(signal.SIGKILL)
        assert not any(task.done() for task in running)
        found = await asyncio.gather(*running)
        assert served.child("pipeline.gateway.process").pid == gateway
        assert "tandem_engine_restarts_total 1.0" in (await http.get("/metrics")).text
        wanted = [await expected(http, number) for number in range(STREAMS)]
    assert [text for text, _, _ in found] == wanted
    assert [tokens for _, _, tokens in found] == [TOKENS - number % 7 for number in range(STREAMS)]
    assert {reason for _, reason, _ in found} == {"length"}


async def test_a_killed_gateway_is_back_at_its_port(served: Served) -> None:
    served.child("pipeline.gateway.process").send_signal(signal.SIGKILL)
    async with httpx.AsyncClient(base_url=served.url, timeout=20) as http:
        for _ in range(600):  # a busy machine takes long to start a process
            try:
                if (await http.get("/health")).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.1)
        assert (await read(http, 1))[1] == "length"
