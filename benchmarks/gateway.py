"""What the gateway costs: the same requests by the client library and over HTTP, in turns, on one engine.

    python -m benchmarks.gateway [--model DIR] [--streams 16] [--tokens 128] [--rounds 7] [OPTIONS OF SERVE]

Also shown is the processor time of the gateway, which other programs disturb less.

`alone`: seconds of a request for one token, one after the other. `streams`: tokens a second of so many
answers at once, streamed. Pairs of both are measured in turns; shown are medians and the median of the pairs'
ratios. The HTTP client here parses no events, because one that does costs more than the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

from protocol.client import Client
from protocol.messages import Sampling

LAUNCH = Path(__file__).parents[1] / "launch.py"
PROMPT = list(range(20, 52))
ALONE = 60  # requests of a round


async def http(port: int, body: dict[str, object]) -> bytes:
    """The whole answer to a completion."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await ask(writer, body, close=True)
    found = await reader.read()
    writer.close()
    return found


async def ask(writer: asyncio.StreamWriter, body: dict[str, object], *, close: bool) -> None:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(content)}\r\n"
    head += "content-type: application/json\r\n" + ("connection: close\r\n" if close else "")
    writer.write(head.encode() + b"\r\n" + content)
    await writer.drain()


async def alone_http(port: int) -> float:
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    took = []
    for _ in range(ALONE):
        began = time.perf_counter()
        await ask(writer, body, close=False)
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None, head
        await reader.readexactly(int(length[1]))
        took.append(time.perf_counter() - began)
    writer.close()
    return statistics.median(took)


async def alone_direct(client: Client) -> float:
    took = []
    for _ in range(ALONE):
        began = time.perf_counter()
        await client.generate(token_ids=PROMPT, max_tokens=1, ignore_eos=True, conversation="alone").result()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


async def streams_http(port: int, streams: int, tokens: int) -> float:
    def body(number: int) -> dict[str, object]:
        options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        return {"prompt": [number, *PROMPT], "max_tokens": tokens, "temperature": 0} | options

    began = time.perf_counter()
    answers = await asyncio.gather(*(http(port, body(number)) for number in range(streams)))
    seconds = time.perf_counter() - began
    for answer in answers:
        found = re.search(rb'"completion_tokens":(\d+)', answer)
        assert found is not None, answer[-500:]
        assert int(found[1]) == tokens
    return streams * tokens / seconds


async def streams_direct(client: Client, streams: int, tokens: int) -> float:
    began = time.perf_counter()
    answers = [
        client.generate(
            token_ids=[number, *PROMPT],
            max_tokens=tokens,
            ignore_eos=True,
            sampling=Sampling(),
            conversation=f"streams/{number}",
        )
        for number in range(streams)
    ]
    for result in await asyncio.gather(*(answer.result() for answer in answers)):
        assert len(result.tokens) == tokens
    return streams * tokens / (time.perf_counter() - began)


def gateway_seconds(supervisor: int) -> float:
    """Processor time that the gateway has used."""
    for child in psutil.Process(supervisor).children(recursive=True):
        if "pipeline.gateway.process" in child.cmdline():
            times = child.cpu_times()
            return times.user + times.system
    raise LookupError("no gateway")


async def measure(port: int, endpoint: str, supervisor: int, streams: int, tokens: int, rounds: int) -> None:
    async with Client.connect(endpoint) as client:
        await streams_http(port, streams, 8)
        await streams_direct(client, streams, 8)
        before = gateway_seconds(supervisor)
        alone = [(await alone_direct(client), await alone_http(port)) for _ in range(rounds)]
        direct, over = (statistics.median(times) * 1e3 for times in zip(*alone, strict=True))
        added = statistics.median(b - a for a, b in alone) * 1e3
        used = (gateway_seconds(supervisor) - before) / (rounds * ALONE) * 1e3
        print(f"gateway's processor time: {used:.2f} ms a request")
        print(f"alone: {direct:.2f} ms, over HTTP {over:.2f} ms, {added:+.2f} ms a request")
        many = []
        before = gateway_seconds(supervisor)
        for round_ in range(rounds):
            if round_ % 2:
                own = await streams_direct(client, streams, tokens)
                many.append((own, await streams_http(port, streams, tokens)))
            else:
                by_http = await streams_http(port, streams, tokens)
                many.append((await streams_direct(client, streams, tokens), by_http))
        direct, over = (statistics.median(speeds) for speeds in zip(*many, strict=True))
        ratio = statistics.median(b / a for a, b in many)
        used = (gateway_seconds(supervisor) - before) / (rounds * streams * tokens) * 1e6
        print(f"gateway's processor time: {used:.0f} us a token")
        print(f"{streams} streams: {direct:.0f} tokens/s, over HTTP {over:.0f}, ratio {ratio:.3f}")
        print("pairs: " + ", ".join(f"{b / a:.3f}" for a, b in many))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    given, options = parser.parse_known_args()
    command = [sys.executable, str(LAUNCH), "serve", "--http", "127.0.0.1:0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            line = process.stdout.readline()
            while (
                found := re.search(r"HTTP is served at http://[^:]+:(\d+)", process.stderr.readline())
            ) is None:
                if process.poll() is not None:
                    sys.exit("the engine has not started")
            endpoint = line.split()[1]
            asyncio.run(
                measure(int(found[1]), endpoint, process.pid, given.streams, given.tokens, given.rounds)
            )
        finally:
            process.terminate()
            process.wait(60)


if __name__ == "__main__":
    main()
