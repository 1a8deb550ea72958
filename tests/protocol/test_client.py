"""The client library against a real ROUTER on a real socket."""

import asyncio
import time

import pytest
import uvloop
from protocol_engine import BLOCK, WELCOME, both, drain, engine_process, until

from protocol.answer import Answer
from protocol.client import Client
from protocol.errors import MalformedMessage, RequestFailed
from protocol.messages import (
    VERSION,
    Calibrate,
    Cancel,
    ChatMessage,
    Done,
    Generate,
    Hello,
    PolicyChanged,
    Sampling,
    Score,
    SetPolicy,
    Token,
)


async def a_bit_of_everything(endpoint):
    async with both(endpoint) as (server, client):
        assert client.welcome == WELCOME
        assert server.ever(Hello) == [Hello(VERSION, "test")]
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


async def test_requests_arrive_unchanged(endpoint):
    async with both(endpoint) as (server, client):
        sampling = Sampling(temperature=0.5, seed=3)
        chat = [ChatMessage("user", "hi")]
        first = client.generate(
            messages=chat,
            max_tokens=0,
            sampling=sampling,
            stop=["x", "y"],
            ignore_eos=True,
            reuse=False,
            resume=[7, 8],
            rival=5,
            reserve=3,
        )
        second = client.generate(token_ids=[1, 2], max_tokens=0)
        await drain(client.score(text="stop", stepwise=True, prefill=7))
        await first.result()
        await second.result()
        assert server.ever(Generate) == [
            Generate(
                first.request, None, None, tuple(chat), 0, sampling, ("x", "y"), True, False, (7, 8), 5, 3
            ),
            Generate(second.request, token_ids=(1, 2), max_tokens=0),
        ]
        assert server.ever(Score) == [Score(2, text="stop", stepwise=True, prefill=7)]


async def test_queued_request_reports_its_position(endpoint):
    async with both(endpoint) as (_, client):
        answer = client.generate(prompt="queue", max_tokens=3)
        positions = []
        answer.on_queued = positions.append
        assert len((await answer.result()).tokens) == 3
        assert positions == [3, 1]


async def test_calibration_reports_progress(endpoint):
    async with both(endpoint) as (server, client):
        far = []
        done = await client.calibrate(token_ids=[1, 2], tokens=300, on_progress=far.append)
        assert (done.path, done.summary) == ("/a/file", {"tokens": 300})
        assert [(f.stage, f.done, f.total) for f in far] == [("reading", i, 3) for i in range(3)]
        assert server.ever(Calibrate) == [Calibrate(done.request, token_ids=(1, 2), tokens=300)]
        with pytest.raises(RequestFailed, match=r"^too short a text$") as failure:
            await client.calibrate(text="refuse")
        assert failure.value.usage


async def test_answers_stream_concurrently(endpoint):
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


async def test_an_answer_keeps_the_best_tokens_of_its_steps_until_they_are_read():
    """They take a hundred times as much memory as the tokens."""
    answer = Answer(0, lambda request: None)
    steps = [Token(0, index, 5, "a", 1.0, 6, -0.5, (5, 6), (-0.5, -1.5)) for index in range(3)]
    for message in (*steps, Done(0, "length")):
        answer.feed(message)
    assert [token async for token in answer] == steps
    plain = [Token(0, index, 5, "a", 1.0, 6, -0.5) for index in range(3)]
    assert [token async for token in answer] == plain


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


async def test_an_error_is_raised_after_the_tokens_before_it(endpoint):
    async with both(endpoint) as (_, client):
        answer = client.generate(prompt="fail")
        tokens = aiter(answer)
        assert (await anext(tokens)).token == 1
        with pytest.raises(RequestFailed, match=r"^over the context limit$") as failure:
            await anext(tokens)
        assert not failure.value.usage  # the engine did not say that the request is at fault
        assert answer.done.reason == "error"
        for prompt, reason in (("refuse", "not now"), ("fault", "over the context limit")):
            with pytest.raises(RequestFailed, match=f"^{reason}$") as failure:
                await client.generate(prompt=prompt).result()
            assert failure.value.usage
        with pytest.raises(
            MalformedMessage, match=r"^Generate: Expected `int`, got `str` - at `\$.max_tokens`$"
        ):
            client.generate(prompt="hi", max_tokens="5")
        with pytest.raises(MalformedMessage, match="surrogates not allowed"):
            client.generate(prompt="\udce4")
        assert await client.stats()  # all that is forgotten


async def test_scores_end_with_their_reason(endpoint):
    async with both(endpoint) as (server, client):
        with pytest.raises(RequestFailed, match=r"^no such token$") as failure:
            await drain(client.score(text="error"))
        assert failure.value.usage
        with pytest.raises(RequestFailed, match="cancelled this request") as failure:
            await drain(client.score(text="cancelled"))
        assert not failure.value.usage
        with pytest.raises(RequestFailed, match=r"^not now$") as failure:
            await drain(client.score(text="refuse"))
        assert failure.value.usage
        async for block in client.score(token_ids=range(100), full=True):
            assert block.start == 0
            break
        await until(lambda: server.ever(Cancel) == [Cancel(3)])
        assert server.blocks_sent < 100


async def test_a_slow_reader_of_scores_slows_the_engine_and_nothing_else(endpoint):
    async with both(endpoint) as (server, client):
        blocks = 60
        seen = 0
        async for block in client.score(token_ids=range(blocks), full=True):
            if seen == 2:
                start = time.monotonic()
                while time.monotonic() < start + 3.0:  # longer than the silence of a lost engine
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
            last = 0
            async for block in client.score(token_ids=range(80), full=True):
                last = block.start
                time.sleep(0.02)  # noqa: ASYNC251 - a caller that computes; the next block is there before it asks
            watcher.cancel()
        assert last == 79 * BLOCK[0]
        assert beats >= 4


async def test_stats_and_policies(endpoint, monkeypatch):
    async with both(endpoint, retry=0.1) as (server, client), Client.connect(endpoint, name="other") as other:
        heard = []
        other.on_policy = heard.append
        client.on_policy = heard.append
        changed = await client.set_policy("fiddler", {"threshold": "2"})
        assert changed.policy == "fiddler"
        await until(lambda: heard)
        assert heard == [PolicyChanged(-1, "fiddler", True)]
        await client.set_policy("dali", counted=False)
        assert server.ever(SetPolicy) == [
            SetPolicy(0, "fiddler", {"threshold": "2"}),
            SetPolicy(1, "dali", {}, counted=False),
        ]
        with pytest.raises(
            RequestFailed, match=r"^no policy 'nonsense'; did you mean 'on-demand'"
        ) as failure:
            await client.set_policy("nonsense")
        assert failure.value.usage
        assert await asyncio.gather(*(client.stats() for _ in range(20)))
        server.mute = True
        monkeypatch.setattr("protocol.client.REPLY_SECONDS", 0.03)
        monkeypatch.setattr("protocol.client.POLICY_SECONDS", 0.05)
        with pytest.raises(RequestFailed, match=r"^the engine did not answer Stats in 0.13 s$"):
            await client.stats()
        with pytest.raises(RequestFailed, match=r"^the engine did not answer SetPolicy in 0.15 s$"):
            await client.set_policy("dali")
