"""What waits for the text process, on a stand-in for the link to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import numpy as np
import pytest
from waiting import until

from pipeline.serving import text_queue
from pipeline.serving.text_link import TextLink, TextProcessExited
from pipeline.serving.text_messages import TextMessages
from pipeline.serving.text_queue import TextQueue
from pipeline.text.detokenizer import Detokenizer
from pipeline.text.grammar import MaskDropped, MaskRequest
from protocol.messages import (
    Allowed,
    Calibrate,
    Done,
    Encode,
    Encoded,
    Error,
    Follow,
    Generate,
    Score,
    SetPolicy,
    Unfollow,
)

IDS = Generate(9, token_ids=(1, 2))
POLICY = SetPolicy(8, "daop")
CRASHED, KILLED = TextProcessExited(True), TextProcessExited(False)
MASK = Allowed(np.ones(1, np.int32))


class Link:
    """Does one job at a time, when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[Encode | Follow] = []  # that were begun, in order
        self.told: list[object] = []
        self.generation = 0
        self._answer: asyncio.Future[Any] | None = None
        self.up = asyncio.Event()
        self.up.set()

    async def wait_up(self) -> None:
        await self.up.wait()

    async def ask(self, asked: Encode | Follow) -> object:
        self.jobs.append(asked)
        self._answer = asyncio.get_running_loop().create_future()
        return await self._answer

    def tell(self, message: object) -> None:
        self.told.append(message)

    async def begun(self) -> Encode | Follow:
        """The present job, once there is one."""
        await until(lambda: self._answer is not None and not self._answer.done())
        return self.jobs[-1]

    async def end(self, how: Exception | str | Allowed | None = None) -> str | Follow:
        """End the present job, once there is one; by default a text with an id for each letter. Returns the
        text, or what was to be followed."""
        asked = await self.begun()
        assert self._answer is not None
        if isinstance(how, Exception):
            if isinstance(how, TextProcessExited):
                self.generation += 1
            self._answer.set_exception(how)
        elif isinstance(asked, Follow):
            self._answer.set_result(how or MASK)
        else:
            ids = np.frombuffer(asked.texts[0].encode(), np.uint8).astype(np.int32)
            answer = Encoded(ids, (len(ids),)) if how is None else Encoded(ids[:0], (), str(how))
            self._answer.set_result(answer)
        for _ in range(3):  # what follows
            await asyncio.sleep(0)
        return asked if isinstance(asked, Follow) else asked.texts[0]


class Estimate:
    def min_tokens(self, characters: int) -> int:
        return 0


class Queue(TextQueue):
    def __init__(self) -> None:
        self.link = Link()
        self.passed: list[tuple[bytes, Any]] = []
        self.sent: list[tuple[bytes, Any]] = []
        self.wakes = 0
        super().__init__(
            TextMessages(cast(Detokenizer, Estimate()), 1000),
            cast(TextLink, self.link),
            lambda client, message: self.passed.append((client, message)),
            lambda client, message: self.sent.append((client, message)),
            self._woken,
        )

    def _woken(self) -> None:
        self.wakes += 1

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


def wanted(answer: int, *tokens: int, client: bytes = b"m") -> MaskRequest:
    """A mask behind these tokens of an answer, whose prompt is 7, 7."""
    return MaskRequest(client, answer, "g", 32, [7, 7, *tokens], 2)


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


async def test_clients_take_turns_and_masks_come_before_texts(queue: Queue) -> None:
    for number in range(3):
        queue.put(b"a", text(number, f"a{number}"))
    queue.put(b"b", text(0, "b0"))
    queue.put(b"c", text(0, "c0"))
    queue.ask(wanted(0, client=b"a"))
    mask = Follow(0, 32, (), "g")
    assert [await queue.link.end() for _ in range(6)] == [mask, "b0", "c0", "a0", "a1", "a2"]


async def test_refused_texts_have_one_answer(queue: Queue) -> None:
    queue.put(b"a", Generate(1))
    queue.put(b"a", text(2, "x"))
    queue.put(b"a", text(3, "y"))
    queue.put(b"a", text(4, "z"))
    for how in ("the template refuses this", TimeoutError(), CRASHED):
        await queue.link.end(how)
    reasons = [
        "give exactly one of prompt, token_ids and messages",
        "the template refuses this",
        "encoding this text took longer than 5 s, and it was given up",
        "encoding this text ended the text process",
    ]
    assert queue.sent == [
        (b"a", Done(number, "error", reason, usage=True)) for number, reason in enumerate(reasons, 1)
    ]
    assert queue.passed == []


async def test_text_is_sent_again_after_a_kill_but_not_for_ever(queue: Queue) -> None:
    queue.put(b"a", text(1, "bad"))
    for _ in range(8):
        assert queue.sent == []
        assert await queue.link.end(KILLED) == "bad"
    failure = "encoding this text ended the text process 8 times"
    assert queue.sent == [(b"a", Done(1, "error", failure, usage=True))]
    queue.put(b"a", text(2, "good"))
    assert await queue.link.end(KILLED) == "good"
    assert await queue.link.end() == "good"
    assert queue.passed == [(b"a", Generate(2, token_ids=tuple(b"good")))]


async def test_texts_wait_for_the_process(queue: Queue) -> None:
    queue.link.up.clear()
    queue.put(b"a", text(1, "x"))
    await asyncio.sleep(0)
    assert queue.link.jobs == []
    queue.link.up.set()
    assert await queue.link.end() == "x"


async def test_a_new_process_is_told_the_whole_answer(queue: Queue) -> None:
    """Another one only what is new."""
    link = queue.link
    first = wanted(0, 5)
    queue.ask(first)
    assert await link.end() == Follow(0, 32, (5,), "g")
    assert first.allowed is MASK
    queue.ask(wanted(0, 5, 6))
    assert await link.end() == Follow(0, 32, (6,))
    link.generation += 1
    queue.ask(wanted(0, 5, 6, 8))
    assert await link.end() == Follow(0, 32, (5, 6, 8), "g")
    queue.ask(wanted(0, 5, 6, 8, 9))
    assert await link.end(KILLED) == Follow(0, 32, (9,))
    assert await link.end() == Follow(0, 32, (5, 6, 8, 9), "g")
    assert queue.wakes == 4
    queue.ask(MaskDropped(0))
    queue.ask(MaskDropped(1))
    assert link.told == [Unfollow(0)]


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ([CRASHED], "it ended the text process"),
        ([KILLED] * 8, "it ended the text process 8 times"),
        ([TimeoutError()], "it took longer than 5 s, and it was given up"),
    ],
)
async def test_only_the_answer_whose_mask_was_made_fails(queue: Queue, ends: list, reason: str) -> None:
    bad, good = wanted(0, 5), wanted(1)
    queue.ask(bad)
    for end in ends:
        await queue.link.end(end)
    assert bad.allowed is not None
    assert bad.allowed.error == f"the grammar cannot be followed further: {reason}"
    queue.ask(good)
    await queue.link.end()
    assert good.allowed is MASK


async def test_masks_that_nobody_needs_are_not_made(queue: Queue) -> None:
    queue.put(b"m", text(1, "x"))
    await queue.link.begun()
    queue.ask(wanted(0))
    queue.ask(MaskDropped(0))
    queue.put(b"m", text(2, "y"))
    assert [await queue.link.end(), await queue.link.end()] == ["x", "y"]
    assert queue.link.told == []


@pytest.mark.parametrize("begun", [True, False])
async def test_cancelled_text_is_answered_at_once_and_only_once(queue: Queue, begun: bool) -> None:
    for client, number in ((b"a" if begun else b"b", 0), (b"a", 1)):
        queue.put(client, text(number, f"{number}"))
    queue.put(b"a", IDS)
    await queue.link.begun()
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
    await queue.link.begun()
    queue.ask(wanted(0, client=b"c"))
    for client in (b"a", b"c", b"unknown"):
        queue.forget(client)
    assert [await queue.link.end() for _ in range(2)] == ["a", "b"]
    assert (queue.passed, queue.sent) == ([(b"b", Generate(1, token_ids=(98,)))], [])
    assert len(queue.link.jobs) == 2


async def test_a_number_in_use_is_refused_by_an_error(queue: Queue) -> None:
    queue.put(b"a", text(1, "a"))
    queue.put(b"a", text(1, "again"))
    assert queue.sent == [(b"a", Error(1, "request 1 is already being served"))]
    await queue.link.end()
    assert queue.numbers() == [1]


async def test_all_that_waits_ends_when_the_engine_is_stopped(queue: Queue) -> None:
    for client, message in ((b"a", text(1, "a")), (b"a", POLICY), (b"b", Calibrate(2, text="b"))):
        queue.put(client, message)
    await queue.link.begun()
    queue.stop("stopping")
    ends = [(b"a", Done(1, "cancelled")), (b"a", Error(8, "stopping")), (b"b", Done(2, "cancelled"))]
    assert queue.sent == ends
    await queue.link.end()
    assert not queue.put(b"a", text(3, "a"))
    assert not queue.put(b"a", IDS)
    assert (queue.sent, queue.passed, len(queue.link.jobs)) == (ends, [], 1)


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
