"""What waits for the text process, on a stand-in for the link to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import numpy as np
import pytest
from waiting import until

from pipeline.errors import PromptTooLong, RequestError
from pipeline.serving import text_queue
from pipeline.serving.text_link import TextLink, TextProcessExited
from pipeline.serving.text_queue import ROLE_LIMIT, TextMessages, TextQueue, with_ids
from pipeline.text.detokenizer import Detokenizer
from pipeline.text.generation_defaults import GRAMMAR_LIMIT
from pipeline.text.grammar import MaskRequest
from protocol.messages import (
    Allowed,
    Calibrate,
    ChatMessage,
    Done,
    Encode,
    Encoded,
    Error,
    Follow,
    Generate,
    Score,
    Shaping,
    Tokenize,
)

IDS = Generate(9, token_ids=(1, 2))
CRASHED, KILLED = TextProcessExited(True), TextProcessExited(False)
MASK = Allowed(0, np.ones(1, np.int32))


class Link:
    """Does jobs when the test says so, the oldest first."""

    def __init__(self) -> None:
        self.jobs: list[Encode | Follow] = []  # that were begun, in order
        self.told: list[object] = []
        self.generation = 0
        self.open: list[tuple[Encode | Follow, asyncio.Future[Any]]] = []
        self.up = asyncio.Event()
        self.up.set()

    async def wait_up(self) -> None:
        await self.up.wait()

    async def ask(self, asked: Encode | Follow) -> object:
        self.jobs.append(asked)
        self.open.append((asked, asyncio.get_running_loop().create_future()))
        return await self.open[-1][1]

    def tell(self, message: object) -> None:
        self.told.append(message)

    async def answer(self, how: Allowed) -> None:
        """End the newest job."""
        self.open.pop()[1].set_result(how)
        for _ in range(3):
            await asyncio.sleep(0)

    async def crash(self) -> None:
        """End all jobs, as the process has crashed during them."""
        self.generation += 1
        jobs, self.open = self.open, []
        for _, ending in jobs:
            ending.set_exception(TextProcessExited(crashed=True, alone=len(jobs) == 1))
        for _ in range(5):
            await asyncio.sleep(0)

    async def begun(self) -> Encode | Follow:
        """The oldest job, once there is one."""
        await until(lambda: self.open)
        return self.open[0][0]

    async def end(self, how: Exception | str | Allowed | None = None) -> str | Follow:
        """End the oldest job, once there is one; by default a text with an id for each letter. Returns the
        text, or what was to be followed."""
        await self.begun()
        asked, ending = self.open.pop(0)
        if isinstance(how, Exception):
            if isinstance(how, TextProcessExited):
                self.generation += 1
            ending.set_exception(how)
        elif isinstance(asked, Follow):
            ending.set_result(how or MASK)
        else:
            ids = np.frombuffer(asked.text.encode(), np.uint8).astype(np.int32)
            answer = Encoded(ids) if how is None else Encoded(ids[:0], str(how))
            ending.set_result(answer)
        for _ in range(3):  # what follows
            await asyncio.sleep(0)
        return asked if isinstance(asked, Follow) else asked.text


class Estimate:
    """A tokenizer that is asked only for the least number of tokens: one for ten characters."""

    def min_tokens(self, characters: int) -> int:
        return characters // 10


class Queue(TextQueue):
    def __init__(self) -> None:
        self.link = Link()
        self.passed: list[tuple[bytes, Any]] = []
        self.sent: list[tuple[bytes, Any]] = []
        self.wakes = 0
        super().__init__(
            TextMessages(cast(Detokenizer, Estimate()), 1 << 30),
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
    return MaskRequest(client, answer, "g", 32, [7, 7, *tokens], 2, 2 + len(tokens))


async def test_only_messages_with_a_text_wait(queue: Queue) -> None:
    for message in (text(1, "ab"), IDS, Score(2, text="c")):
        assert queue.put(b"a", message)
    assert queue.passed == [(b"a", IDS)]
    for _ in range(2):
        await queue.link.end()
    assert queue.passed[1:] == [(b"a", Generate(1, token_ids=(97, 98))), (b"a", Score(2, token_ids=(99,)))]
    assert queue.sent == []


async def test_clients_take_turns_and_masks_come_before_texts(queue: Queue) -> None:
    for number in range(3):
        queue.put(b"a", text(number, f"a{number}"))
    queue.put(b"b", text(0, "b0"))
    queue.put(b"c", text(0, "c0"))
    queue.ask(wanted(0, client=b"a"))
    mask = Follow(0, 32, (), "g", b"a")
    assert [await queue.link.end() for _ in range(6)] == [mask, "b0", "c0", "a0", "a1", "a2"]


async def test_mask_of_a_known_grammar_waits_for_no_other_job(queue: Queue) -> None:
    """Beside another client's compilations and texts, which wait for each other."""
    mask = wanted(0, client=b"m")
    queue.ask(mask)
    assert await queue.link.end() == Follow(0, 32, (), "g", b"m")
    for number in range(1, 4):
        queue.ask(wanted(number, client=b"a"))
        queue.put(b"a", text(number, "a"))
    compiling = await queue.link.begun()
    for length in range(1, 4):
        mask = wanted(0, *range(length), client=b"m")
        queue.ask(mask)
        await until(lambda length=length: len(queue.link.jobs) == 2 + length)
        await queue.link.answer(MASK)
        assert mask.allowed is MASK
        assert queue.link.jobs[-1] == Follow(0, 32, (length - 1,))
    assert await queue.link.end() == compiling == Follow(1, 32, (), "g", b"a")


async def test_crash_during_two_jobs_costs_the_one_that_crashes_again_alone(queue: Queue) -> None:
    known, guilty = wanted(0, client=b"m"), wanted(1, client=b"a")
    queue.ask(known)
    await queue.link.end()
    queue.ask(guilty)
    await queue.link.begun()
    queue.ask(known := wanted(0, 5, client=b"m"))
    await until(lambda: len(queue.link.jobs) == 3)
    await queue.link.crash()
    assert known.allowed is guilty.allowed is None
    queue.ask(wanted(2, client=b"c"))
    while guilty.allowed is None or known.allowed is None:
        asked = await queue.link.begun()
        assert len(queue.link.open) == 1  # nothing runs beside either
        if asked.answer == 1:
            await queue.link.crash()
        else:
            await queue.link.end()
    assert guilty.allowed.error.endswith("it ended the text process 2 times")
    assert known.allowed is MASK


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


@pytest.mark.parametrize("begun", [True, False])
async def test_cancelled_text_is_answered_at_once_and_only_once(queue: Queue, begun: bool) -> None:
    for client, number in ((b"a" if begun else b"b", 0), (b"a", 1)):
        queue.put(client, text(number, f"{number}"))
    await queue.link.begun()
    number = 0 if begun else 1
    queue.cancel(b"a", number)
    queue.cancel(b"a", number)
    queue.cancel(b"a", 5)
    assert queue.sent == [(b"a", Done(number, "cancelled"))]
    assert await queue.link.end() == "0"
    if begun:
        assert await queue.link.end() == "1"
    assert queue.numbers() == [1 - number]
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
    for client, message in ((b"a", text(1, "a")), (b"b", Calibrate(2, text="b"))):
        queue.put(client, message)
    await queue.link.begun()
    queue.stop()
    ends = [(b"a", Done(1, "cancelled")), (b"b", Done(2, "cancelled"))]
    assert queue.sent == ends
    await queue.link.end()
    assert not queue.put(b"a", text(3, "a"))
    assert not queue.put(b"a", IDS)
    assert (queue.sent, queue.passed, len(queue.link.jobs)) == (ends, [], 1)


async def test_number_and_size_of_what_waits_are_limited(queue: Queue, monkeypatch) -> None:
    monkeypatch.setattr(text_queue, "MOST_WAITING", 3)
    assert [queue.put(b"a", text(number, "x")) for number in range(4)] == [True, True, True, False]
    assert queue.put(b"b", text(0, "y"))
    for _ in range(2):
        await queue.link.end()
    assert queue.put(b"a", text(5, "x"))
    large = "x" * (40 << 20)  # of 64 MB
    assert queue.put(b"c", text(0, large))
    assert not queue.put(b"c", text(1, large))
    queue.cancel(b"c", 0)
    assert queue.put(b"c", text(1, large))


# --- what is encoded of messages --------------------------------------------------------------------------

CONTEXT = 20
TURN = ChatMessage("user", "x")


def asked(message: Any, context: int = CONTEXT) -> Encode | None:
    return TextMessages(cast(Detokenizer, Estimate()), context).to_encode(message)


def answer(count: int) -> Encoded:
    return Encoded(np.arange(count, dtype=np.int32))


@pytest.mark.parametrize(
    ("message", "job", "found", "ids"),
    [
        (Generate(1, prompt="ab"), Encode("ab"), answer(2), Generate(1, token_ids=(0, 1))),
        (Generate(1, messages=(TURN,)), Encode(None, (TURN,)), answer(3), Generate(1, token_ids=(0, 1, 2))),
        (Generate(1, messages=()), Encode(None, ()), answer(0), Generate(1, token_ids=())),
        (Score(1, text=""), Encode(""), answer(1), Score(1, token_ids=(0,))),
        (Calibrate(1, text="abc"), Encode("abc"), answer(2), Calibrate(1, token_ids=(0, 1))),
    ],
)
def test_texts_are_replaced_by_their_ids(message, job, found, ids) -> None:
    assert asked(message) == job
    assert with_ids(message, found) == ids
    assert asked(ids) is None


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Generate(1), "give exactly one of prompt, token_ids and messages"),
        (Generate(1, prompt="a", messages=(TURN,)), "give exactly one of prompt, token_ids and messages"),
        (Generate(1, prompt="a", token_ids=(1, 2)), "give exactly one of prompt, token_ids and messages"),
        (Score(1), "give exactly one of text and token_ids"),
        (Score(1, text="a", token_ids=(1, 2)), "give exactly one of text and token_ids"),
        (Calibrate(1), "give exactly one of text and token_ids"),
        (
            Generate(1, messages=(TURN, ChatMessage("r" * (ROLE_LIMIT + 1), "x"))),
            "a turn's role has 256 characters at most",
        ),
        (
            Generate(1, token_ids=(1,), shaping=Shaping(grammar="g" * (GRAMMAR_LIMIT + 1))),
            "a grammar has 262144 characters at most",
        ),
    ],
)
def test_messages_that_are_never_encoded(message, reason: str) -> None:
    with pytest.raises(RequestError, match=f"^{reason}$"):
        asked(message)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            Generate(1, prompt="x" * 210),
            "the prompt has 210 characters, at least 21 tokens, the context is 20",
        ),
        (Score(1, text="x" * 210), "the prompt has 210 characters, at least 21 tokens, the context is 20"),
        (
            Generate(1, messages=(ChatMessage("user", "x" * 100), ChatMessage("user", "x" * 110))),
            "the prompt has 210 characters, at least 21 tokens, the context is 20, including the answer",
        ),
        (Generate(1, messages=(TURN,) * 21), "21 turns do not fit the context of 20"),
    ],
)
def test_text_far_beyond_the_context_is_refused_before_it_is_encoded(message: Any, reason: str) -> None:
    with pytest.raises(PromptTooLong, match=f"^{reason}") as refused:
        asked(message)
    assert refused.value.tokens == 21
    assert asked(message, CONTEXT + 1) is not None  # it may just fit


@pytest.mark.parametrize("kind", [Calibrate, Tokenize])
def test_text_that_is_not_computed_as_a_whole_may_be_longer_than_the_context(kind: Any) -> None:
    assert asked(kind(1, text="x" * 210)) == Encode("x" * 210)


def test_model_without_tokenizer_takes_ids_alone() -> None:
    texts = TextMessages(None, CONTEXT)
    grammar = Generate(1, token_ids=(1, 2), shaping=Shaping(grammar="g"))
    messages = (Generate(1, prompt="a"), Generate(1, messages=(TURN,)), Score(1, text="a"), grammar)
    for message in (*messages, Calibrate(1, text="a"), Tokenize(1, text="a")):
        with pytest.raises(RequestError, match="this model has none; give token ids"):
            texts.to_encode(message)
    assert texts.to_encode(Generate(1, token_ids=(1, 2))) is None
