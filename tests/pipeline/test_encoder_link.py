"""The event loop's link to a tokenizer process, which a test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq.asyncio
from child_messages import KEY, PRINT, exit_of
from waiting import until

from pipeline.serving import encoder_link
from pipeline.serving.encoder_link import EncoderExited, EncoderLink, limit_of
from protocol.codec import decode, encode
from protocol.messages import VERSION, ChatMessage, Encode, Encoded, Hung, Ready, WorkerUp
from protocol.sockets import Identity, connect_dealer, ipc_endpoint

ASKED = Encode(1, ("ab", "c"))
FOUND = (np.arange(3, dtype=np.int32), (2, 1))


class Linked:
    def __init__(self, runtime: Path) -> None:
        self.context = zmq.asyncio.Context()
        self.runtime = runtime
        self.reports: list[object] = []
        self.processes: list[Process] = []
        self.link = EncoderLink(self.context, runtime, PRINT, KEY, self.reports.append)
        self.serving = asyncio.create_task(self.link.serve())

    def process(self, incarnation: int, role: str = "tokenizer", store: str = PRINT) -> Process:
        self.processes.append(Process(self, Identity(role, 0, incarnation), store))
        return self.processes[-1]

    async def up(self, incarnation: int) -> Process:
        process = self.process(incarnation)
        await until(lambda: WorkerUp("tokenizer", 0, incarnation) in self.reports)
        await asyncio.wait_for(self.link.wait_up(), 1)
        return process


class Process:
    def __init__(self, linked: Linked, identity: Identity, store: str) -> None:
        endpoint = ipc_endpoint(linked.runtime, "text.sock")
        self._socket = connect_dealer(linked.context, endpoint, identity=identity.prove(KEY))
        self.send(Ready(VERSION, identity.role, 0, identity.incarnation, 1, store))

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
    linked.process(0, store="0" * 64)
    linked.process(0, role="worker")
    process = await linked.up(1)
    answer = asyncio.create_task(linked.link.encode(ASKED))
    assert await process.asked() == ASKED
    for wrong in (
        Encoded(0, *FOUND),
        Encoded(1, FOUND[0], (3,)),
        Ready(VERSION, "tokenizer", 0, 1, 1, PRINT),
    ):
        process.send(wrong)
    process.send(Encoded(1, *FOUND))
    found = await answer
    assert (found.ids.tolist(), found.lengths) == ([0, 1, 2], (2, 1))
    assert linked.reports == [WorkerUp("tokenizer", 0, 1)]


async def test_late_process_is_reported_and_not_used_again(linked: Linked, monkeypatch) -> None:
    monkeypatch.setattr(encoder_link, "ENCODE_SECONDS", 0.1)
    process = await linked.up(0)
    with pytest.raises(TimeoutError):
        await linked.link.encode(ASKED)
    assert linked.reports[1:] == [Hung("tokenizer", 0, 0)]
    process.send(Encoded(1, *FOUND))  # too late
    waiting = asyncio.create_task(linked.link.wait_up())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    second = await linked.up(1)
    await waiting
    linked.link.on_exit(exit_of(0, role="tokenizer"))  # the first one's
    answer = asyncio.create_task(linked.link.encode(Encode(2, ("x",))))
    assert await second.asked() == Encode(2, ("x",))
    second.send(Encoded(2, FOUND[0], (3,)))
    assert (await answer).job == 2


async def test_exit_of_the_process_ends_the_wait_for_its_answer(linked: Linked) -> None:
    await linked.up(3)
    answer = asyncio.create_task(linked.link.encode(ASKED))
    await asyncio.sleep(0.02)
    linked.link.on_exit(exit_of(2, role="tokenizer"))
    assert not answer.done()
    linked.link.on_exit(exit_of(3, role="tokenizer"))
    with pytest.raises(EncoderExited) as exited:
        await answer
    assert not exited.value.crashed
    await linked.up(4)
    answer = asyncio.create_task(linked.link.encode(ASKED))
    await asyncio.sleep(0.02)
    await linked.up(5)  # the exit's report is still under way
    with pytest.raises(EncoderExited):
        await answer


def test_longer_texts_have_more_time() -> None:
    assert limit_of(Encode(0, ("",))) == 5
    assert limit_of(Encode(0, ("x" * 300_000, "x" * 700_000))) == pytest.approx(15)
    assert limit_of(Encode(0, messages=(ChatMessage("user", "x" * 200_000),))) == pytest.approx(7)
