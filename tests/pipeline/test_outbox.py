"""Outbox: messages in order, tried again while the socket is full, with the bytes and seconds that wait."""

from __future__ import annotations

import asyncio

import pytest
import zmq

from pipeline.serving import outbox
from pipeline.serving.outbox import LONGEST_ERROR, OVERHEAD, Frames, Outbox, frames_of
from protocol.codec import decode, encode
from protocol.messages import Done, Error, Heartbeat, Token


class Socket:
    """Sends, or raises the errors it has been given."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.sent: list[Frames] = []
        self.full: list[float | None] = []  # the outbox's `full_since` at each call

    def send(self, frames: Frames) -> None:
        self.full.append(self.outbox.full_since)
        if self.errors:
            raise self.errors.pop(0)
        self.sent.append(frames)

    def attached(self) -> Outbox:
        self.outbox = Outbox(self.send)
        return self.outbox


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The readings of the clock so far."""
    readings: list[float] = []

    class Clock:
        @staticmethod
        def monotonic() -> float:
            readings.append(100.0 + len(readings))
            return readings[-1]

    monkeypatch.setattr(outbox, "time", Clock)
    monkeypatch.setattr(outbox, "RETRY", 0.0)
    return readings


async def test_full_socket_is_tried_again_and_then_no_longer_full(times) -> None:
    socket = Socket(zmq.Again(), zmq.Again())
    box = socket.attached()
    messages = [Heartbeat(1.0), Token(1, 0, 5, "x", 1.0, 2), Heartbeat(2.0)]
    for message in messages:
        box.put(message)
    assert len(box) == 3
    assert box.queued_bytes == sum(OVERHEAD + len(b"".join(encode(m))) for m in messages)
    pumping = asyncio.create_task(box.pump())
    await asyncio.wait_for(box.empty(), 5)
    assert [decode([bytes(f) for f in frames]) for frames in socket.sent] == messages
    assert socket.full == [None, times[0], times[0], None, None]  # since the first refusal
    assert (len(box), box.queued_bytes, box.full_since) == (0, 0, None)
    socket.errors = [zmq.Again()]  # full a second time: a new time
    box.put(messages[0])
    await asyncio.wait_for(box.empty(), 5)
    assert socket.full[-2:] == [None, times[-1]]
    pumping.cancel()


async def test_disconnect_ends_the_pump(times) -> None:
    socket = Socket(zmq.Again(), zmq.ZMQError(zmq.EHOSTUNREACH))
    box = socket.attached()
    box.put(Heartbeat(1.0))
    await asyncio.wait_for(box.pump(), 5)
    assert socket.sent == []


@pytest.mark.parametrize("length", [LONGEST_ERROR, LONGEST_ERROR + 1])
def test_errors_are_cut_and_their_request_stays(length: int) -> None:
    kept = "x" * LONGEST_ERROR + "..." * (length > LONGEST_ERROR)
    for message, wanted in (
        (Error(4, "x" * length), Error(4, kept)),
        (Done(4, "error", "x" * length, usage=True), Done(4, "error", kept, usage=True)),
    ):
        assert decode([bytes(frame) for frame in frames_of(message)]) == wanted
