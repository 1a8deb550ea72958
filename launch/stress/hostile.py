"""Hostile messages: a seeded, endless stream of them, as frames for any of an engine's sockets, and a client
that sends them. They are noise; valid messages at the wrong time; replays; and valid messages with every kind
of damage, see `MUTATIONS`.
"""

from __future__ import annotations

import asyncio
import functools
import math
import types
import typing
from collections import Counter, deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import zmq
from msgspec import msgpack

from protocol.codec import decode, encode
from protocol.messages import HEADER_LIMIT, TAGS, VERSION, Hello, Tree
from protocol.sockets import connect_dealer, ipc_endpoint

INT_MIN, INT_MAX = -(1 << 63), (1 << 63) - 1
Make = Callable[[Random], Any]

EDGES = (0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, -(2**31), 2**32, INT_MAX, INT_MIN)
WORDS = ("", "a", "worker", "prefetcher", "loader", "coordinator", "shm", "cuda", "x" * 300, "\0", "é𝄞", "\n")
NODES: tuple[Any, ...] = (None, True, *EDGES, 0.5, *WORDS, [], [None, [1, ["a"]]], {"a": {"b": [2.5]}})


def valid_message(random: Random, message: type) -> Any:
    """A message of this class that the codec accepts."""
    return _record(message)(random)


@functools.cache
def _record(record: type) -> Make:
    makes = [(name, _value(hint)) for name, hint in typing.get_type_hints(record).items()]
    return lambda random: record(**{name: make(random) for name, make in makes})


def _value(annotation: Any) -> Make:
    scalar = _SCALARS.get(annotation)
    if scalar is not None:
        return scalar
    if annotation == Tree:
        return _tree
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is np.ndarray:
        shape, dtype = map(typing.get_args, arguments)
        return functools.partial(_array, dimensions=len(shape), dtype=np.dtype(dtype[0]))
    if origin is dict:
        return lambda random: {f"{i}": _text(random) for i in range(random.randrange(4))}
    if origin in (typing.Union, types.UnionType):
        inner = _value(arguments[0])
        return lambda random: inner(random) if random.random() < 0.5 else None
    if origin is tuple:
        inner = _value(arguments[0])
        return lambda random: tuple([inner(random) for _ in range(random.randrange(4))])
    return _record(annotation)


def _integer(random: Random) -> int:
    shape = random.random()
    if shape < 0.6:
        return random.randrange(8)
    return random.choice(EDGES) if shape < 0.8 else random.randint(INT_MIN, INT_MAX)


def _float(random: Random) -> float:
    return random.choice((0.0, 1.0, -1.0, 1e-300, 1e300, random.uniform(-10, 10)))


def _text(random: Random) -> str:
    if random.random() < 0.5:
        return random.choice(WORDS)
    return "".join(chr(random.randrange(32, 0x2FF)) for _ in range(random.randrange(20)))


def _array(random: Random, dimensions: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    shape = tuple(random.randrange(9) for _ in range(dimensions))
    return np.frombuffer(random.randbytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)


def _tree(random: Random) -> dict[str, Any]:
    return {f"{i}": random.choice(NODES) for i in range(random.randrange(4))}


_SCALARS: dict[Any, Make] = {
    int: _integer,
    float: _float,
    str: _text,
    bool: lambda random: random.random() < 0.5,
    bytes: lambda random: random.randbytes(random.randrange(80)),
}


Frames = list[bytes]

HISTORY = 256  # messages that are kept for replays
MANY_FRAMES = 2000  # of one message
CLAIMS = tuple(bytes([kind]) + b"\xff\xff\xff\xff" for kind in (0xDD, 0xDF, 0xDB, 0xC6, 0xC9))  # sizes of 4 G
NEST = (b"\x91", b"\x81\xa1a", b"\x81\x91", b"\xdd\x00\x00\x00\x01")  # each opens one level
FOREIGN: tuple[Any, ...] = (
    None, True, -1, 2**64 - 1, 1.5, float("nan"), float("inf"), "", "x", b"", b"\0\xff", [], [None], [[]], {},
    {"": None}, {1: 2}, ["float32", -1, 4], ["float32", 2**62, 4], ["float32", 1, 1], ["int32"], ["O", 1, 1],
    msgpack.Ext(5, b"x"), datetime.fromtimestamp(1, UTC),
)  # fmt: skip


def hostile_messages(seed: int) -> Iterator[tuple[str, Frames]]:
    """Yields messages without end, each with its defect, one of `KINDS`."""
    random, history = Random(seed), deque[Frames](maxlen=HISTORY)
    while True:
        kind = random.choices(KINDS, cum_weights=_CUMULATED)[0]
        if kind == "noise":
            yield kind, [random.randbytes(random.randrange(64)) for _ in range(random.randrange(1, 7))]
        elif kind == "replay" and history:
            yield kind, random.choice(history)
        else:
            frames = _valid(random, history)
            yield kind, MUTATIONS[kind](random, frames) if kind in MUTATIONS else frames


def _valid(random: Random, history: deque[Frames]) -> Frames:
    """A new valid message or one of the history: making a message costs more than damaging it."""
    if len(history) == HISTORY and random.random() < 0.75:
        return list(random.choice(history))
    frames = [bytes(frame) for frame in encode(valid_message(random, random.choice(_MESSAGES)))]
    history.append(frames)
    return list(frames)


def _flip(random: Random, frames: Frames) -> Frames:
    """Flip bits of one frame."""
    place = random.randrange(len(frames))
    damaged = bytearray(frames[place])
    for _ in range(random.randint(1, 4) if damaged else 0):
        damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
    return [*frames[:place], bytes(damaged), *frames[place + 1 :]]


def _cut(random: Random, frames: Frames) -> Frames:
    """One frame is cut short, or extended."""
    place = random.randrange(len(frames))
    frame = frames[place]
    longer = random.random() < 0.3
    other = frame + random.randbytes(3) if longer else frame[: random.randrange(len(frame) + 1)]
    return [*frames[:place], other, *frames[place + 1 :]]


def _shuffle(random: Random, frames: Frames) -> Frames:
    """Frames dropped, doubled, swapped, added."""
    match random.randrange(4):
        case 0:
            frames.pop(random.randrange(len(frames)))
        case 1:
            frames.insert(random.randrange(len(frames) + 1), random.choice(frames))
        case 2:
            random.shuffle(frames)
        case 3:
            frames.insert(random.randrange(len(frames) + 1), random.randbytes(random.randrange(40)))
    return frames or [b""]  # ZeroMQ sends no message without a frame


def _lie(random: Random, frames: Frames) -> Frames:
    """The header announces entries, characters or bytes that do not follow."""
    header = frames[1]
    return [frames[0], header[: random.randrange(len(header) + 1)] + random.choice(CLAIMS), *frames[2:]]


def _type(random: Random, frames: Frames) -> Frames:
    """A field has a value of another type or out of range, is missing, or is unknown."""
    header = msgpack.decode(frames[1])
    key = random.choice([*header, "colour"])
    if random.random() < 0.2:
        header.pop(key, None)
    else:
        header[key] = random.choice(FOREIGN)
    return [frames[0], msgpack.encode(header), *frames[2:]]


def _nest(random: Random, frames: Frames) -> Frames:
    """A field's value is nested up to and far beyond the limit."""
    header = msgpack.decode(frames[1])
    key = random.choice(list(header) or ["x"])
    levels = random.choice((15, 16, 17, 100, 1000, 1024, 1025, 10_000, 50_000))
    nested = random.choice(NEST) * levels + b"\xc0"
    return [frames[0], b"\x81" + msgpack.encode(key) + nested, *frames[2:]]


def _huge(random: Random, frames: Frames) -> Frames:
    """A header at and above its limit, a large frame, thousands of frames."""
    match random.randrange(20):
        case 0 | 1:
            return [frames[0], bytes(HEADER_LIMIT + random.randrange(2)), *frames[2:]]
        case 2 | 3:
            return [frames[0], b"\xdd\x00\x0f\xff\xff" + bytes(2**20 - 1), *frames[2:]]  # an array of zeros
        case 4 | 5:
            return [*frames, *[b""] * MANY_FRAMES]
        case 6 | 7:
            return [*frames, bytes(2**20)]
        case _:
            return [frames[0], frames[1] + bytes(random.randrange(2**16)), *frames[2:]]


def _tag(random: Random, frames: Frames) -> Frames:
    """Another message's tag, or another version."""
    place, tag = random.randrange(2), bytearray(frames[0])
    tag[place] = random.randrange(256)
    return [bytes(tag), *frames[1:]]


_EVERY = (_flip, _cut, _shuffle, _lie, _type, _nest, _huge, _tag)
MUTATIONS: dict[str, Callable[[Random, Frames], Frames]] = {mutate.__name__[1:]: mutate for mutate in _EVERY}
_WEIGHTS = {
    "noise": 8.0,
    "valid": 14.0,
    "replay": 10.0,
    **dict.fromkeys(MUTATIONS, 8.0),
    "nest": 1.0,
    "huge": 0.1,
}
KINDS = tuple(_WEIGHTS)
_CUMULATED = [sum(list(_WEIGHTS.values())[: i + 1]) for i in range(len(_WEIGHTS))]
_MESSAGES = tuple(TAGS.values())


SOCKETS = ("client.sock", "work.sock", "fetch.sock", "control.sock", "text.sock")
ROLES = ("worker", "prefetcher", "coordinator", "loader", "text", "gateway")
STALL_LIMIT = 5.0  # seconds for which a socket may accept nothing
LINGER_MS = 5000  # for the last messages of a burst
BATCH = 32  # messages sent before other tasks of this process may run
RETRY = 0.002  # seconds until the next attempt on a full socket


class HostileClient:
    """One seed's bursts on the sockets of one engine. For one task, which must call `close`."""

    def __init__(self, runtime: Path, seed: int) -> None:
        self.sent: Counter[str] = Counter()  # messages, by socket
        self.answered = 0  # messages received
        self.stalled = 0  # bursts that ended early because the socket accepted nothing
        self._runtime = runtime
        self._random = Random(seed)
        self._messages = hostile_messages(seed)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None  # until the first burst

    def sockets(self) -> list[str]:
        """Names of the sockets that exist; an engine without a prefetcher has no fetch.sock."""
        return [name for name in SOCKETS if (self._runtime / name).is_socket()]

    async def burst(self, socket: str, count: int) -> int:
        """Send `count` messages to one socket, as fast as it accepts them. Returns the number accepted.
        Answers are read and must be valid: raises MalformedMessage."""
        if self._context is None:
            self._context = zmq.Context()
        endpoint = ipc_endpoint(self._runtime, socket)
        dealer = connect_dealer(self._context, endpoint, identity=self._identity())
        dealer.setsockopt(zmq.LINGER, LINGER_MS)
        taken = 0
        try:
            if self._random.random() < 0.5:  # with a handshake the client socket processes what follows
                dealer.send_multipart(encode(Hello(VERSION, "hostile")), zmq.NOBLOCK)
            for _, frames in islice(self._messages, count):
                if not await self._send(dealer, frames):
                    self.stalled += 1
                    break
                taken += 1
                if taken % BATCH == 0:
                    self._drain(dealer)
                    await asyncio.sleep(0)
            self._drain(dealer)
        finally:
            self.sent[socket] += taken
            dealer.close()
        return taken

    async def close(self) -> None:
        """Wait until all messages have left, at most LINGER_MS."""
        if self._context is not None:
            await asyncio.to_thread(self._context.term)

    def _identity(self) -> bytes:
        """Draw an identity; for an empty one `connect_dealer` makes a client's."""
        match self._random.randrange(4):
            case 0:
                return b"\x01" + self._random.randbytes(self._random.randrange(255))
            case 1:
                role = self._random.choice(ROLES)
                proof = self._random.randbytes(8).hex()
                return f"{role}-{self._random.randrange(3)}-{self._random.randrange(3)}-{proof}".encode()
            case _:
                return b""

    async def _send(self, dealer: zmq.Socket[bytes], frames: list[bytes]) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + STALL_LIMIT
        while True:
            try:
                dealer.send_multipart(frames, zmq.NOBLOCK)
                return True
            except zmq.Again:
                if loop.time() > deadline:
                    return False
            self._drain(dealer)  # the engine may be blocked on its answers to this client
            await asyncio.sleep(RETRY)

    def _drain(self, dealer: zmq.Socket[bytes]) -> None:
        while True:
            try:
                decode(dealer.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            self.answered += 1
