"""How long a Work of one row without items and its answer take between two processes of this machine, over
ZeroMQ and through shared memory: which of them is faster depends on how fast it wakes a sleeping process.

The other process is a fork of this one, on one core as a worker is. For each Work both ends do what
coordinator and worker do: sockets encode, poll and decode, lanes post and ring a doorbell. This module
imports no torch.
"""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NoReturn

import numpy as np
import zmq

from protocol.codec import decode, encode
from protocol.errors import ProtocolError
from protocol.messages import Partial, Work
from protocol.sockets import bind_router, connect_dealer, ipc_endpoint
from shm.descriptor import HEADER, SEQ, Descriptor, describe, head_of
from shm.doorbell import Library, library
from shm.errors import ShmError
from shm.lane import CoordinatorLane, LaneShape, WorkerLane
from shm.mask import NOTHING
from shm.segment import Segment, unlink
from workers.lifetime import end_with_parent

HIDDEN = 2048
WARM, TRIPS = 5, 40  # of each way
LIMIT = 1.0  # seconds for one trip
LIFE = 10  # seconds after which the other process ends, whatever has happened
GENERATION = 1

Trip = Callable[[int], None]  # of the Work with this seq


def round_trips() -> dict[str, float]:
    """Seconds of a round trip, the median, by the name of the exchange; empty where shared memory cannot be
    used, or not measured."""
    functions = library()
    if functions is None:
        return {}
    try:
        with ExitStack() as closing:
            folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="tandem-")))
            prefix = f"/tandem-trial-{secrets.token_hex(3)}-"
            shape = LaneShape(HIDDEN, (1, HEADER + 1), (1, HEADER + 1))
            hall = Segment.create(f"{prefix}hall-0", shape.hall_bytes)
            closing.callback(unlink, hall.name)
            lane = CoordinatorLane(functions, f"{prefix}lane-0", shape, GENERATION)
            closing.callback(unlink, lane.name)
            other = WorkerLane(functions, hall.name, lane.name, GENERATION)  # which removes the lane's name
            unlink(hall.name)
            endpoint = ipc_endpoint(folder, "trial.sock")
            parent, child = os.getpid(), os.fork()
            if child == 0:
                _answer(parent, endpoint, other)
            closing.callback(os.waitpid, child, 0)
            closing.callback(os.kill, child, signal.SIGKILL)
            trips = {
                "zmq": _over_socket(endpoint, closing),
                "shm": lambda seq: _through_lane(functions, lane, seq),
            }
            return _medians(trips)
    except (OSError, ShmError, ProtocolError, zmq.ZMQError):  # TimeoutError is an OSError
        return {}


def _medians(trips: dict[str, Trip]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in trips}
    for seq in range(WARM + TRIPS):
        for name, trip in trips.items():
            began = time.perf_counter()
            trip(seq)
            times[name].append(time.perf_counter() - began)
    return {name: median(its[WARM:]) for name, its in times.items()}


def _over_socket(endpoint: str, closing: ExitStack) -> Trip:
    context = zmq.Context()
    closing.callback(context.destroy, linger=0)
    socket = bind_router(context, endpoint)

    def receive() -> list[bytes]:
        if not socket.poll(int(LIMIT * 1000)):
            raise TimeoutError
        return socket.recv_multipart()

    sender = receive()[0]  # the other process has connected

    def trip(seq: int) -> None:
        socket.send_multipart([sender, *encode(Work(_descriptor(seq), np.zeros((1, HIDDEN), np.float32)))])
        decode(receive()[1:])

    return trip


def _through_lane(functions: Library, lane: CoordinatorLane, seq: int) -> None:
    descriptor = _descriptor(seq)
    slot = lane.room(1, len(descriptor))
    assert slot is not None
    lane.post(slot, seq, descriptor, 0)
    functions.ring((lane.other_bell,))
    end = time.monotonic() + LIMIT
    while not lane.answers():
        if time.monotonic() > end:
            raise TimeoutError
        lane.wait(LIMIT)
    lane.free(slot)


def _answer(parent: int, endpoint: str, lane: WorkerLane) -> NoReturn:
    """The other process: answers every Work, by turns over the socket and through the lane."""
    try:
        end_with_parent()
        if os.getppid() != parent:  # it exited before
            os._exit(1)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIFE)
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        socket = connect_dealer(zmq.Context(), endpoint)
        socket.send_multipart([b""])
        y = np.zeros((1, HIDDEN), np.float32)
        while socket.poll(int(LIMIT * 1000)):  # longer only where the first process has ended
            work = decode(socket.recv_multipart())
            assert isinstance(work, Work)
            socket.send_multipart(encode(Partial(head_of(work.descriptor)[SEQ], GENERATION, 0.0, y)))
            while (taken := lane.take()) is None:
                lane.wait(LIMIT)
            lane.answer(taken, 0.0, NOTHING)
    finally:
        os._exit(1)  # not what the process that it is a copy of would do at its end


def _descriptor(seq: int) -> Descriptor:
    return describe(0, [], [0], [], [], 1, seq=seq)
