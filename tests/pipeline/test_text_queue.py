"""Messages that wait for a text, on a stand-in for the link to the tokenizer process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import numpy as np
import pytest
from waiting import until

from pipeline.serving import text_queue
from pipeline.serving.encoder_link import EncoderExited, EncoderLink
from pipeline.serving.text_messages import TextMessages
from pipeline.serving.text_queue import TextQueue
from pipeline.text.tokenizer import Tokenizer
from protocol.messages import Calibrate, Done, Encode, Encoded, Error, Generate, Score, SetPolicy

IDS = Generate(9, token_ids=(1, 2))
POLICY = SetPolicy(8, "daop")


class Link:
    """Encodes one text at a time, when the test says so."""

    def __init__(self) -> None:
        self.texts: list[str] = []  # that were begun, in order
        self._answer: asyncio.Future[Any] | None = None
        self.up = asyncio.Event()
        self.up.set()

    async def wait_up(self) -> None:
        await self.up.wait()

    async def encode(self, asked: Encode) -> Encoded:
        self.texts.append(asked.texts[0])
        self._asked, self._answer = asked, asyncio.get_running_loop().create_future()
        return cast(Encoded, await self._answer)

    async def end(self, how: Exception | str | None = None) -> str:
        """End the present text, once there is one; by default with an id for each letter. Returns it."""
        await until(lambda: self._answer is not None and not self._answer.done())
        assert self._answer is not None
        asked, answer = self._asked, self._answer
        ids = np.frombuffer(asked.texts[0].encode(), np.uint8).astype(np.int32)
        if isinstance(how, Exception):
            answer.set_exception(how)
        elif how is not None:
            answer.set_result(Encoded(asked.job, ids[:0], (), how))
        else:
            answer.set_result(Encoded(asked.job, ids, (len(ids),)))
        for _ in range(3):  # what follows
            await asyncio.sleep(0)
        return asked.texts[0]


class Estimate:
    def min_tokens(self, characters: int) -> int:
        return 0


class Queue(TextQueue):
    def __init__(self) -> None:
        self.link = Link()
        self.passed: list[tuple[bytes, Any]] = []
        self.sent: list[tuple[bytes, Any]] = []
        super().__init__(
            TextMessages(cast(Tokenizer, Estimate()), 1000),
            cast(EncoderLink, self.link),
            lambda client, message: self.passed.append((client, message)),
            lambda client, message: self.sent.append((client, message)),
        )

    def numbers(self) -> list[int]:
        return [message.request for _, message in self.passed]


@pytest.fixture
async def queue() -> AsyncIterator[Queue]:
    made = Queue()
    serving = asyncio.create_task(made.serve())
    yield made
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


def text(request: int, prompt: str) -> Generate:
    return Generate(request, prompt=prompt)


async def test_only_messages_behind_a_text_of_their_client_wait(queue: Queue) -> None:
    assert queue.put(b"a", IDS)
    assert queue.put(b"a", POLICY)
    assert queue.numbers() == [9, 8]
    for message in (text(1, "ab"), POLICY, IDS, Score(2, text="c"), SetPolicy(3, "x")):
        assert queue.put(b"a", message)
    assert queue.put(b"b", IDS)
    assert queue.passed[2:] == [(b"b", IDS)]
    await queue.link.end()
    assert queue.passed[3:] == [(b"a", Generate(1, token_ids=(97, 98))), (b"a", POLICY), (b"a", IDS)]
    await queue.link.end()
    assert queue.passed[6:] == [(b"a", Score(2, token_ids=(99,))), (b"a", SetPolicy(3, "x"))]
    queue.put(b"a", IDS)
    assert (queue.numbers()[-1], queue.sent) == (9, [])


async def test_clients_take_turns(queue: Queue) -> None:
    for number in range(3):
        queue.put(b"a", text(number, f"a{number}"))
    queue.put(b"b", text(0, "b0"))
    queue.put(b"c", text(0, "c0"))
    assert [await queue.link.end() for _ in range(5)] == ["a0", "b0", "c0", "a1", "a2"]


async def test_refused_texts_have_one_answer(queue: Queue) -> None:
    queue.put(b"a", Generate(1))
    queue.put(b"a", text(2, "x"))
    queue.put(b"a", text(3, "y"))
    await queue.link.end("the template refuses this")
    await queue.link.end(TimeoutError())
    reasons = ["give exactly one of prompt, token_ids and messages", "the template refuses this"]
    late = "encoding this text took longer than 5 s, and it was given up"
    assert queue.sent == [
        (b"a", Done(number, "error", reason, usage=True)) for number, reason in enumerate([*reasons, late], 1)
    ]
    assert queue.passed == []


@pytest.mark.parametrize(("crashed", "times"), [(True, 2), (False, 8)])
async def test_text_is_sent_again_after_an_exit_but_not_for_ever(queue: Queue, crashed, times) -> None:
    queue.put(b"a", text(1, "bad"))
    for _ in range(times):
        assert queue.sent == []
        assert await queue.link.end(EncoderExited(crashed)) == "bad"
    failure = f"encoding this text ended the tokenizer {times} times"
    assert queue.sent == [(b"a", Done(1, "error", failure, usage=True))]
    queue.put(b"a", text(2, "good"))
    assert await queue.link.end(EncoderExited(crashed)) == "good"
    assert await queue.link.end() == "good"
    assert queue.passed == [(b"a", Generate(2, token_ids=tuple(b"good")))]


async def test_texts_wait_for_the_process(queue: Queue) -> None:
    queue.link.up.clear()
    queue.put(b"a", text(1, "x"))
    await asyncio.sleep(0.01)
    assert queue.link.texts == []
    queue.link.up.set()
    assert await queue.link.end() == "x"


@pytest.mark.parametrize("begun", [True, False])
async def test_cancelled_text_is_answered_at_once_and_only_once(queue: Queue, begun: bool) -> None:
    for client, number in ((b"a" if begun else b"b", 0), (b"a", 1)):
        queue.put(client, text(number, f"{number}"))
    queue.put(b"a", IDS)
    await asyncio.sleep(0.01)
    number = 0 if begun else 1
    queue.cancel(b"a", number)
    queue.cancel(b"a", number)
    queue.cancel(b"a", 5)
    assert queue.sent == [(b"a", Done(number, "cancelled"))]
    assert queue.numbers() == ([] if begun else [9])  # behind no text any more
    assert await queue.link.end() == "0"
    if begun:
        assert await queue.link.end() == "1"
    assert queue.numbers() == ([1, 9] if begun else [9, 0])
    assert len(queue.sent) == 1


async def test_texts_of_a_client_that_is_gone_are_dropped(queue: Queue) -> None:
    for number in range(2):
        queue.put(b"a", text(number, "a"))
    queue.put(b"b", text(1, "b"))
    await asyncio.sleep(0.01)
    queue.forget(b"a")
    queue.forget(b"unknown")
    assert [await queue.link.end() for _ in range(2)] == ["a", "b"]
    assert (queue.passed, queue.sent) == ([(b"b", Generate(1, token_ids=(98,)))], [])


async def test_a_number_in_use_is_refused_by_an_error(queue: Queue) -> None:
    queue.put(b"a", text(1, "a"))
    queue.put(b"a", text(1, "again"))
    assert queue.sent == [(b"a", Error(1, "request 1 is already being served"))]
    await queue.link.end()
    assert queue.numbers() == [1]


async def test_all_that_waits_ends_when_the_engine_is_stopped(queue: Queue) -> None:
    for client, message in ((b"a", text(1, "a")), (b"a", POLICY), (b"b", Calibrate(2, text="b"))):
        queue.put(client, message)
    await asyncio.sleep(0.01)
    queue.stop("stopping")
    ends = [(b"a", Done(1, "cancelled")), (b"a", Error(8, "stopping")), (b"b", Done(2, "cancelled"))]
    assert queue.sent == ends
    await queue.link.end()
    assert not queue.put(b"a", text(3, "a"))
    assert not queue.put(b"a", IDS)
    assert (queue.sent, queue.passed, queue.link.texts) == (ends, [], ["a"])


async def test_number_and_size_of_what_waits_are_limited(queue: Queue, monkeypatch) -> None:
    monkeypatch.setattr(text_queue, "LIMIT", 3)
    assert [queue.put(b"a", text(number, "x")) for number in range(4)] == [True, True, True, False]
    assert not queue.put(b"a", POLICY)
    assert queue.put(b"b", text(0, "y"))
    for _ in range(2):
        await queue.link.end()
    assert queue.put(b"a", text(5, "x"))
    large = "x" * (40 << 20)  # of 64 MB
    assert queue.put(b"c", text(0, large))
    assert not queue.put(b"c", text(1, large))
    queue.cancel(b"c", 0)
    assert queue.put(b"c", text(1, large))
