"""Hostile messages on all four sockets of a real engine, while a client is served: a bounded share of what
`benchmarks/frame_fuzz.py` does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.chaos.hostile_client import SOCKETS, HostileClient
from launch.chaos.processes import supervisor_of, usage
from launch.equality import Verdict, compare, rounding_bound
from launch.stress.requests import End, Request, ask
from pipeline.config import EngineConfig
from protocol.client import Client
from protocol.messages import TAGS, VERSION, Sampling
from protocol.sockets import connect_dealer, ipc_endpoint

FRAMES = 4000
BURST = 250
MORE_MEMORY = 64 << 20  # bytes that a process may have taken for what it was sent
PROMPT = Request("asked", "A list of", None, 24, Sampling())
frames = st.lists(st.binary(max_size=40), min_size=1, max_size=6)
tagged = st.builds(
    lambda tag, rest: [bytes([tag, VERSION]), *rest],
    st.sampled_from(sorted(TAGS)) | st.integers(0, 255),
    frames,
)


def config(model: Path) -> EngineConfig:
    """With a prefetcher, so that all sockets are there."""
    return EngineConfig(
        model=model,
        device="cpu",
        policy="on-demand",
        expert_cache=0.5,
        format="f32",
        backbone_dtype="f32",
        workers=2,
    )


async def test_hostile_frames_harm_nobody(start_engine, tiny_model: Path) -> None:
    async with start_engine(config(tiny_model)) as (engine, client):
        runtime = Path(engine.endpoint.removeprefix("ipc://")).parent
        alone = await ask(client, PROMPT)
        pids, before = engine.pids, {one.pid: one for one in usage(supervisor_of(runtime))}
        counted = await malformed(client)
        attacked = asyncio.Event()
        served = 0

        async def serve() -> None:
            nonlocal served
            while not attacked.is_set():
                outcome = await ask(client, PROMPT, silence=20.0)
                assert outcome.end is End.LENGTH, outcome.error
                assert compare(
                    [step.token for step in outcome.steps], alone.steps, rounding_bound("f32", "f32")
                ).verdict in (Verdict.EQUAL, Verdict.NEAR_TIE)
                served += 1

        hostile = HostileClient(runtime, seed=11)
        assert hostile.sockets() == list(SOCKETS)
        async with asyncio.TaskGroup() as group:
            group.create_task(serve())
            while sum(hostile.sent.values()) < FRAMES:
                for socket in SOCKETS:
                    await hostile.burst(socket, BURST)
            attacked.set()
        await hostile.close()

        assert served > 0
        assert hostile.stalled == 0
        assert hostile.answered > 0
        assert (await ask(client, PROMPT)).end is End.LENGTH
        assert engine.pids == pids
        after = await malformed(client)
        assert all(after[name] > counted[name] for name in counted)
        for _ in range(100):  # hostile connections are closed with a delay
            used = usage(supervisor_of(runtime))
            if all(one.descriptors <= before[one.pid].descriptors for one in used):
                break
            await asyncio.sleep(0.1)
        for one in used:
            assert one.descriptors <= before[one.pid].descriptors, one
            assert one.private < before[one.pid].private + MORE_MEMORY, one


async def test_whatever_is_sent_is_survived(start_engine, tiny_model: Path) -> None:
    """Frames that hypothesis thinks of, in many connections."""
    async with start_engine(config(tiny_model)) as (engine, client):
        runtime, pids = Path(engine.endpoint.removeprefix("ipc://")).parent, engine.pids

        def attack() -> None:
            with zmq.Context() as context:

                @given(st.sampled_from(SOCKETS), st.lists(frames | tagged, max_size=40))
                @settings(max_examples=60, deadline=None, database=None)
                def send(socket: str, messages: list[list[bytes]]) -> None:
                    with connect_dealer(context, ipc_endpoint(runtime, socket)) as dealer:
                        for message in messages:
                            dealer.send_multipart(message, zmq.NOBLOCK)

                send()

        await asyncio.to_thread(attack)
        assert (await ask(client, PROMPT)).end is End.LENGTH
        assert engine.pids == pids


async def malformed(client: Client) -> dict[str, int]:
    """Messages that were refused, by socket."""
    stats = await client.stats()
    return {**stats["malformed"], "client": stats["clients"]["malformed"]}
