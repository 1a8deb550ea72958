"""The codec on everything else: no frames, however made, get anything out of decode but MalformedMessage."""

import math

import msgpack
import numpy as np
import pytest
from equal_values import same
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_messages import messages

from protocol.checks import Limits
from protocol.codec import decode, encode
from protocol.errors import MalformedMessage
from protocol.messages import TAGS, VERSION, Generate, Heartbeat, Partial, StatsReply, Token

some_tag = st.sampled_from(sorted(TAGS)) | st.integers(0, 255)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def attempt(frames, **limits):
    """Decode; what comes out must be a message that can be sent on, or MalformedMessage with one line."""
    line = message = None
    try:
        message = decode(frames, **limits)
    except MalformedMessage as e:
        line = str(e)
    if line is not None:
        assert 0 < len(line) < 300
        assert "\n" not in line
    else:
        assert type(message) in TAGS.values()
        assert same(decode(encode(message)), message)
    return message


@given(st.lists(st.binary(max_size=60), max_size=8))
@settings(max_examples=300, deadline=None)
def test_random_frames(frames):
    attempt(frames)


@given(some_tag, st.binary(max_size=200), st.lists(st.binary(max_size=64), max_size=6))
@settings(max_examples=250, deadline=None)
def test_random_headers_of_real_tags(tag, header, rest):
    attempt([bytes([tag, VERSION]), header, *rest])


@given(st.data())
@settings(max_examples=250, deadline=None)
def test_the_right_fields_with_any_values(data):
    tag = data.draw(st.sampled_from(sorted(TAGS)))
    names = list(TAGS[tag].__dataclass_fields__)
    header = {name: data.draw(plain) for name in names if data.draw(st.booleans())}
    header.update(data.draw(st.dictionaries(st.text(max_size=5), plain, max_size=1)))
    arrays = [b"\0" * data.draw(st.integers(0, 24)) for _ in range(data.draw(st.integers(0, 5)))]
    attempt([bytes([tag, VERSION]), msgpack.packb(header), *arrays])


@given(messages, st.data())
@settings(max_examples=250, deadline=None)
def test_damaged_messages(message, data):
    frames = [bytearray(frame) for frame in encode(message)]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = data.draw(st.sampled_from(frames)) if frames else bytearray()
        match data.draw(st.sampled_from(["flip", "cut", "grow", "drop", "repeat"])):
            case "flip" if frame:
                frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
            case "cut" if frame:
                del frame[data.draw(st.integers(0, len(frame) - 1)) :]
            case "grow":
                frame += data.draw(st.binary(max_size=5))
            case "drop" if frames:
                frames.pop(data.draw(st.integers(0, len(frames) - 1)))
            case "repeat":
                frames.append(frame)
    attempt(frames)


def header_of(message, **changes):
    return msgpack.packb(msgpack.unpackb(encode(message)[1]) | changes)


def framed(message, header, *rest):
    return [bytes(encode(message)[0]), header, *rest]


def changed(message, *rest, **changes):
    """With other values in the header, and these frames after it."""
    return framed(message, header_of(message, **changes), *rest)


TOKEN = Token(1, 2, 3, "x")
PARTIAL = Partial(1, 2, 0.5, np.zeros((2, 3), np.float32))
Y = bytes(24)
REFUSED = {
    "no frames": ([], "the first frame is not two bytes"),
    "one frame": ([b"\x04\x07"], "Token has 2 frames, not 1"),
    "a frame too many": ([*encode(TOKEN), b""], "Token has 2 frames, not 3"),
    "an array missing": (encode(PARTIAL)[:2], "Partial has 3 frames, not 2"),
    "unknown tag": ([b"\xfa\x07", b"\x80"], "unknown tag 250"),
    "another version": ([b"\x04\x01", b"\x80"], "a message of wire version 1; this side speaks version 7"),
    "no msgpack": ([b"\x04\x07", b"\xc1"], "not plain msgpack"),
    "empty header": ([b"\x04\x07", b""], "not plain msgpack"),
    "rest after the header": (framed(TOKEN, header_of(TOKEN) + b"\x00"), "not plain msgpack"),
    "not a map": (framed(TOKEN, b"\x94\x01\x02\x03\xa0"), "Token: the header is not a map"),
    "missing field": (framed(TOKEN, msgpack.packb({"request": 1})), "Token.index is missing"),
    "unknown field": (changed(TOKEN, colour=1), "Token: unknown field 'colour'"),
    "unknown field with a long name": (changed(TOKEN, **{"c" * 99: 1}), f"unknown field '{'c' * 40}'"),
    "bytes as key": (framed(TOKEN, msgpack.packb({b"request": 1})), "Token.request is missing"),
    "repeated key": (framed(Heartbeat(), b"\x82\xa4time\x01\xa4time\x01"), "a key appears twice"),
    "repeated key inside": (
        framed(StatsReply(1, {}), b"\x82\xa7request\x01\xa5stats\x82\xa1a\x01\xa1a\x02"),
        "a key appears twice",
    ),
    "bool for int": (changed(TOKEN, token=True), "Token.token must be int (64 bits, signed), not bool"),
    "float for int": (changed(TOKEN, token=1.0), "not 1.0"),
    "int over 64 bits": (changed(TOKEN, token=2**64 - 1), "not 18446744073709551615"),
    "bool for float": (
        framed(Heartbeat(), b"\x81\xa4time\xc3"),
        "Heartbeat.time must be finite float, not bool",
    ),
    "NaN": (framed(Heartbeat(), b"\x81\xa4time\xcb\x7f\xf8" + bytes(6)), "finite float, not nan"),
    "bytes for str": (changed(TOKEN, text=b"x"), "Token.text must be str, not bytes"),
    "bad UTF-8": (framed(Heartbeat(), b"\x81\xa4tim\xff\x01"), "not plain msgpack"),
    "extension": (framed(Heartbeat(), b"\x81\xa4time\xd4\x05\x00"), "not plain msgpack"),
    "timestamp": (framed(Heartbeat(), b"\x81\xa4time\xd6\xff" + bytes(4)), "not plain msgpack"),
    "empty extension": (framed(Heartbeat(), b"\x81\xa4time\xc7\x00\x05"), "not plain msgpack"),
    "NaN in sampling": (
        changed(Generate(1), sampling={"top_p": float("nan")}),
        "Generate.sampling top_p must be finite float, not nan",
    ),
    "unknown in sampling": (
        changed(Generate(1), sampling={"top_q": 1}),
        "Generate.sampling unknown field 'top_q'",
    ),
    "list for sampling": (
        changed(Generate(1), sampling=[0.5]),
        "Generate.sampling must be map (Sampling), not list",
    ),
    "list for a tree": (changed(StatsReply(1, {}), stats=[1]), "StatsReply.stats must be map, not list"),
    "half a chat message": (
        changed(Generate(1), messages=[{"role": "user"}]),
        "Generate.messages field content is missing",
    ),
    "other dtype": (changed(PARTIAL, Y, y=["float64", 1, 3]), "must be declared as ['float32']"),
    "object dtype": (changed(PARTIAL, Y, y=["O", 1, 3]), "must be declared as ['float32']"),
    "other rank": (changed(PARTIAL, Y, y=["float32", 6]), "and 2 dimensions"),
    "negative dimensions": (changed(PARTIAL, Y, y=["float32", -2, -3]), "impossible dimension -2"),
    "bool as dimension": (changed(PARTIAL, Y, y=["float32", True, 6]), "impossible dimension True"),
    "list as dimension": (changed(PARTIAL, Y, y=["float32", [1], 6]), "impossible dimension list"),
    "too short": (changed(PARTIAL, Y[1:]), "of shape [2, 3] needs 24 bytes, its frame has 23"),
    "too long": (changed(PARTIAL, Y + b"x"), "of shape [2, 3] needs 24 bytes, its frame has 25"),
    "overflow": (changed(PARTIAL, b"", y=["float32", 2**62, 4]), "impossible dimension"),
    "nothing times a lot": (changed(PARTIAL, b"", y=["float32", 0, 2**62]), "impossible dimension"),
}


@pytest.mark.parametrize(("frames", "line"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(frames, line):
    with pytest.raises(MalformedMessage) as caught:
        decode(frames)
    assert line in str(caught.value)
    attempt(frames)


def nested(levels, kind):
    return (b"\x91" if kind == "list" else b"\x81\xa1a") * levels + b"\xc0"


@pytest.mark.parametrize("kind", ["list", "map"])
@pytest.mark.parametrize("levels", [17, 100, 400, 1000, 1024, 5000, 100_000])
def test_deep_nesting(kind, levels):
    stats = b"\x82\xa7request\x01\xa5stats" + nested(levels, kind)
    slots = b"\x81\xa5slots" + nested(levels, kind)
    shape = b"\x84\xa3seq\x01\xabincarnation\x01\xa4busy\x01\xa1y\x93\xa7float32\x01" + nested(levels, kind)
    for frames in ([b"\x0a\x07", stats], [b"\x27\x07", slots], [b"\x22\x07", shape, b""]):
        assert attempt(frames) is None


@pytest.mark.parametrize("container", [b"\x80", b"\x90"], ids=["maps", "lists"])
def test_a_list_of_very_many_containers_is_refused_before_most_are_made(container):
    """A byte each in the header, but making them all would block the receiver for more than a second."""
    count = 800_000
    header = b"\x82\xa7request\x01\xa5stats\x81\xa1a\xdd" + count.to_bytes(4, "big") + container * count
    with pytest.raises(MalformedMessage, match="more than 16384 lists and maps"):
        decode([b"\x0a\x07", header])
    few = b"\x82\xa7request\x01\xa5stats\x81\xa1a\xdd" + (9000).to_bytes(4, "big") + container * 9000
    assert len(decode([b"\x0a\x07", few]).stats["a"]) == 9000


def test_sixteen_levels_are_accepted():
    stats = {}
    for _ in range(15):
        stats = {"a": stats}
    assert attempt(encode(StatsReply(1, stats))) == StatsReply(1, stats)
    with pytest.raises(MalformedMessage, match="deeper than 16"):
        encode(StatsReply(1, {"a": stats}))


def test_nan_in_a_tree_arrives_as_nan():
    """Hypothesis hardly ever puts NaN into a message that is valid otherwise."""
    reply = StatsReply(1, {"a": math.nan, "b": [1.0, {"c": math.nan}]})
    assert same(attempt(encode(reply)), reply)
    assert not same(StatsReply(1, {"a": 0.0}), StatsReply(1, {"a": math.nan}))


def test_limits():
    small = Limits(header=60, frame=100, items=3, keys=3, depth=2)
    over = {
        "bytes of header": [encode(Heartbeat())[0], b"\x81\xa4time" + bytes(60)],
        "needs 104 bytes": changed(PARTIAL, bytes(104), y=["float32", 2, 13]),
        "max_array_len": framed(Generate(1), msgpack.packb({"request": 1, "token_ids": [1, 2, 3, 4]})),
        "max_map_len": framed(StatsReply(1, {}), msgpack.packb(dict.fromkeys("abcd"))),
        "deeper than 2": encode(StatsReply(1, {"a": {"b": {}}})),
    }
    for line, frames in over.items():
        with pytest.raises(MalformedMessage) as caught:
            decode(frames, limits=Limits(header=99, frame=100, items=3, keys=8) if "needs" in line else small)
        assert line in str(caught.value)


@pytest.mark.parametrize(
    ("message", "limit", "exactly"),
    [
        (Heartbeat(), "header", 15),
        (PARTIAL, "frame", 24),
        (Generate(1, token_ids=(1, 2, 3)), "items", 3),
        (StatsReply(1, {"a": [1, 2, 3]}), "items", 3),
        (StatsReply(1, {"a": 1, "b": 2, "c": 3}), "keys", 3),
        (StatsReply(1, {"a": [1, {"b": 1}]}), "containers", 4),
        (StatsReply(1, {"a": [1, {"b": 1}]}), "depth", 3),
    ],
)
def test_each_limit_is_the_most_that_is_accepted(message, limit, exactly):
    assert same(decode(encode(message), limits=Limits(**{limit: exactly})), message)
    with pytest.raises(MalformedMessage):
        decode(encode(message), limits=Limits(**{limit: exactly - 1}))


@pytest.mark.parametrize("claim", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"])
def test_a_claim_of_four_gigabytes_allocates_nothing(claim):
    with pytest.raises(MalformedMessage, match="not plain msgpack"):
        decode([b"\x0d\x07", b"\x81\xa4time" + claim])
