r"""Messages to frames and back: Tandem's wire format, version 7.

This docstring is the specification; with it a client can be written in any language that has ZeroMQ and
msgpack. `messages.py` defines the meaning of each message.

Frames
------
A message is one multipart ZeroMQ message. Between a DEALER and a ROUTER nothing is added but the
identity frame that every ROUTER prepends to received messages and removes from sent ones; there is
no empty delimiter frame. After that:

  frame 0    two bytes: the message's tag, the wire version. This frame is the same in all versions, so
             that a receiver of another version can name the sender's.
  frame 1    the header: a msgpack map from field name (str) to value
  frame 2... one raw frame for each array field, in the order of the table below: C order (the last
             dimension varies fastest), little endian, no padding; empty arrays have an empty frame

The types, as the table writes them, and their msgpack values:

  int            integer of 64 bits, signed; never a bool
  float          finite float, or an integer
  str            UTF-8 string
  bool, bytes    boolean; bin
  T?             T or nil
  [T]            array of T
  map            a Tree: map with str keys; values nil, bool, int, float (NaN too), str, and arrays and
                 maps of these, at most 16 levels deep
  Sampling       a record: map from field name to value, with the same rules as the header
  float32[2d]    an array. Its header value is [dtype name, length of each dimension], so a [3, 64] one is
                 ["float32", 3, 64], and its frame has 3 * 64 * 4 bytes. dtypes: float32, int32

A field written with "= value" may be missing and then has that value; others must be there; unknown
fields and repeated keys are refused. The order of a map's keys is free. A header has at most 4 MiB, an
array 256 MiB, a list 2**20 entries, a map 4096, a header 16384 lists and maps in all; ext types are
refused. A receiver checks all of this, and each array's shape against its frame's length, before it makes
anything of it.

Messages
--------
A client sends Hello, Generate, Cancel, Score, Stats, ExpertActivity, SetPolicy, Calibrate and Heartbeat,
and receives the others of the first block. The second block is between the coordinator and its workers and
prefetcher, the third between the coordinator and the door for tcp or the text process, the fourth
between the supervisor and its children.

  1 Hello: version int, client str = ""
  2 Welcome: version int, engine str, model str, fingerprint str, device str, policy str, exact bool,
    vocabulary int, context int, has_tokenizer bool, has_chat_template bool, emulation str = "",
    sampling Sampling = {}, format str = "", backbone_dtype str = ""
  3 Generate: request int, prompt str? = nil, token_ids [int]? = nil, messages [ChatMessage]? = nil,
    max_tokens int = 128, sampling Sampling = {}, stop [str] = [], ignore_eos bool = false,
    conversation str? = nil, resume [int] = [], rival int = -1, reserve int = 1,
    shaping Shaping = {}, logprobs int = -1, template str = ""
  4 Token: request int, index int, token int, text str, margin float = 0.0, runner_up int = -1,
    logprob float = 0.0, top_tokens [int] = [], top_logprobs [float] = []
  5 Done: request int, reason str, error str = "", text str = "", stats map = {}, usage bool = false
  6 Cancel: request int
  7 Score: request int, text str? = nil, token_ids [int]? = nil, stepwise bool = false, prefill int = 1,
    full bool = false, top int = 0
  8 Scores: request int, start int, tokens int32[1d], chosen float32[1d], logprobs float32[2d],
    top_tokens int32[2d], top_logprobs float32[2d]
  9 Stats: request int
  10 StatsReply: request int, stats map
  11 SetPolicy: request int, policy str, options map = {}, counted bool = true
  12 PolicyChanged: request int, policy str, exact bool, notes [str] = []
  13 Heartbeat: time float = 0.0
  14 Error: request int, text str
  15 Queued: request int, position int
  16 Calibrate: request int, text str? = nil, token_ids [int]? = nil, tokens int = 8192,
    starts [int] = [], share float = 1.0, max_loss float? = nil
  17 Calibrating: request int, stage str, done int, total int
  18 Calibrated: request int, path str, summary map
  19 Tokenize: request int, text str? = nil, messages [ChatMessage]? = nil, template str = "",
    token_ids [int]? = nil
  20 Tokenized: request int, ids int32[1d], text str = "", pieces [bytes] = []
  21 ExpertActivity: request int
  22 ExpertActivityReply: request int, tiles int, resident int32[2d], used int32[2d], device int32[2d],
    demanded int32[2d]

  32 Ready: version int, role str, index int, incarnation int, pid int, fingerprint str, notes [str] = []
  33 Work: seq int, layer int, items int32[2d], offsets int32[1d], rows int32[1d], weights float32[1d],
    x float32[2d], threshold float = 0.0, share float = 1.0
  34 Partial: seq int, incarnation int, busy float, y float32[2d], mass float = 0.0, left float = 0.0,
    kept int = 0, channels int = 0
  35 WorkFailed: seq int, incarnation int, text str
  36 Abandon: seq int
  37 AttachSlab: kind str, handle bytes, device int, slots int, slot_bytes int, flags str = ""
  38 SlabAttached: incarnation int, notes [str] = [], error str = "", flags bool = false
  39 Fetch: id int, layer int, expert int, lo int, slots [int], urgency int, numbers [int] = []
  40 Fetched: id int, incarnation int, landed int, final bool, seconds float
  41 CancelFetch: id int
  42 AttachRing: name str
  43 DemandFetch: id int, tiles int
  44 Gather: id int, layer int, expert int, channels int32[1d], slots [int], urgency int
  45 PagesLocked: incarnation int, locked int, total int

  48 RemoteClient: account str, right str, address str
  49 Encode: texts [str] = [], messages [ChatMessage]? = nil, template str = "",
    token_ids [int]? = nil, grammar str = ""
  50 Encoded: ids int32[1d], lengths [int] = [], error str = "", text str = "", pieces [bytes] = []
  51 RemoteGone:
  52 Follow: answer int, vocabulary int, tokens [int] = [], grammar str = ""
  53 Allowed: mask int32[1d], error str = ""
  54 Unfollow: answer int

  64 Progress: stage str, done int, total int
  65 Failed: role str, text str, usage bool
  66 Shutdown: reason str = ""
  67 WorkerDied: role str, index int, incarnation int, crashed bool, seq int
  68 WorkerUp: role str, index int, incarnation int
  69 Needed: role str
  70 Hung: role str, index int, incarnation int

  Sampling: temperature float = 0.0, top_k int = 0, top_p float = 1.0, min_p float = 0.0,
    repetition_penalty float = 1.0, seed int? = nil
  TokenBias: token int, bias float
  Shaping: presence_penalty float = 0.0, frequency_penalty float = 0.0, bias [TokenBias] = [],
    grammar str = ""
  ChatMessage: role str, content str, extra str = ""

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
   client may send. After many of them, and where handling its messages takes too much of the engine's time,
   the coordinator sends the client an Error with a text that begins with "cut off", and ignores its messages
   for ten seconds. Errors to peers without a Welcome are limited in rate. Over tcp (with CURVE) any Error
   with request -1 is the last message of its connection; a connection also ends when the client sends no
   Hello in its first 5 seconds, or nothing for 10 seconds after the Welcome.
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
8. Over tcp a client speaks with the door, which closes its connection after any Error with request -1. Its
   key has a right: `use` for Generate, Score, Cancel and Stats, `tune` for SetPolicy too, `admin` for all. A
   SetPolicy or ExpertActivity beyond it is answered by Error, a Calibrate by Done. Without `admin` paths on
   the engine's machine are left out, and Welcome has the model's name; Stats describe the engine and the
   key's own requests alone. What (6) limits and ignores is the key, on all connections, and a Done has
   the engine's counters only of a request that ran alone.

Example
-------
Queued(request=7, position=2) is two frames: tag 15 and version 7, then a map of two.

>>> from protocol.codec import decode, encode
>>> from protocol.messages import Queued
>>> for frame in encode(Queued(request=7, position=2)):
...     print(frame.hex(" "))
0f 07
82 a7 72 65 71 75 65 73 74 07 a8 70 6f 73 69 74 69 6f 6e 02
>>> decode([bytes([15, 7]), bytes.fromhex("82a77265717565737407a8706f736974696f6e02")])
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

from collections.abc import Sequence
from typing import Any

import msgpack

from protocol.checks import DEFAULT, Limits
from protocol.errors import MalformedMessage
from protocol.fields import ArrayType, Buffer, WireType, fields_of, unknown_field
from protocol.messages import TAGS, VERSION


class _Plan:
    """What encoding and decoding one message class needs, derived once from its annotations."""

    def __init__(self, tag: int, message: type) -> None:
        fields = list(fields_of(message))
        self.message = message
        self.name = message.__name__
        self.prefix = bytes([tag, VERSION])
        self.values = [(n, f, required) for n, f, required in fields if isinstance(f, WireType)]
        self.arrays = [(n, f) for n, f, _ in fields if isinstance(f, ArrayType)]
        self.known = {n for n, _, _ in fields}


_BY_TAG = {tag: _Plan(tag, message) for tag, message in TAGS.items()}
_BY_CLASS = {plan.message: plan for plan in _BY_TAG.values()}


def encode(message: object) -> list[bytes | memoryview]:
    """The frames of a message, without any identity frame.

    A memoryview among them is an array's own memory: leave that array unchanged until ZeroMQ has sent it
    (by default it copies at once). Raises MalformedMessage for a value that the receiver would refuse, and
    TypeError for an object that is no message.
    """
    plan = _BY_CLASS.get(type(message))
    if plan is None:
        raise TypeError(f"{type(message).__name__} is not a message")
    header: dict[str, Any] = {}
    frames: list[bytes | memoryview] = [plan.prefix, b""]
    name = ""
    try:
        for name, wire, _ in plan.values:
            header[name] = wire.pack(getattr(message, name), DEFAULT)
        for name, array in plan.arrays:
            header[name], frame = array.pack(getattr(message, name), DEFAULT)
            frames.append(frame)
    except MalformedMessage as e:
        raise MalformedMessage(f"{plan.name}.{name} {e}") from None
    try:
        packed: bytes = msgpack.packb(header)
    except UnicodeEncodeError:
        raise MalformedMessage(f"{plan.name}: a text holds lone surrogates, which are not UTF-8") from None
    if len(packed) > DEFAULT.header:
        raise MalformedMessage(f"{plan.name}: {len(packed)} bytes of header, the limit is {DEFAULT.header}")
    frames[1] = packed
    return frames


def decode(frames: Sequence[Buffer], *, limits: Limits = DEFAULT) -> object:
    """The message in these frames (without any identity frame), of any trusted or untrusted sender.

    Arrays are read-only views of the frames' memory, aligned to their item size. Raises MalformedMessage,
    and nothing else, for anything that is not a message of this version within the limits.
    """
    plan, header = _open(frames, limits)
    given: dict[str, Any] = {}
    name = ""
    try:
        for name, wire, required in plan.values:
            if name in header:
                given[name] = wire.unpack(header[name], limits)
            elif required:
                raise MalformedMessage("is missing")
        for place, (name, array) in enumerate(plan.arrays, 2):
            given[name] = array.unpack(header.get(name), frames[place], limits)
    except MalformedMessage as e:
        raise MalformedMessage(f"{plan.name}.{name} {e}") from None
    if len(given) != len(header):
        raise MalformedMessage(f"{plan.name}: {unknown_field(header, plan.known)}")
    return plan.message(**given)


def outline(frames: Sequence[Buffer]) -> dict[str, int]:
    """The lengths of the lists in a message's header, and its `request`, without making anything of their
    entries: for refusing a message that decoding would take long. Empty for frames that `decode` refuses."""
    header = bytes(frames[1]) if len(frames) > 1 else b""
    found: dict[str, int] = {}
    unpacker = msgpack.Unpacker(max_buffer_size=max(len(header), 1))
    unpacker.feed(header)
    try:
        for _ in range(unpacker.read_map_header()):
            if header[unpacker.tell()] not in _SHORT_STR:
                return {}
            key = unpacker.unpack()
            place = unpacker.tell()
            first = header[place]
            if first in _LIST_LENGTHS:
                found[key] = int.from_bytes(header[place + 1 : place + 1 + _LIST_LENGTHS[first]], "big")
            if key == "request" and (first < 0x80 or 0xCC <= first <= 0xD3):
                found[key] = unpacker.unpack()
            else:
                unpacker.skip()
    except (ValueError, IndexError, msgpack.UnpackException):
        return {}
    return found


_SHORT_STR = {*range(0xA0, 0xC0), 0xD9}  # first bytes of texts that can be a field's name
_LIST_LENGTHS = {0xDC: 2, 0xDD: 4}  # bytes of a list's length, after these first bytes


def wire_version(frames: Sequence[Buffer]) -> int | None:
    """The version in these frames, also another one than ours; None if they have none."""
    first = memoryview(frames[0]) if frames else memoryview(b"")
    return first.tobytes()[1] if first.nbytes == 2 else None


def _open(frames: Sequence[Buffer], limits: Limits) -> tuple[_Plan, dict[str, Any]]:
    """Everything about the frames but the fields' values."""
    version = wire_version(frames)
    if version is None:
        raise MalformedMessage("the first frame is not two bytes, a tag and a version")
    if version != VERSION:
        raise MalformedMessage(f"a message of wire version {version}; this side speaks version {VERSION}")
    plan = _BY_TAG.get(memoryview(frames[0]).tobytes()[0])
    if plan is None:
        raise MalformedMessage(f"unknown tag {memoryview(frames[0]).tobytes()[0]}")
    expected = 2 + len(plan.arrays)
    if len(frames) != expected:
        raise MalformedMessage(f"{plan.name} has {expected} frames, not {len(frames)}")
    packed = memoryview(frames[1])
    if packed.nbytes > limits.header:
        raise MalformedMessage(f"{plan.name}: {packed.nbytes} bytes of header, the limit is {limits.header}")
    containers = _Containers(limits.containers)
    try:
        header = msgpack.unpackb(
            packed,
            object_pairs_hook=containers.map,
            list_hook=containers.list,
            ext_hook=_no_extension,
            max_str_len=limits.header,
            max_bin_len=limits.header,
            max_array_len=limits.items,
            max_map_len=limits.keys,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as e:
        raise MalformedMessage(f"{plan.name}: the header is not plain msgpack ({_one_line(e)})") from None
    if type(header) is not dict:
        raise MalformedMessage(f"{plan.name}: the header is not a map")
    return plan, header


class _Containers:
    """Counts a header's lists and maps while it is unpacked: each costs a receiver far more than its byte.
    msgspec decodes faster, but cannot count them, and takes repeated keys and ext types in a Tree."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._left = most

    def map(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        self._count()
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key appears twice in a map")
        return result

    def list(self, items: list[Any]) -> list[Any]:
        self._count()
        return items

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"more than {self._most} lists and maps")


def _no_extension(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:80] or type(error).__name__
