"""The codec on everything else: no frames, however made, get anything out of decode but MalformedMessage."""

import math
import resource

import numpy as np
import pytest
from equal_values import same
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import msgpack
from protocol_messages import messages

from protocol.codec import decode, encode
from protocol.errors import MalformedMessage
from protocol.messages import (
    HEADER_LIMIT,
    TAGS,
    TREE_LIMIT,
    VERSION,
    ChatMessage,
    Generate,
    Heartbeat,
    Partial,
    StatsReply,
    Token,
)

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


def attempt(frames):
    """Decode; what comes out must be a message that can be sent on, or MalformedMessage with one line."""
    line = message = None
    try:
        message = decode(frames)
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
@settings(max_examples=300)
def test_random_frames(frames):
    attempt(frames)


@given(some_tag, st.binary(max_size=200), st.lists(st.binary(max_size=64), max_size=6))
@settings(max_examples=250)
def test_random_headers_of_real_tags(tag, header, rest):
    attempt([bytes([tag, VERSION]), header, *rest])


@given(st.data())
@settings(max_examples=250)
def test_the_right_fields_with_any_values(data):
    tag = data.draw(st.sampled_from(sorted(TAGS)))
    names = TAGS[tag].__struct_fields__
    header = {name: data.draw(plain) for name in names if data.draw(st.booleans())}
    header.update(data.draw(st.dictionaries(st.text(max_size=5), plain, max_size=1)))
    arrays = [b"\0" * data.draw(st.integers(0, 24)) for _ in range(data.draw(st.integers(0, 5)))]
    attempt([bytes([tag, VERSION]), msgpack.encode(header), *arrays])


@given(messages, st.data())
@settings(max_examples=250)
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
    return msgpack.encode(msgpack.decode(encode(message)[1]) | changes)


def framed(message, header, *rest):
    return [bytes(encode(message)[0]), header, *rest]


def changed(message, *rest, **changes):
    """With other values in the header, and these frames after it."""
    return framed(message, header_of(message, **changes), *rest)


def changed_text(text):
    return framed(TOKEN, header_of(TOKEN, text="?" * len(text)).replace(b"?" * len(text), text))


TOKEN = Token(1, 2, 3, "x")
PARTIAL = Partial(1, 2, 0.5, np.zeros((2, 3), np.float32))
Y = bytes(24)
TREE = b"\x82\xa7request\x01\xa5stats\x81\xa1a"  # a StatsReply's header, before the value of stats["a"]
REFUSED = {
    "no frames": ([], "the first frame is not two bytes"),
    "one frame": ([b"\x04\x0f"], "Token has 2 frames, not 1"),
    "a frame too many": ([*encode(TOKEN), b""], "Token has 2 frames, not 3"),
    "an array missing": (encode(PARTIAL)[:2], "Partial has 3 frames, not 2"),
    "unknown tag": ([b"\xfa\x0f", b"\x80"], "unknown tag 250"),
    "another version": ([b"\x04\x01", b"\x80"], "a message of wire version 1; this side speaks version 15"),
    "no msgpack": ([b"\x04\x0f", b"\xc1"], "Token: MessagePack data is malformed"),
    "empty header": ([b"\x04\x0f", b""], "Token: Input data was truncated"),
    "rest after the header": (framed(TOKEN, header_of(TOKEN) + b"\x00"), "malformed: trailing characters"),
    "not a map": (framed(TOKEN, b"\x94\x01\x02\x03\xa0"), "Token: Expected `object`, got `array`"),
    "missing field": (
        framed(TOKEN, msgpack.encode({"request": 1})),
        "Token: Object missing required field",
    ),
    "unknown field": (changed(TOKEN, colour=1), "Token: Object contains unknown field `colour`"),
    "repeated array": (
        framed(
            PARTIAL,
            b"\x85\xa3seq\x01\xaageneration\x01\xa4busy\x01" + 2 * b"\xa1y\x93\xa7float32\x02\x03",
            Y,
        ),
        "Partial: An array twice",
    ),
    "bool for int": (changed(TOKEN, token=True), "Token: Expected `int`, got `bool` - at `$.token`"),
    "NaN": (
        framed(Heartbeat(), b"\x81\xa4time\xcb\x7f\xf8" + bytes(6)),
        "Heartbeat: Expected `float` >= -1.797",
    ),
    "bad UTF-8": (framed(Heartbeat(), b"\x81\xa4tim\xff\x01"), "utf-8"),
    "extension": (framed(Heartbeat(), b"\x81\xa4time\xd4\x05\x00"), "got `ext`"),
    "extension in a tree": (
        changed(StatsReply(1, {}), stats={"a": msgpack.Ext(5, b"")}),
        "holds a Ext",
    ),
    "time in a tree": (
        framed(StatsReply(1, {}), TREE + b"\xd6\xff" + bytes(4)),
        "stats holds a datetime",
    ),
    "bytes in a tree": (changed(StatsReply(1, {}), stats={"a": b""}), "StatsReply.stats holds a bytes"),
    "number as key in a tree": (
        changed(StatsReply(1, {}), stats={"a": {1: 2}}),
        "StatsReply.stats has a key that is no text",
    ),
    "int over 64 bits in a tree": (
        changed(StatsReply(1, {}), stats={"a": 2**63}),
        "more than 64 bits",
    ),
    "other dtype": (changed(PARTIAL, Y, y=["float64", 1, 3]), "Must be declared as ['float32']"),
    "other rank": (changed(PARTIAL, Y, y=["float32", 6]), "and 2 dimensions"),
    "negative dimensions": (changed(PARTIAL, Y, y=["float32", -2, -3]), "impossible dimension"),
    "bool as dimension": (changed(PARTIAL, Y, y=["float32", True, 6]), "impossible dimension"),
    "too short": (changed(PARTIAL, Y[1:]), "Of shape [2, 3], which needs 24 bytes; its frame has 23"),
    "too long": (changed(PARTIAL, Y + b"x"), "Of shape [2, 3], which needs 24 bytes; its frame has 25"),
    "overflow": (changed(PARTIAL, b"", y=["float32", 2**62, 4]), "impossible dimension"),
    "nothing times a lot": (changed(PARTIAL, b"", y=["float32", 0, 2**62]), "impossible dimension"),
}


@pytest.mark.parametrize(("frames", "line"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(frames, line):
    with pytest.raises(MalformedMessage) as caught:
        decode(frames)
    assert line.lower() in str(caught.value).lower()  # msgspec's versions differ
    attempt(frames)


def nested(levels, kind):
    return (b"\x91" if kind == "list" else b"\x81\xa1a") * levels + b"\xc0"


@pytest.mark.parametrize("kind", ["list", "map"])
@pytest.mark.parametrize("levels", [17, 100, 400, 1000, 1024, 5000, 100_000])
def test_deep_nesting(kind, levels):
    stats = b"\x82\xa7request\x01\xa5stats" + nested(levels, kind)
    slots = b"\x81\xa5slots" + nested(levels, kind)
    shape = b"\x84\xa3seq\x01\xaageneration\x01\xa4busy\x01\xa1y\x93\xa7float32\x01" + nested(levels, kind)
    for frames in ([b"\x0a\x0f", stats], [b"\x27\x0f", slots], [b"\x22\x0f", shape, b""]):
        assert attempt(frames) is None


@pytest.mark.parametrize("container", [b"\x80", b"\x90"], ids=["maps", "lists"])
def test_very_many_containers_are_refused_before_any_is_made(container):
    """A byte each in the header, and 50 to 100 in memory."""
    count = 800_000
    with pytest.raises(MalformedMessage, match=f"bytes of header, the limit is {TREE_LIMIT}"):
        decode([b"\x0a\x0f", TREE + b"\xdd" + count.to_bytes(4, "big") + container * count])
    few = TREE + b"\xdd" + (9000).to_bytes(4, "big") + container * 9000
    assert len(decode([b"\x0a\x0f", few]).stats["a"]) == 9000
    turns = Generate(1, messages=(ChatMessage("", ""),) * (1 << 14))
    assert decode(encode(turns)) == turns
    with pytest.raises(MalformedMessage, match=r"of length <= 16384 - at `\$.messages`"):
        encode(Generate(1, messages=(ChatMessage("", ""),) * ((1 << 14) + 1)))


@pytest.mark.parametrize("stats", [{}, {"a": 1}])
def test_of_a_repeated_key_the_last_value_holds(stats):
    last = msgpack.encode(stats)
    header = b"\x83\xa7request\x01\xa5stats\x82\xa1a\x01\xa1a\x02\xa5stats" + last
    assert attempt([b"\x0a\x0f", header]) == StatsReply(1, stats)


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


def test_each_limit_is_the_most_that_is_accepted():
    longest = HEADER_LIMIT - len(encode(Token(1, 2, 3, ""))[1]) - 4  # of the text's length
    long = Token(1, 2, 3, "x" * longest)
    assert decode(encode(long)) == long
    ids = Generate(1, token_ids=(1,) * (1 << 20))
    assert decode(encode(ids)) == ids
    for message in (
        Token(1, 2, 3, "x" * (longest + 1)),
        Generate(1, token_ids=(1,) * ((1 << 20) + 1)),
        StatsReply(1, {"a": "x" * TREE_LIMIT}),
    ):
        with pytest.raises(MalformedMessage, match=r"the limit is|of length <="):
            encode(message)
    with pytest.raises(MalformedMessage, match="needs 268435460 bytes"):
        decode(changed(PARTIAL, Y, y=["float32", 1, (1 << 26) + 1]))


@pytest.mark.parametrize("claim", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"])
@pytest.mark.parametrize("field", [b"\x0d\x0f\x81\xa4time", b"\x27\x0f\x81\xa5slots", b"\x0a\x0f" + TREE])
def test_a_claim_of_four_gigabytes_allocates_nothing(field, claim):
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + (1 << 28), before[1]))
    try:
        assert attempt([field[:2], field[2:] + claim]) is None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def address_space():
    """Returns the bytes of address space that this process has reserved."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
