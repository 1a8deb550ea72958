"""Many streams at once while processes of the engine are killed: none is lost, none is mixed up."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections import Counter
from collections.abc import Iterator

import httpx2 as httpx
import pytest
from embedded_tokenizer import embedded_tokenizer
from gateway_engine import Served, serve
from waiting import until

STREAMS = 40
TOKENS = 40


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as running:
        yield running


def own_token(number: int) -> int:
    """The token that a stream repeats, which no other stream does."""
    return 300 + 7 * number


async def read(
    http: httpx.AsyncClient, number: int, arrived: Counter[int] | None = None
) -> tuple[str, str, int]:
    """Returns text, reason and tokens of a stream that a bias makes repeat its own token.

    `arrived` counts its events as they come."""
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
            if arrived is not None:
                arrived[number] += 1
            for choice in event["choices"]:
                text += choice["text"]
                reason = choice["finish_reason"] or reason
    return text, reason, tokens


@pytest.mark.timeout(240)
async def test_streams_survive_the_death_of_workers_and_of_the_coordinator(served: Served) -> None:
    limits = httpx.Limits(max_connections=STREAMS + 1)
    async with httpx.AsyncClient(base_url=served.url, timeout=200, limits=limits) as http:
        gateway = served.child("pipeline.gateway.process").pid
        arrived: Counter[int] = Counter()
        running = [asyncio.create_task(read(http, number, arrived)) for number in range(STREAMS)]
        # Each round of the engine prefills one of the streams, so at the first token most have yet to begin.
        for module in ("workers.expert_worker", "pipeline.coordinator"):
            before = arrived.total()
            await until(lambda before=before: arrived.total() > before, 100)
            served.child(module).send_signal(signal.SIGKILL)
            assert not all(task.done() for task in running)
        answers = await asyncio.gather(*running)
        assert served.child("pipeline.gateway.process").pid == gateway
        assert "tandem_engine_restarts_total 1.0" in (await http.get("/metrics")).text
    decode = embedded_tokenizer().decoder.decode
    wanted = [decode([own_token(number)] * (TOKENS - number % 7)) for number in range(STREAMS)]
    assert [text for text, _, _ in answers] == wanted
    assert [tokens for _, _, tokens in answers] == [TOKENS - number % 7 for number in range(STREAMS)]
    assert {reason for _, reason, _ in answers} == {"length"}


async def test_no_other_program_gets_the_port_of_a_killed_gateway(served: Served) -> None:
    """Nor that of the other loopback address. Connections wait for the next gateway."""
    port = int(served.url.rpartition(":")[2])
    gateway = served.child("pipeline.gateway.process")
    gateway.kill()
    gateway.wait(20)
    neighbours = [("127.0.0.1", socket.AF_INET), ("0.0.0.0", socket.AF_INET), ("::1", socket.AF_INET6)]
    for host, family in neighbours:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            with socket.socket(family) as neighbour:
                neighbour.setsockopt(socket.SOL_SOCKET, option, 1)
                with pytest.raises(OSError, match="Address already in use"):
                    neighbour.bind((host, port))
    for host in ("127.0.0.1", "[::1]"):
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=60) as http:
            while (await http.get("/health")).status_code != 200:  # noqa: ASYNC110 - it connects to the engine
                await asyncio.sleep(0.05)
            assert (await read(http, 1))[1] == "length"
