"""The client library against a real ROUTER on a real socket."""

import asyncio
import os
import subprocess
import sys
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop
import zmq.asyncio
from protocol_engine import BLOCK, WELCOME, engine

from protocol.client import Client
from protocol.codec import encode
from protocol.errors import EngineGone, MalformedMessage, ProtocolError, RequestFailed, VersionMismatch
from protocol.messages import Cancel, ChatMessage, Error, Generate, Hello, PolicyChanged, Sampling, Score
from protocol.sockets import bind_router, ipc_endpoint


@pytest.fixture
def endpoint(runtime):
    return ipc_endpoint(runtime, "client.sock")


@asynccontextmanager
async def both(endpoint):
    async with engine(endpoint) as server, Client.connect(endpoint, name="test") as client:
        yield server, client


@contextmanager
def engine_process(endpoint):
    """The same engine in a process of its own, which can be killed."""
    here = Path(__file__).parent
    process = subprocess.Popen(
        [sys.executable, str(here / "protocol_engine.py"), endpoint],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(here.parents[1])},
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


async def until(condition, seconds=5.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def a_bit_of_everything(endpoint):
    async with both(endpoint) as (server, client):
        assert client.welcome == WELCOME
        assert server.ever(Hello) == [Hello(1, "test")]
        result = await client.generate(prompt="hi", max_tokens=50).result()
        assert result.tokens == tuple(range(100, 150))
        assert result.text == "".join(f"t{i} " for i in range(50)) + "end"
        blocks = [block async for block in client.score(token_ids=range(9), full=True)]
        assert [block.start for block in blocks] == [BLOCK[0] * i for i in range(9)]
        assert all((block.logprobs == -i).all() for i, block in enumerate(blocks))
        assert (await client.stats())["received"] > 0
        return True


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_on_both_event_loops(endpoint, loop):
    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(a_bit_of_everything(endpoint))


async def test_what_is_asked_arrives(endpoint):
    async with both(endpoint) as (server, client):
        sampling = Sampling(temperature=0.5, seed=3)
        chat = [ChatMessage("user", "hi")]
        first = client.generate(
            messages=chat, max_tokens=0, sampling=sampling, stop=["x", "y"], ignore_eos=True
        )
        second = client.generate(token_ids=[1, 2], max_tokens=0)
        async for _ in client.score(text="stop", stepwise=True, prefill=7):
            pass
        await first.result()
        await second.result()
        assert server.ever(Generate) == [
            Generate(first.request, None, None, tuple(chat), 0, sampling, ("x", "y"), True),
            Generate(second.request, token_ids=(1, 2), max_tokens=0),
        ]
        assert server.ever(Score) == [Score(2, text="stop", stepwise=True, prefill=7)]


async def test_tokens_stream_while_others_do(endpoint):
    async with both(endpoint) as (_, client):
        slow = client.generate(prompt="slow", max_tokens=20)
        seen = []
        async for token in slow:
            seen.append(token.index)
            assert token.request == slow.request
            if len(seen) == 3:
                assert slow.done is None
                quick = await client.generate(prompt="quick", max_tokens=5).result()
                assert quick.done.reason == "length"
        assert seen == list(range(20))
        assert slow.done.text == "end"
        assert len((await slow.result()).tokens) == 20  # again, from the first


async def test_cancel(endpoint):
    async with both(endpoint) as (server, client):
        answer = client.generate(prompt="slow", max_tokens=10_000)
        seen = 0
        async for _ in answer:
            seen += 1
            if seen == 3:
                await answer.cancel()
        assert answer.done.reason == "cancelled"
        assert seen < 10
        await answer.cancel()  # it has ended: nothing is sent
        await client.stats()
        assert server.ever(Cancel) == [Cancel(answer.request)]


async def test_leaving_the_loop_cancels(endpoint):
    async with both(endpoint) as (server, client):
        broken = client.generate(prompt="slow", max_tokens=10_000)
        async for _ in broken:
            break
        await until(lambda: broken.done)

        closed = client.generate(prompt="slow", max_tokens=10_000)
        tokens = aiter(closed)
        await anext(tokens)
        await tokens.aclose()
        await until(lambda: closed.done)

        stopped = client.generate(prompt="slow", max_tokens=10_000)
        waiting = asyncio.create_task(stopped.result())
        await asyncio.sleep(0.1)
        waiting.cancel()
        await until(lambda: stopped.done)

        for answer in (broken, closed, stopped):
            assert answer.done.reason == "cancelled"
        assert server.ever(Cancel) == [Cancel(answer.request) for answer in (broken, closed, stopped)]


async def test_leaving_the_client_cancels_what_it_asked(endpoint):
    async with engine(endpoint) as server:
        async with Client.connect(endpoint) as client:
            answer = client.generate(prompt="slow", max_tokens=10_000)
            waiting = asyncio.create_task(answer.result())
            await until(lambda: server.ever(Generate))
        with pytest.raises(EngineGone, match="^this client is closed$"):
            await waiting
        with pytest.raises(EngineGone, match="^this client is closed$"):
            await client.stats()
        with pytest.raises(EngineGone, match="^this client is closed$"):
            client.generate(prompt="hi")
        await until(lambda: server.ever(Cancel) == [Cancel(answer.request)])


async def test_an_error_is_raised_after_the_tokens_before_it(endpoint):
    async with both(endpoint) as (_, client):
        answer = client.generate(prompt="fail")
        seen = []
        with pytest.raises(RequestFailed, match="^over the context limit of 512 tokens$"):
            async for token in answer:
                seen.append(token.token)
        assert seen == [1]
        assert answer.done.reason == "error"
        with pytest.raises(RequestFailed, match="^not now$"):
            await client.generate(prompt="refuse").result()
        with pytest.raises(
            MalformedMessage, match=r"^Generate\.max_tokens must be int \(64 bits, signed\), not str$"
        ):
            client.generate(prompt="hi", max_tokens="5")
        with pytest.raises(MalformedMessage, match="lone surrogates"):
            client.generate(prompt="\udce4")
        assert await client.stats()  # all that is forgotten


async def test_scores_end_with_their_reason(endpoint):
    async with both(endpoint) as (server, client):
        with pytest.raises(RequestFailed, match="^no such token$"):
            async for _ in client.score(text="error"):
                pass
        with pytest.raises(RequestFailed, match="^not now$"):
            async for _ in client.score(text="refuse"):
                pass
        async for block in client.score(token_ids=range(100), full=True):
            assert block.start == 0
            break
        await until(lambda: server.ever(Cancel) == [Cancel(2)])
        assert server.blocks_sent < 100


async def test_a_slow_reader_of_scores_slows_the_engine_and_nothing_else(endpoint):
    async with both(endpoint) as (server, client):
        blocks = 60
        seen = 0
        async for block in client.score(token_ids=range(blocks), full=True):
            if seen == 2:
                start = time.monotonic()
                while time.monotonic() < start + 3.0:  # longer than the silence that means death
                    assert await client.stats()
                    await asyncio.sleep(0.1)
                # in flight: the queues of both ends, this many blocks at most
                assert server.blocks_sent < seen + 4 + 8 + 8
                late = [t for name, t in server.heartbeats if name == "test/score" and t > start]
                assert len(late) >= 5
            assert (block.logprobs == -seen).all()
            seen += 1
        assert seen == blocks


async def test_a_busy_reader_still_sends_heartbeats(endpoint):
    with engine_process(endpoint):
        beats = 0
        async with Client.connect(endpoint) as client:

            async def watch():
                nonlocal beats
                while True:  # another task of the program: it runs as often as the heartbeats' does
                    await asyncio.sleep(0.2)
                    beats += 1

            watcher = asyncio.create_task(watch())
            async for block in client.score(token_ids=range(80), full=True):
                time.sleep(0.02)  # noqa: ASYNC251 - a caller that computes; the next block is there before it asks
            watcher.cancel()
        assert block.start == 79 * BLOCK[0]
        assert beats >= 4


async def test_a_blocked_event_loop_is_not_the_engines_death(endpoint):
    with engine_process(endpoint):
        async with Client.connect(endpoint) as client:
            await asyncio.sleep(0.1)
            time.sleep(3.5)  # noqa: ASYNC251 - this program's own fault
            for _ in range(5):
                assert await client.stats()
                await asyncio.sleep(0.3)


async def test_stats_and_policies(endpoint):
    async with both(endpoint) as (_, client), Client.connect(endpoint, name="other") as other:
        heard = []
        other.on_policy = heard.append
        client.on_policy = heard.append
        changed = await client.set_policy("fiddler", {"threshold": "2"})
        assert changed.policy == "fiddler"
        await until(lambda: heard)
        assert heard == [PolicyChanged(-1, "fiddler", True)]
        with pytest.raises(RequestFailed, match="^no policy 'nonsense'; did you mean 'on-demand'"):
            await client.set_policy("nonsense")
        assert await asyncio.gather(*(client.stats() for _ in range(20)))


async def test_a_failing_callback_does_not_end_the_client(endpoint):
    reported = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: reported.append(context["exception"])
    )

    def fail(message):
        raise ValueError(message.policy)

    async with both(endpoint) as (_, client), Client.connect(endpoint) as other:
        other.on_policy = fail
        await client.set_policy("fiddler")
        await until(lambda: reported)
        assert str(reported[0]) == "fiddler"
        assert await other.stats()


async def test_a_silent_engine_is_gone(endpoint):
    async with both(endpoint) as (server, client):
        await asyncio.sleep(3.2)  # heartbeats alone keep it alive
        answer = client.generate(prompt="slow", max_tokens=10_000)
        pending = [asyncio.create_task(answer.result()), asyncio.create_task(client.stats())]
        await asyncio.sleep(0.1)
        server.mute = True
        start = time.monotonic()
        pending.append(asyncio.create_task(client.set_policy("fiddler")))
        await asyncio.wait(pending, timeout=5.0)
        assert 2.0 < time.monotonic() - start < 3.0
        assert pending[1].result()  # answered before the silence
        line = f"^the engine at {endpoint} has been silent for 2.5 s$"
        for task in (pending[0], pending[2]):
            with pytest.raises(EngineGone, match=line):
                task.result()
        for call in (client.stats, lambda: client.set_policy("x"), lambda: anext(client.score(text="x"))):
            start = time.monotonic()
            with pytest.raises(EngineGone, match=line):
                await call()
            assert time.monotonic() < start + 0.1
        with pytest.raises(EngineGone, match=line):
            client.generate(prompt="hi")


async def test_a_killed_engine_is_gone_within_three_seconds(endpoint):
    with engine_process(endpoint) as process:
        async with Client.connect(endpoint) as client:
            answer = client.generate(prompt="slow", max_tokens=10_000)
            scores = client.score(token_ids=range(1000), full=True)
            await anext(scores)
            await anext(aiter(answer))
            process.kill()
            start = time.monotonic()
            with pytest.raises(EngineGone, match=r"has been silent for 2\.5 s"):
                async for _ in answer:
                    pass
            assert time.monotonic() < start + 3.0
            with pytest.raises(EngineGone, match=r"has been silent for 2\.5 s"):
                async for _ in scores:
                    pass


async def test_an_engine_that_was_replaced_does_not_know_this_client(endpoint):
    async with engine(endpoint):
        connecting = Client.connect(endpoint)
        client = await connecting.__aenter__()
        waiting = asyncio.create_task(client.generate(prompt="slow", max_tokens=10_000).result())
        await asyncio.sleep(0.1)
    try:
        async with engine(endpoint):
            with pytest.raises(EngineGone, match="^the engine ended this connection: say Hello first$"):
                async with asyncio.timeout(2.0):
                    await waiting
    finally:
        await connecting.__aexit__(None, None, None)


async def test_nobody_there(endpoint):
    start = time.monotonic()
    with pytest.raises(EngineGone, match=rf"^no engine at {endpoint} within 0\.3 s; is it running\?$"):
        async with Client.connect(endpoint, timeout=0.3):
            pass
    assert time.monotonic() < start + 1.0


async def test_an_engine_that_starts_meanwhile_is_waited_for(endpoint):
    async def connect():
        async with Client.connect(endpoint) as client:
            return await client.stats()

    connecting = asyncio.create_task(connect())
    await asyncio.sleep(0.3)
    async with engine(endpoint):
        assert await connecting


async def test_an_endpoint_of_another_kind():
    with pytest.raises(ProtocolError, match=r"^endpoint 'tcp://localhost:1' is not ipc://"):
        async with Client.connect("tcp://localhost:1"):
            pass


NEWER = "the engine speaks protocol version 9, this client version 1; use the client that was installed with"


@pytest.mark.parametrize(
    ("reply", "error", "line"),
    [
        (encode(replace(WELCOME, version=9)), VersionMismatch, f"^{NEWER} the engine$"),
        ([b"\x02\x09", b"a header of the future"], VersionMismatch, f"^{NEWER} the engine$"),
        (
            encode(Error(-1, "version 9 here")),
            VersionMismatch,
            "^the engine refused this client: version 9 here$",
        ),
        ([b"\x02\x01", b"rubbish"], MalformedMessage, "^Welcome: the header is not plain msgpack"),
        ([b"HTTP/1.1 400"], MalformedMessage, "^the first frame is not two bytes"),
    ],
)
async def test_an_engine_that_cannot_be_understood(endpoint, reply, error, line):
    with zmq.asyncio.Context() as context, bind_router(context, endpoint) as router:

        async def answer():
            peer, *_ = await router.recv_multipart()
            await router.send_multipart([peer, *reply])

        answering = asyncio.create_task(answer())
        with pytest.raises(error, match=line):
            async with Client.connect(endpoint):
                pass
        await answering


async def test_garbage_in_mid_conversation_ends_the_client_with_one_line(endpoint):
    async with both(endpoint) as (server, client):
        answer = client.generate(prompt="slow", max_tokens=10_000)
        await asyncio.sleep(0.1)
        for peer in server.clients:
            await server.socket.send_multipart([peer, b"\x05\x01", b"\xc1"])
        with pytest.raises(MalformedMessage, match="^Done: the header is not plain msgpack"):
            await answer.result()
        with pytest.raises(MalformedMessage, match="^Done: the header is not plain msgpack"):
            await client.stats()


async def test_nothing_is_left_behind(endpoint):
    def files():
        return len(os.listdir("/proc/self/fd"))

    async def use():
        async with both(endpoint) as (_, client):
            async for _ in client.score(token_ids=range(50), full=True):
                break
            client.generate(prompt="slow")

    await use()  # what is made once for a process
    await asyncio.sleep(0.1)
    tasks, before = asyncio.all_tasks(), files()
    await use()
    await until(lambda: asyncio.all_tasks() == tasks and files() == before)
