r"""Messages to frames and back: Tandem's wire format, version 15.

This docstring is the specification; with it a client can be written in any language that has ZeroMQ and
msgpack. `messages.py` defines the meaning of each message, `machines.py` that of those between machines.

Frames
------
A message is one multipart ZeroMQ message. Between a DEALER and a ROUTER nothing is added but the
identity frame that every ROUTER prepends to received messages and removes from sent ones; there is
no empty delimiter frame. After that:

  frame 0    two bytes: the message's tag, the wire version. This frame is the same in all versions, so
             that a receiver of another version can name the sender's.
  frame 1    the header: a msgpack map from field name (str) to value
  frame 2... one raw frame for each array field: C order (the last dimension varies fastest), little endian,
             no padding; empty arrays have an empty frame

`messages.py` has each message's tag and fields, and the records in them. Its types are, in msgpack:

  Int            integer of 64 bits, signed; never a bool
  Float          finite float, or an integer
  str            UTF-8 string
  bool, bytes    boolean; bin
  T | None       T or nil
  tuple[T, ...]  array of T
  dict[str, str] map
  Tree           map with str keys; values nil, bool, int, float (NaN too), str, and arrays and maps of these,
                 at most 16 levels deep
  Sampling, ...  a record: map from field name to value, with the same rules as the header
  F32Matrix, ... an array. Its header value is [dtype name, length of each dimension], so a [3, 64] one is
                 ["float32", 3, 64], and its frame has 3 * 64 * 4 bytes. dtypes: float32, int32, int8

A field with a default may be missing; others must be there; unknown fields are refused. The order of a map's
keys is free, except that frames of arrays follow in the order in which the header names them; of a repeated
key the last value holds. A header has at most 4 MiB, 256 KiB with a Tree; an array 256 MiB; a list what its
type says. A receiver checks all of this, and each array's shape against its frame's length, before it makes
anything of it. Who sends what: the sections of `messages.py`.

A conversation
--------------
1. The client gives a DEALER an identity of 16 random bytes (ZMQ_ROUTING_ID; from a source for secrets, the
   first byte not zero), connects it to the engine's `client.sock` (`engine.json` beside it has the endpoint)
   and sends Hello. A socket without such an identity, or with one in use, gets no Welcome. The coordinator
   answers Welcome, or Error with request -1 where the versions differ. Anything else from a peer that has no
   Welcome, heartbeats too, is answered by Error with request -1 and the text "say Hello first". A client that
   gets this in mid-conversation has been reconnected to a new coordinator, which does not know it or its
   requests; or the running one has dropped it, see 2.
2. Both sides send Heartbeat every 0.5 s as long as they run, whatever else they send. Any message counts as
   a heartbeat. A client that waited 2.5 s without a message considers the engine lost. A coordinator does not
   queue heartbeats for a client with a full queue. It drops a client, and cancels its requests, if the client
   cannot be reached (no route), is silent for too long, does not read its messages, or sends Cancels faster
   than they can be received. It refuses other requests beyond that rate.
3. The client numbers its requests itself (`request` >= 0, unique among its live ones):
     Generate  -> Queued, any number -> Token with index 0, 1, 2... -> Done
     Score     -> Queued, any number -> Scores in order of `start`  -> Done
               of both perhaps Waiting at any time
     Stats     -> StatsReply; ExpertActivity -> ExpertActivityReply
     SetPolicy -> PolicyChanged; other clients get it too, with request -1
     Tokenize  -> Tokenized; or Done, where it cannot be done
     Calibrate -> Calibrating, any number -> Calibrated; or Done, where it was cancelled or cannot be done
   Exactly one Done ends a Generate or a Score; where one cannot even begin, and instead of a StatsReply
   or PolicyChanged, there may be one Error with that request number. Requests overlap freely; answers to
   different ones interleave.
4. Cancel may be sent at any time until Done arrives; the Done still follows. A Cancel of an unknown
   request is ignored.
5. Scores can be large. A client that reads slowly fills its queue, and the coordinator then delays this
   client's next block; so use a separate connection for Scores, or read promptly.
6. A malformed message is answered by Error with request -1 and otherwise ignored; so is a message that no
   client may send. After many of them the coordinator sends the client an Error with a text that begins with
   "cut off", and ignores its messages for ten seconds. Errors to peers without a Welcome are limited in rate.
7. A coordinator that exits is soon restarted at the same endpoint, without any of the earlier requests. A
   client that wants its answers all the same closes its socket as soon as it considers the engine lost (2) or
   receives "say Hello first" (1), and sends Hello on a new one, every few seconds until it gets a Welcome. It
   compares `model`, `fingerprint`, `format` and `backbone_dtype` with those of the first Welcome, because
   another engine may use the endpoint now. Then it sends its unfinished requests again:
     Generate  with `resume`, the tokens received so far. The next Token has index len(resume), and texts
               continue after the last one sent. If only the Done was missing, only the Done follows. With a
               `seed`, or greedy, the rest is the same as without the restart, to rounding; otherwise it is a
               new sample.
     Score     unchanged; rows received before are sent again, perhaps in blocks of other sizes
     Stats, ExpertActivity, SetPolicy, Calibrate   unchanged; a Calibrate starts again
   It does not send cancelled requests, which get no Done any more, nor a request that was unfinished at
   several exits in a row without progress in between: it may be the cause of the exits. "say Hello first" on
   an unbroken transport means that a running coordinator has dropped the client (2, 6); such a client should
   not reconnect often.

Example
-------
Queued(request=7, position=2) is two frames: tag 15 and version 15, then a map of two.

>>> from protocol.codec import decode, encode
>>> from protocol.messages import Queued
>>> for frame in encode(Queued(request=7, position=2)):
...     print(frame.hex(" "))
0f 0f
82 a7 72 65 71 75 65 73 74 07 a8 70 6f 73 69 74 69 6f 6e 02
>>> decode([bytes([15, 15]), bytes.fromhex("82a77265717565737407a8706f736974696f6e02")])
Queued(request=7, position=2)

A block of scores has five arrays, so seven frames; here tokens [5, 6], chosen [-0.5], the others empty:

>>> import numpy as np
>>> from protocol.messages import Scores
>>> tokens, chosen = np.array([5, 6], np.int32), np.array([-0.5], np.float32)
>>> none, ids = np.empty((0, 0), np.float32), np.empty((0, 0), np.int32)
>>> for frame in encode(Scores(0, 1, tokens, chosen, none, ids, none))[2:]:
...     print(frame.hex(" ") or "(empty)")
05 00 00 00 06 00 00 00
00 00 00 bf
(empty)
(empty)
(empty)
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

import protocol.machines  # noqa: F401 - registers its messages
from protocol.errors import MalformedMessage
from protocol.messages import (
    ARRAY_LIMIT,
    HEADER_LIMIT,
    TAGS,
    TREE_DEPTH,
    TREE_LIMIT,
    VERSION,
    F32Matrix,
    F32Vector,
    I8Matrix,
    I32Matrix,
    I32Vector,
    Record,
    Tree,
)

Buffer = Any  # anything with the buffer protocol: bytes, memoryview, zmq.Frame

_SMALL_ARRAY = 4096  # bytes; below this a copy costs less than a view
_FLOAT32, _INT32, _INT8 = np.dtype("<f4"), np.dtype("<i4"), np.dtype("i1")
_ARRAYS: dict[Any, tuple[np.dtype[Any], str, int]] = {
    F32Vector: (_FLOAT32, "float32", 1),
    F32Matrix: (_FLOAT32, "float32", 2),
    I32Vector: (_INT32, "int32", 1),
    I32Matrix: (_INT32, "int32", 2),
    I8Matrix: (_INT8, "int8", 2),
}


class _Kind:
    """Plan of encoding and decoding one class of messages needs, derived once from its annotations."""

    def __init__(self, tag: int, message: type[Record]) -> None:
        hints = typing.get_type_hints(message)
        self.message = message
        self.name = message.__name__
        self.prefix = bytes([tag, VERSION])
        self.arrays = [_ARRAYS[hint] for hint in hints.values() if hint in _ARRAYS]
        self.trees = [name for name, hint in hints.items() if hint == Tree]
        self.header_limit = TREE_LIMIT if self.trees else HEADER_LIMIT


_BY_TAG = {tag: _Kind(tag, message) for tag, message in TAGS.items()}
_BY_CLASS: dict[type, _Kind] = {kind.message: kind for kind in _BY_TAG.values()}


def encode(message: object) -> list[bytes | memoryview]:
    """Returns the frames of a message, without any identity frame.

    A memoryview among them is an array's own memory: leave that array unchanged until ZeroMQ has sent it
    (by default it copies at once). Raises MalformedMessage for an array or, in a message without arrays, any
    value that the receiver would refuse, and TypeError for an object that is no message.
    """
    kind = _BY_CLASS.get(type(message))
    if kind is None:
        raise TypeError(f"{type(message).__name__} is not a message")
    frames: list[bytes | memoryview] = [kind.prefix, b""]
    arrays = iter(kind.arrays)

    def packed(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            declared, frame = _packed_array(value, next(arrays, None))
            frames.append(frame)
            return declared
        if isinstance(value, float):  # numpy's float64: msgspec takes no subclasses
            return float(value)
        raise TypeError(f"{type(value).__name__} has no bytes")

    try:
        frames[1] = msgspec.msgpack.encode(message, enc_hook=packed)
    except (TypeError, ValueError, OverflowError, RecursionError) as e:
        raise _malformed(kind, e) from None
    if kind.arrays:
        _kind_of(frames)
    else:
        decode(frames)
    return frames


def decode(frames: Sequence[Buffer]) -> Any:
    """Returns the message in these frames (without any identity frame), of any trusted or untrusted sender.

    Arrays are read-only views of the frames' memory, aligned to their item size. Raises MalformedMessage,
    and nothing else, for anything that is not a message of this version within the limits.
    """
    kind = _kind_of(frames)
    arrays = iter(frames[2:])

    def unpacked(annotation: Any, declared: Any) -> Any:
        frame = next(arrays, None)
        if frame is None:
            raise ValueError("An array twice")
        return _unpacked_array(declared, frame, *_ARRAYS[annotation])

    try:
        message = msgspec.msgpack.decode(frames[1], type=kind.message, dec_hook=unpacked)
    except (msgspec.DecodeError, ValueError, RecursionError) as e:
        raise _malformed(kind, e) from None
    for name in kind.trees:
        try:
            _check_tree(getattr(message, name), TREE_DEPTH)
        except ValueError as e:
            raise MalformedMessage(f"{kind.name}.{name} {e}") from None
    return message


def wire_version(frames: Sequence[Buffer]) -> int | None:
    """Returns the version in these frames, also another one than ours; None if they have none."""
    first = memoryview(frames[0]) if frames else memoryview(b"")
    return first.tobytes()[1] if first.nbytes == 2 else None


def _kind_of(frames: Sequence[Buffer]) -> _Kind:
    """Returns the message's class by its tag, after checks of the number of frames and the header's size."""
    version = wire_version(frames)
    if version is None:
        raise MalformedMessage("the first frame is not two bytes, a tag and a version")
    if version != VERSION:
        raise MalformedMessage(f"a message of wire version {version}; this side speaks version {VERSION}")
    tag = memoryview(frames[0]).tobytes()[0]
    kind = _BY_TAG.get(tag)
    if kind is None:
        raise MalformedMessage(f"unknown tag {tag}")
    expected = 2 + len(kind.arrays)
    if len(frames) != expected:
        raise MalformedMessage(f"{kind.name} has {expected} frames, not {len(frames)}")
    if (size := memoryview(frames[1]).nbytes) > kind.header_limit:
        raise MalformedMessage(f"{kind.name}: {size} bytes of header, the limit is {kind.header_limit}")
    return kind


def _packed_array(
    array: NDArray[Any], spec: tuple[np.dtype[Any], str, int] | None
) -> tuple[list[Any], bytes | memoryview]:
    """Returns what the header says of an array, and its frame: for a large one a view of its memory."""
    dtype, label, ndim = spec or (None, "no array", 0)
    if array.dtype != dtype or array.ndim != ndim:
        raise ValueError(f"Expected `{label}[{ndim}d]`, got `{array.dtype}[{array.ndim}d]`")
    nbytes = array.nbytes
    if nbytes > ARRAY_LIMIT:
        raise ValueError(f"An array of {nbytes} bytes, the limit is {ARRAY_LIMIT}")
    if nbytes <= _SMALL_ARRAY or not array.flags.c_contiguous:
        return [label, *array.shape], array.tobytes()
    return [label, *array.shape], array.data.cast("B")


def _unpacked_array(
    declared: Any, frame: Buffer, dtype: np.dtype[Any], label: str, ndim: int
) -> NDArray[Any]:
    """Returns a read-only array on the frame's own memory, which it references; all that could make numpy
    allocate or read too much is checked first. Only a frame that lies unaligned in memory is copied,
    because kernels rely on alignment to the item size."""
    if type(declared) is not list or len(declared) != 1 + ndim or declared[0] != label:
        raise ValueError(f"Must be declared as [{label!r}] and {ndim} dimensions")
    size = dtype.itemsize
    shape = declared[1:]
    for length in shape:
        if type(length) is not int or not 0 <= length <= ARRAY_LIMIT:
            raise ValueError("Has an impossible dimension")
        size *= length
    view = memoryview(frame)
    if size != view.nbytes or size > ARRAY_LIMIT:
        raise ValueError(f"Of shape {shape}, which needs {size} bytes; its frame has {view.nbytes}")
    array: NDArray[Any] = np.ndarray(shape, dtype, buffer=view.toreadonly())
    if not array.flags.aligned:
        array = array.copy()
        array.flags.writeable = False
    return array


def _check_tree(value: Any, levels: int) -> None:
    """Raises ValueError for what a Tree may not hold; msgspec has checked its outermost keys."""
    kind = type(value)
    if value is None or kind in (str, bool, float):
        return
    if kind is int:
        if not -(1 << 63) <= value < 1 << 63:
            raise ValueError("holds an integer of more than 64 bits")
        return
    if kind not in (dict, list):
        raise ValueError(f"holds a {kind.__name__}")
    if levels == 0:
        raise ValueError(f"is nested deeper than {TREE_DEPTH} levels")
    for entry in value:
        if kind is dict:
            if type(entry) is not str:
                raise ValueError("has a key that is no text")
            entry = value[entry]
        _check_tree(entry, levels - 1)


def _malformed(kind: _Kind, error: Exception) -> MalformedMessage:
    """Returns an error of one line; a sender may have put anything into a field's name."""
    text = "".join(letter if letter.isprintable() else "?" for letter in str(error)[:200])
    return MalformedMessage(f"{kind.name}: {text or type(error).__name__}")
