"""Outbox on real sockets: messages in order, tried again while the socket is full, with the bytes and seconds
that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import zmq
from waiting import until

from pipeline.serving import client_socket
from pipeline.serving.client_socket import LONGEST_ERROR, OVERHEAD, Frames, Outbox, frames_of
from protocol.codec import decode, encode
from protocol.messages import Done, Error, Heartbeat, Token

CLIENT = b"client"
TAKEN = 2  # messages that the two sockets hold beside the outbox
MESSAGES = [Heartbeat(1.0), Token(1, 0, 5, "x", 1.0, 2), *(Heartbeat(float(i)) for i in range(2, 5))]


@dataclass
class Ends:
    """An outbox and its client; `attempts`: the calls of `send`."""

    router: zmq.Socket[bytes]
    dealer: zmq.Socket[bytes]
    attempts: int = 0

    def __post_init__(self) -> None:
        self.box = Outbox(self.send)

    def send(self, frames: Frames) -> None:
        self.attempts += 1
        self.router.poll(0)  # a coordinator reads its sockets all the time: so it notices what a client does
        self.router.send_multipart([CLIENT, *frames], zmq.NOBLOCK)

    def read(self, count: int) -> list[object]:
        return [decode(self.dealer.recv_multipart()) for _ in range(count)]

    async def retried(self) -> None:
        """The full socket has been tried a few more times."""
        seen = self.attempts
        await until(lambda: self.attempts > seen + 2)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(client_socket, "RETRY", 0.0)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        router.set_hwm(1)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.bind("inproc://outbox")
        dealer.set_hwm(1)
        dealer.setsockopt(zmq.ROUTING_ID, CLIENT)
        dealer.setsockopt(zmq.RCVTIMEO, 10_000)
        dealer.connect("inproc://outbox")
        dealer.send(b"")
        assert router.recv_multipart() == [CLIENT, b""]
        yield Ends(router, dealer)


async def test_full_socket_is_tried_again_and_then_no_longer_full(ends: Ends) -> None:
    box, sizes = ends.box, [OVERHEAD + len(b"".join(encode(message))) for message in MESSAGES]
    for message in MESSAGES:
        box.put(message)
    assert (len(box), box.queued_bytes, box.full_since) == (len(MESSAGES), sum(sizes), None)
    pumping = asyncio.create_task(box.pump())
    since = []
    for first in (0, 1):  # full, a message later full again
        await ends.retried()
        assert box.queued_bytes == sum(sizes[TAKEN + first :])
        since.append(box.full_since)
        await ends.retried()
        assert box.full_since == since[-1]  # since the first refusal, not the latest
        assert ends.read(1) == [MESSAGES[first]]
    assert None not in since
    assert since[0] < since[1]
    await ends.retried()
    assert ends.read(1) == MESSAGES[2:3]
    await asyncio.wait_for(box.empty(), 10)
    assert ends.read(TAKEN) == MESSAGES[3:]
    assert (len(box), box.queued_bytes, box.full_since) == (0, 0, None)
    pumping.cancel()


async def test_disconnect_ends_the_pump_of_a_full_socket(ends: Ends) -> None:
    for message in MESSAGES:
        ends.box.put(message)
    pumping = asyncio.create_task(ends.box.pump())
    await ends.retried()
    assert not pumping.done()
    ends.dealer.close(linger=0)
    await asyncio.wait_for(pumping, 10)


@pytest.mark.parametrize("length", [LONGEST_ERROR, LONGEST_ERROR + 1])
def test_errors_are_cut_and_their_request_stays(length: int) -> None:
    kept = "x" * LONGEST_ERROR + "..." * (length > LONGEST_ERROR)
    for message, wanted in (
        (Error(4, "x" * length), Error(4, kept)),
        (Done(4, "error", "x" * length, usage=True), Done(4, "error", kept, usage=True)),
    ):
        assert decode([bytes(frame) for frame in frames_of(message)]) == wanted
