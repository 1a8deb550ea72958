"""The event loop's link to a text process, which a test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq.asyncio
from child_messages import KEY, exit_of
from waiting import until

from pipeline.serving.text_link import TextLink, TextProcessExited, answers, limit_of
from protocol.codec import decode, encode
from protocol.messages import (
    VERSION,
    Allowed,
    ChatMessage,
    Encode,
    Encoded,
    Follow,
    Ready,
    Unfollow,
    WorkerUp,
)
from protocol.sockets import Identity, connect_dealer, ipc_endpoint

ASKED, FOLLOW = Encode("abc"), Follow(0, 100, (1,))
AHEAD = Follow(0, 100, (1,), ahead=1)


def bits(guesses: int, words: int) -> Any:
    return np.ones((guesses, words), np.int32)


def ids(count: int) -> Any:
    return np.arange(count, dtype=np.int32)


class Linked:
    def __init__(self, runtime: Path) -> None:
        self.context = zmq.asyncio.Context()
        self.runtime = runtime
        self.reports: list[object] = []
        self.ups = 0
        self.processes: list[Process] = []
        self.link = TextLink(self.context, runtime, KEY, self.reports.append, self._on_up)
        self.serving = asyncio.create_task(self.link.serve())

    def _on_up(self) -> None:
        self.ups += 1

    def process(self, generation: int, role: str = "text", version: int = VERSION) -> Process:
        self.processes.append(Process(self, Identity(role, 0, generation), version))
        return self.processes[-1]

    async def up(self, generation: int) -> Process:
        process = self.process(generation)
        await until(lambda: WorkerUp("text", 0, generation) in self.reports)
        await asyncio.wait_for(self.link.wait_up(), 1)
        return process


class Process:
    def __init__(self, linked: Linked, identity: Identity, version: int) -> None:
        endpoint = ipc_endpoint(linked.runtime, "text.sock")
        self._socket = connect_dealer(linked.context, endpoint, identity=identity.prove(KEY))
        self.send(Ready(version, identity.role, 0, identity.generation, 1, ""))

    def send(self, message: object) -> None:
        self._socket.send_multipart(encode(message))

    def close(self) -> None:
        self._socket.close(linger=0)

    async def asked(self) -> Any:
        return decode(await asyncio.wait_for(self._socket.recv_multipart(), 10))


@pytest.fixture
async def linked(runtime: Path) -> AsyncIterator[Linked]:
    made = Linked(runtime)
    yield made
    made.serving.cancel()
    await asyncio.gather(made.serving, return_exceptions=True)
    made.link.close()
    for process in made.processes:
        process.close()
    made.context.term()


async def test_only_the_answer_to_what_was_asked_counts(linked: Linked) -> None:
    linked.link.tell(Unfollow(0))  # to nobody
    linked.process(0, version=VERSION + 1)
    linked.process(0, role="worker")
    process = await linked.up(1)
    answer = asyncio.create_task(linked.link.ask(ASKED))
    assert await process.asked() == ASKED
    for wrong in (Allowed(0, ids(0)), Ready(VERSION, "text", 0, 1, 1, "")):
        process.send(wrong)
    process.send(Encoded(ids(3)))
    assert len((await answer).ids) == 3
    linked.link.tell(Unfollow(5))
    assert await process.asked() == Unfollow(5)
    assert linked.reports == [WorkerUp("text", 0, 1)]
    assert (linked.ups, linked.link.generation) == (1, 1)


@pytest.mark.parametrize("crashed", [True, False])
async def test_exit_of_the_process_ends_the_wait_for_its_answer(linked: Linked, crashed: bool) -> None:
    process = await linked.up(3)
    answer = asyncio.create_task(linked.link.ask(ASKED))
    await process.asked()
    linked.link.on_exit(exit_of(2, role="text"))
    assert not answer.done()
    linked.link.on_exit(exit_of(3, role="text", crashed=crashed))
    with pytest.raises(TextProcessExited) as exited:
        await answer
    assert exited.value.crashed is crashed
    process = await linked.up(4)
    answer = asyncio.create_task(linked.link.ask(ASKED))
    await process.asked()
    await linked.up(5)  # the exit's report, which says why, is still under way
    with pytest.raises(TextProcessExited) as exited:
        await answer
    assert not exited.value.crashed


def test_longer_texts_have_more_time() -> None:
    assert limit_of(Encode("")) == 5
    assert limit_of(Encode("x" * 1_000_000)) == pytest.approx(15)
    assert limit_of(Encode(messages=(ChatMessage("user", "x" * 200_000),))) == pytest.approx(7)
    assert limit_of(Follow(0, 9, (1,) * 1000, "x" * 100_000)) == pytest.approx(7)


@pytest.mark.parametrize(
    ("asked", "answer", "right"),
    [
        (ASKED, Encoded(ids(3)), True),
        (ASKED, Encoded(ids(0), "no"), True),
        (ASKED, Allowed(0, ids(0)), False),
        (FOLLOW, Allowed(0, ids(4)), True),
        (FOLLOW, Allowed(0, ids(0)), True),
        (FOLLOW, Allowed(0, ids(0), "no"), True),
        (FOLLOW, Allowed(0, ids(4), "no"), False),
        (FOLLOW, Allowed(0, ids(3)), False),
        (FOLLOW, Allowed(1, ids(4)), False),
        (FOLLOW, Encoded(ids(0), "no"), False),
        (AHEAD, Allowed(0, ids(4), "", (7,), (1,), bits(1, 4)), True),
        (AHEAD, Allowed(0, ids(4), "", (7,), (1,), bits(1, 3)), False),
        (AHEAD, Allowed(0, ids(4), "", (7,), (), bits(1, 4)), False),
        (AHEAD, Allowed(0, ids(0), "", (7,), (1,), bits(1, 0)), False),
        (AHEAD, Allowed(0, ids(4), "", (7, 7), (1, 1), bits(2, 4)), False),
    ],
)
def test_answers_that_are_none_to_what_was_asked(asked: Any, answer: Any, right: bool) -> None:
    assert answers(asked, answer) is right
