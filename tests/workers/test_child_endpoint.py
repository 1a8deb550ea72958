"""A child's two sockets, in this process."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from child_harness import KEY, SOCKETS

from protocol.codec import decode, encode
from protocol.messages import VERSION, Abandon, Failed, Partial, Ready, Shutdown
from protocol.sockets import Identity, bind_router, ipc_endpoint
from workers import child_endpoint
from workers.child_endpoint import ChildEndpoint

NAME = Identity("worker", 2, 5).prove(KEY)


class Peers:
    """The supervisor's and the coordinator's socket."""

    def __init__(self, context: zmq.Context[Any], runtime: Path) -> None:
        self.config = {
            **{"role": "worker", "index": 2, "generation": 5, "fingerprint": "f" * 64},
            **{"runtime": str(runtime), "identity": NAME},
        }
        self.control = bind_router(context, ipc_endpoint(runtime, "control.sock"))
        self.work = bind_router(context, ipc_endpoint(runtime, SOCKETS["worker"]))

    def next(self, socket: zmq.Socket[bytes]) -> object:
        assert socket.poll(5000)
        sender, *frames = socket.recv_multipart()
        assert sender == NAME
        return decode(frames)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Peers]:
    monkeypatch.setattr(child_endpoint, "POLL_LIMIT_MS", 5000)
    runtime = Path(tempfile.mkdtemp(prefix="tw-", dir="/tmp"))
    with zmq.Context() as context:
        made = Peers(context, runtime)
        yield made
        made.control.close(linger=0)
        made.work.close(linger=0)
    shutil.rmtree(runtime)


def test_ready_goes_to_both_and_a_failure_to_the_supervisor(peers: Peers) -> None:
    child = ChildEndpoint(peers.config, SOCKETS["worker"])
    child.announce(("a note",))
    ready = Ready(VERSION, "worker", 2, 5, os.getpid(), "f" * 64, ("a note",))
    assert [peers.next(socket) for socket in (peers.control, peers.work)] == [ready, ready]
    child.fail("it broke")
    assert peers.next(peers.control) == Failed("worker", "it broke", False)
    for rows in (1, 300):  # copied, and not
        child.send(Partial(rows, 5, 0.5, np.ones((rows, 64), np.float32)))
        found = peers.next(peers.work)
        assert isinstance(found, Partial)
        assert (found.seq, found.y.shape) == (rows, (rows, 64))
    child.close()
    assert not peers.control.poll(20)  # what is computed is for the coordinator alone


def test_unsupervised_child_has_the_coordinator_alone(peers: Peers) -> None:
    child = ChildEndpoint(peers.config, SOCKETS["worker"], supervised=False)
    child.announce()
    assert isinstance(peers.next(peers.work), Ready)
    child.fail("it broke")
    assert peers.next(peers.work) == Failed("worker", "it broke", False)
    child.close()
    assert not peers.control.poll(20)


@pytest.mark.parametrize("sender", ["control", "work"])
def test_shutdown_of_either_socket_ends_what_is_received(
    peers: Peers, sender: str, caplog: pytest.LogCaptureFixture
) -> None:
    child = ChildEndpoint(peers.config, SOCKETS["worker"])
    child.announce()
    for socket in (peers.control, peers.work):
        peers.next(socket)
    assert list(child.receive(wait=False)) == []
    assert not child.stopped
    peers.work.send_multipart([NAME, *encode(Abandon(1))])
    peers.work.send_multipart([NAME, b"?", b""])
    peers.work.send_multipart([NAME, *encode(Abandon(2))])
    got: list[object] = []
    while len(got) < 2:
        got += child.receive(wait=True)
    assert got == [Abandon(1), Abandon(2)]
    assert caplog.text.count("dropped a malformed message: ") == 1
    stopping = getattr(peers, sender)
    stopping.send_multipart([NAME, *encode(Shutdown())])
    stopping.send_multipart([NAME, *encode(Abandon(3))])
    rest = list(child.receive(wait=True))
    assert (rest, child.stopped) == ([], True)
    child.close()
