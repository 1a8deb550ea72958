"""A client with `retry`: engines that exit at any point, and restarted ones at the same endpoint."""

import asyncio
import shutil
from contextlib import AsyncExitStack

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from protocol_engine import BLOCK, QUIET, WELCOME, drain, engine, leaves_nothing, until
from waiting import Stopwatch

from protocol.client import Client
from protocol.errors import EngineGone, MalformedMessage, RequestFailed
from protocol.messages import Calibrate, Cancel, Done, Generate, PolicyChanged, Score, SetPolicy, Stats

LENGTH = 6  # tokens of an answer
ANSWER = tuple(range(100, 100 + LENGTH))
CRASHED = "the engine crashed 2 times while it was computing this request"
TEXT = "".join(f"t{i} " for i in range(LENGTH)) + "end"


class Restarts:
    """Engines at one endpoint, one after the other, and a client that reconnects to each."""

    def __init__(self, endpoint, retry=20.0, timeout=10.0):
        self.endpoint, self.retry, self.timeout = endpoint, retry, timeout
        self.events = []  # calls of the client's hooks

    async def __aenter__(self):
        self._stack = AsyncExitStack()
        self._engine = AsyncExitStack()
        self.server = await self._engine.enter_async_context(engine(self.endpoint))
        self.client = await self._stack.enter_async_context(
            Client.connect(self.endpoint, name="test", timeout=self.timeout, retry=self.retry, silence=QUIET)
        )
        self.client.on_pause = lambda lost: self.events.append(str(lost))
        self.client.on_reconnect = lambda: self.events.append("back")
        return self

    async def stop(self):
        await self._engine.aclose()

    async def start(self, welcome=WELCOME, shares=()):
        self.server = await self._engine.enter_async_context(engine(self.endpoint, welcome))
        self.server.shares = dict(shares)
        return self.server

    async def next(self, welcome=WELCOME, shares=()):
        """Restart the engine so quickly that no silence is noticed."""
        await self.stop()
        return await self.start(welcome, shares)

    async def __aexit__(self, *error):
        await self._stack.aclose()
        await self._engine.aclose()


def all_sent(server, requests):
    """Whether this engine has received so many requests and sent all of its messages."""
    return lambda: len(server.jobs) == requests and all(job.done() for job in server.jobs.values())


async def collect(asked, blocks):
    """Append each block of a score as it comes."""
    async for block in asked:
        blocks.append(block)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(runs=st.lists(st.lists(st.integers(0, LENGTH), min_size=6, max_size=6), min_size=1, max_size=3))
async def test_answers_across_restarts_have_each_token_once(endpoint, runs):
    """Each generation sends so many tokens of each answer, and a Done only after one more than missing."""
    async with Restarts(endpoint) as engines:
        engines.server.shares = dict(enumerate(runs[0]))
        answers = [engines.client.generate(prompt="hi", max_tokens=LENGTH) for _ in runs[0]]
        come = [0] * len(answers)
        pending = set(range(len(answers)))
        for number, shares in enumerate(runs):
            await until(all_sent(engines.server, len(pending)))
            assert {m.request: m.resume for m in engines.server.ever(Generate)} == {
                i: ANSWER[: come[i]] for i in pending
            }
            for i in set(pending):
                new = min(shares[i], LENGTH - come[i])
                come[i] += new
                if shares[i] > new:  # its Done was sent
                    pending.remove(i)
            await until(lambda: [len(answer.token_ids) for answer in answers] == come)
            following = runs[number + 1] if number + 1 < len(runs) else ()
            await engines.next(shares=dict(enumerate(following)))
        for answer in answers:
            result = await answer.result()
            assert (result.tokens, result.text, result.done.reason) == (ANSWER, TEXT, "length")
            assert [token.index for token in await drain(answer)] == list(range(LENGTH))
        assert engines.client.strays == 0


async def test_requests_continue_after_a_silent_engine_is_restarted(endpoint):
    async with Restarts(endpoint) as engines:
        client, server = engines.client, engines.server
        server.shares = {0: 3}
        answer = client.generate(prompt="hi", max_tokens=LENGTH)
        lost = asyncio.create_task(client.lost())
        await until(lambda: len(answer.token_ids) == 3)
        server.mute = True
        watch = Stopwatch()
        asked = asyncio.create_task(client.stats())
        changed = asyncio.create_task(client.set_policy("fiddler"))
        await until(lambda: engines.events)
        assert watch.shows(0.8 * QUIET, QUIET + 0.5)
        assert engines.events == [f"the engine at {endpoint} has been silent for {QUIET} s"]

        late = client.generate(prompt="hi", max_tokens=2)  # no engine can receive it
        with pytest.raises(MalformedMessage, match=r"got `str` - at `\$.max_tokens`"):
            client.generate(prompt="hi", max_tokens="5")
        given_up = asyncio.create_task(client.stats())
        await asyncio.sleep(0.1)
        given_up.cancel()
        await asyncio.sleep(1.0)
        for waits in (asked, changed, lost):
            assert not waits.done()
        assert answer.done is late.done is None
        assert client.welcome.policy == "all-host"

        server = await engines.next(replace(WELCOME, policy="dali"))
        assert (await answer.result()).text == TEXT
        assert (await late.result()).tokens == (100, 101)
        assert (await asked)["received"] > 0
        assert await changed == PolicyChanged(changed.result().request, "fiddler", True)
        assert client.welcome.policy == "dali"
        assert engines.events[1:] == ["back"]
        assert sorted(m.request for m in server.received[1:]) == sorted(
            [answer.request, late.request, *(m.request for m in server.ever(Stats | SetPolicy))]
        )
        assert len(server.ever(Stats)) == len(server.ever(SetPolicy)) == 1
        assert not lost.done()
        lost.cancel()


async def test_requests_that_have_ended_are_not_sent_again(endpoint):
    async with Restarts(endpoint) as engines:
        for prompt in ("refuse", "fail"):
            with pytest.raises(RequestFailed):
                await engines.client.generate(prompt=prompt).result()
        with pytest.raises(RequestFailed, match="no policy"):
            await engines.client.set_policy("nonsense")
        server = await engines.next()
        await until(lambda: engines.events[-1:] == ["back"])
        assert (await engines.client.stats()) == {"received": 2}  # Hello and Stats
        assert engines.client.strays == 0
        for peer in server.clients:
            await server.send(peer, Done(0, "length"))
        await until(lambda: engines.client.strays == 1)


async def test_cancelled_requests_are_not_sent_again(endpoint):
    async with Restarts(endpoint, timeout=1.0) as engines:
        client = engines.client
        engines.server.shares = dict.fromkeys(range(3), 1)
        before, unnoticed, during = (client.generate(prompt="hi", max_tokens=LENGTH) for _ in range(3))
        await until(lambda: during.token_ids)
        engines.server.mute = True
        await before.cancel()
        await until(lambda: engines.server.ever(Cancel))
        await engines.stop()
        await unnoticed.cancel()
        await until(lambda: engines.events)
        assert before.done.reason == unnoticed.done.reason == "cancelled"
        watch = Stopwatch()
        await during.cancel()
        assert (await during.result()).done.reason == "cancelled"
        assert watch.shows(0.0, 0.1)
        left = client.generate(prompt="hi", max_tokens=LENGTH)
        async for _ in during:  # the tokens received before can still be read
            break
        scores = asyncio.create_task(drain(client.score(token_ids=range(2))))
        await asyncio.sleep(1.3)  # longer than a first connection has time
        server = await engines.start()
        assert len(await scores) == 2
        assert (await left.result()).tokens == ANSWER
        assert [m.request for m in server.ever(Generate)] == [left.request]
        assert client.strays == 0


async def test_requests_without_progress_are_sent_until_an_engine_refuses_them(endpoint):
    """Only the engine knows whether the one before was killed or has crashed, and what it was computing."""
    async with Restarts(endpoint) as engines:
        client, server = engines.client, engines.server
        server.shares = {0: 2, 1: 1}
        suspect = client.generate(prompt="hi", max_tokens=LENGTH)
        other = client.generate(prompt="hi", max_tokens=LENGTH)
        deadly = asyncio.create_task(client.set_policy("deadly"))
        for _ in range(5):
            await until(all_sent(server, 2))
            server = await engines.next(shares={0: 0, 1: 0})
        await until(all_sent(server, 2))
        assert not deadly.done()
        (peer,) = server.clients
        await server.send(peer, Done(suspect.request, "error", CRASHED, usage=True))
        with pytest.raises(RequestFailed, match=CRASHED):
            await suspect.result()
        server = await engines.next()
        assert (await other.result()).tokens == ANSWER
        assert [message.policy for message in server.ever(SetPolicy)] == ["deadly"]
        deadly.cancel()
        assert {message.request for message in server.ever(Generate)} == {other.request}


async def test_calibration_starts_again_after_a_restart(endpoint):
    async with Restarts(endpoint) as engines:
        far = []
        waiting = asyncio.create_task(engines.client.calibrate(text="slow", on_progress=far.append))
        await until(lambda: len(far) == 3)
        server = await engines.next()
        await until(lambda: len(far) == 6)
        assert [far.text for far in server.ever(Calibrate)] == ["slow"]
        server.mute = True
        waiting.cancel()
        await until(lambda: server.ever(Cancel))
        server = await engines.next()
        await until(lambda: engines.events.count("back") == 2)
        assert engines.client.strays == 0
        for peer in server.clients:  # the lost engine's Done can no longer come
            await server.send(peer, Done(0, "cancelled"))
        await until(lambda: engines.client.strays == 1)


async def test_request_that_resumes_an_answer_resumes_it_with_its_new_tokens(endpoint):
    async with Restarts(endpoint) as engines:
        engines.server.shares = {0: 2}
        answer = engines.client.generate(prompt="hi", max_tokens=LENGTH, resume=(7, 8))
        await until(lambda: len(answer.token_ids) == 2)
        server = await engines.next()
        await until(lambda: server.ever(Generate))
        assert [m.resume for m in server.ever(Generate)] == [(7, 8, *answer.token_ids[:2])]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"fingerprint": "e" * 64}, "tiny e+ .*"),
        ({"model": "big"}, "big f+ .*"),
        ({"format": "int4"}, "tiny f+ int4 .*"),
        ({"backbone_dtype": "bf16"}, "tiny f+ .*bf16.*"),
    ],
)
async def test_client_ends_when_another_model_is_at_the_endpoint(endpoint, other, named):
    async with Restarts(endpoint) as engines:
        engines.server.shares = {0: 2}
        answer = engines.client.generate(prompt="hi", max_tokens=LENGTH)
        await until(lambda: len(answer.token_ids) == 2)
        await engines.next(replace(WELCOME, **other))
        with pytest.raises(EngineGone, match=f"^another engine is at {endpoint} now: {named} was$"):
            await answer.result()
        with pytest.raises(EngineGone, match="another engine"):
            await engines.client.stats()


async def test_client_ends_after_its_retry_time(endpoint):
    async with Restarts(endpoint, retry=0.5) as engines:
        engines.server.shares = {0: 2}
        answer = engines.client.generate(prompt="hi", max_tokens=LENGTH)
        scores = asyncio.create_task(drain(engines.client.score(token_ids=range(2000), full=True)))
        await until(lambda: len(answer.token_ids) == 2)
        await engines.stop()
        watch = Stopwatch()
        line = r"has been silent for 0\.5 s \(no other engine was ready within 0\.5 s\)$"
        assert isinstance(lost := await engines.client.lost(), EngineGone)
        assert watch.shows(0.75 * (QUIET + 0.5), QUIET + 0.5 + 2.0)
        for pending in (answer.result(), scores, engines.client.stats()):
            with pytest.raises(EngineGone, match=line):
                await pending
        assert str(lost).startswith(f"the engine at {endpoint} has been silent")


@pytest.mark.parametrize(
    ("left", "end"),
    [("nothing", "was stopped"), ("folder without a locked file", "has ended without being stopped")],
)
async def test_client_does_not_wait_for_an_engine_that_was_stopped(endpoint, runtime, left, end):
    async with Restarts(endpoint) as engines:
        await engines.stop()
        watch = Stopwatch()
        if left == "nothing":
            shutil.rmtree(runtime)
        else:
            (runtime / "lock").touch()  # as after a crash of the whole engine
        try:
            assert str(await engines.client.lost()) == f"the engine at {endpoint} {end}"
            assert watch.shows(0.0, QUIET + 3.5)
            assert engines.events == []  # no wait was announced
        finally:
            runtime.mkdir(mode=0o700, exist_ok=True)


async def test_scores_across_restarts_have_each_row_once_in_order(endpoint):
    """From engines that cut the rows into blocks of different sizes, and exit after some of them. Each exits
    when the client has its rows: rows that are still under way may be lost, and are then no progress."""
    async with Restarts(endpoint) as engines:
        engines.server.shares = {0: 2}
        blocks, known = [], 0
        collecting = asyncio.create_task(
            collect(engines.client.score(token_ids=range(12), full=True), blocks)
        )
        for rows, share in ((BLOCK[0], 2), (48, 1), (48, 5), (80, 0), (80, 4), (40, 9), (80, 11)):
            engines.server.rows, engines.server.shares = rows, {0: share}
            await until(all_sent(engines.server, 1))
            assert engines.server.ever(Score) == [Score(0, token_ids=tuple(range(12)), full=True)]
            known = max(known, rows * share)
            await until(lambda known=known: sum(len(block.tokens) for block in blocks) == known)
            await engines.next()
        engines.server.rows = 80
        await collecting
        came = 0
        for block in blocks:
            count = len(block.tokens)
            assert block.start == came
            assert np.array_equal(block.tokens, np.arange(came, came + count))
            assert np.array_equal(block.chosen, block.tokens.astype(np.float32))
            assert block.logprobs.shape == (count, BLOCK[1])
            came += count
        assert came == 12 * 80


async def test_reconnections_leave_no_descriptor_and_no_task(endpoint):
    async def use():
        async with Restarts(endpoint) as engines:
            engines.server.shares = {0: 1}
            answer = engines.client.generate(prompt="hi", max_tokens=LENGTH)
            await until(lambda: answer.token_ids)
            await engines.next()
            assert (await answer.result()).tokens == ANSWER

    await leaves_nothing(use)
