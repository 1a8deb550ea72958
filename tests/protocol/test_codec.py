"""The codec on valid messages: round trips, the documented bytes, what a sender may not send."""

import doctest

import numpy as np
import pytest
import zmq
from equal_values import same
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_messages import messages, records

import protocol.codec
from protocol.codec import decode, encode, wire_version
from protocol.errors import MalformedMessage
from protocol.messages import (
    HEADER_LIMIT,
    TAGS,
    TREE_LIMIT,
    VERSION,
    Calibrate,
    ChatMessage,
    Fetch,
    Generate,
    Heartbeat,
    Partial,
    Sampling,
    StatsReply,
    Token,
    Work,
)


def decode_size_work(hidden=256):
    return Work(
        np.arange(65, dtype=np.int32), np.linspace(-1, 1, hidden, dtype=np.float32).reshape(1, hidden)
    )


@pytest.mark.parametrize("message", TAGS.values(), ids=lambda c: c.__name__)
@given(data=st.data())
@settings(max_examples=25)
def test_every_message_survives_the_round_trip(message, data):
    sent = data.draw(records(message))
    frames = encode(sent)
    assert frames[0] == bytes([{c: t for t, c in TAGS.items()}[message], VERSION])
    assert same(decode(frames), sent)
    assert same(decode([bytearray(frame) for frame in frames]), sent)


@given(messages)
@settings(max_examples=50)
def test_messages_survive_real_sockets(sent):
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://codec")
        other.connect("inproc://codec")
        one.send_multipart(encode(sent), copy=False)
        received = decode(other.recv_multipart(copy=False))
    assert same(received, sent)


def test_arrays_arrive_read_only_aligned_and_without_a_copy():
    frames = [bytes(frame) for frame in encode(decode_size_work(4096))]
    work = decode(frames)
    assert work.x.base is not None
    assert np.shares_memory(work.x, np.frombuffer(frames[-1], np.float32))
    with pytest.raises(ValueError, match="read-only"):
        work.x[0, 0] = 1
    frames[-1] = memoryview(b"?" + frames[-1])[1:]  # one byte off
    shifted = decode(frames).x
    assert shifted.flags.aligned
    assert not shifted.flags.writeable
    assert same(shifted, work.x)
    with pytest.raises(ValueError, match="read-only"):
        decode([bytearray(frame) for frame in frames]).x[0, 0] = 1


def test_strided_arrays_are_sent_in_c_order():
    y = np.arange(4096 * 6, dtype=np.float32).reshape(4096, 6)
    assert same(decode(encode(Partial(1, 1, 0.5, y.T))).y, np.ascontiguousarray(y.T))
    assert same(decode(encode(Partial(1, 1, 0.5, y[::2, 1:3]))).y, y[::2, 1:3].copy())


def test_large_arrays_are_sent_without_a_copy():
    y = np.zeros((64, 256), np.float32)
    assert np.shares_memory(np.frombuffer(encode(Partial(1, 1, 0.5, y))[2], np.float32), y)


def test_documented_examples():
    result = doctest.testmod(protocol.codec)
    assert result.attempted >= 8
    assert result.failed == 0


def test_the_documented_version_and_types_are_those_of_the_messages():
    assert f"wire format, version {VERSION}." in protocol.codec.__doc__
    assert f"at most {HEADER_LIMIT >> 20} MiB, {TREE_LIMIT >> 10} KiB with a Tree" in protocol.codec.__doc__


GOLDEN = [
    (Heartbeat(1.5), "0d0f 81a474696d65cb3ff8000000000000"),
    (
        Fetch(300, 2, 7, lo=1, slots=(5, 70000), urgency=1, channels=np.array([3, 258], np.int32)),
        "270f 87a26964cd012ca56c6179657202a665787065727407a26c6f01a5736c6f74739205ce00011170a7757267656e63"
        "7901a86368616e6e656c7392a5696e74333202 0300000002010000",
    ),
    (
        Generate(0, messages=(ChatMessage("user", "é"),), max_tokens=-1, sampling=Sampling(seed=-(2**63))),
        "030f de0011a77265717565737400a670726f6d7074c0a9746f6b656e5f696473c0a86d657373616765739183a4726f6c65a"
        "475736572a7636f6e74656e74a2c3a9a56578747261a0aa6d61785f746f6b656e73ffa873616d706c696e6786ab74656"
        "d7065726174757265cb0000000000000000a5746f705f6b00a5746f705f70cb3ff0000000000000a56d696e5f70cb000"
        "0000000000000b272657065746974696f6e5f70656e616c7479cb3ff0000000000000a473656564d3800000000000000"
        "0a473746f7090aa69676e6f72655f656f73c2a57265757365c3a6726573756d6590a5726976616cffa"
        "77265736572766501a773686170696e6784b070726573656e63655f70656e616c7479cb0000000000000000b16672657"
        "175656e63795f70656e616c7479cb0000000000000000a46269617390a76772616d6d6172a0a86c6f6770726f6273ffa"
        "874656d706c617465a0a56d61726b73c2a7636f756e746564c3",
    ),
    (
        Partial(1, 2, 0.25, np.array([[1.0, -2.0]], np.float32), 3.5, 0.5, 7, 16),
        "220f 88a373657101aa67656e65726174696f6e02a462757379cb3fd0000000000000a17993a7666c6f617433320102"
        "a46d617373cb400c000000000000a46c656674cb3fe0000000000000a46b65707407a86368616e6e656c7310 "
        "0000803f000000c0",
    ),
    (
        Calibrate(3, text="é", tokens=300),
        "100f 85a77265717565737403a474657874a2c3a9a9746f6b656e5f696473c0a6746f6b656e73cd012c"
        "a86d61785f6c6f7373c0",
    ),
]


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=lambda v: type(v).__name__)
def test_the_bytes_on_the_wire_do_not_change(message, golden):
    assert " ".join(bytes(frame).hex() for frame in encode(message)) == golden
    assert same(decode([bytes.fromhex(part) for part in golden.split()]), message)


def test_a_missing_field_takes_its_default_and_integers_serve_as_floats():
    assert decode([bytes([13, VERSION]), bytes.fromhex("80")]) == Heartbeat(0.0)
    time_is_an_integer = decode([bytes([13, VERSION]), bytes.fromhex("81a474696d6505")])
    assert time_is_an_integer == Heartbeat(5.0)
    assert type(time_is_an_integer.time) is float
    assert decode(encode(Heartbeat(2**63 - 1))) == Heartbeat(2.0**63)


WRONG = [
    (Token(1, 2, True, ""), "Token: Expected `int`, got `bool` - at `$.token`"),
    (Token(1, 2, 2**63, ""), "Token: Expected `int` <= 9223372036854775807 - at `$.token`"),
    (Heartbeat(float("-inf")), "Heartbeat: Expected `float` >= -1.7976931348623157e+308 - at `$.time`"),
    (StatsReply(1, {"a": 2**63}), "StatsReply.stats holds an integer of more than 64 bits"),
    (Token(1, 2, np.int64(3), ""), "Token: int64 has no bytes"),
    (Token(1, 2, 3, "\ud800"), "surrogates not allowed"),
    (Generate(1, sampling=Sampling(float("nan"))), "- at `$.sampling.temperature`"),
    (StatsReply(1, {1: 2}), "StatsReply: Expected `str`, got `int` - at `key` in `$.stats`"),
    (StatsReply(1, {"a": np.float32(1)}), "StatsReply: float32 has no bytes"),
    (StatsReply(1, {"a": np.zeros(1, np.float32)}), "Expected `no array[0d]`, got `float32[1d]`"),
    (Partial(1, 2, 0.5, np.zeros((2, 3))), "Partial: Expected `float32[2d]`, got `float64[2d]`"),
    (Partial(1, 2, 0.5, np.zeros(3, np.float32)), "Partial: Expected `float32[2d]`, got `float32[1d]`"),
    (Partial(1, 2, 0.5, [[1.0]]), "Partial has 3 frames, not 2"),
    (
        Partial(1, 2, 0.5, np.empty((8193, 8192), np.float32)),
        "Partial: An array of 268468224 bytes, the limit is 268435456",
    ),
]


@pytest.mark.parametrize(("message", "line"), WRONG, ids=range(len(WRONG)))
def test_encoding_an_invalid_value_raises_with_its_reason(message, line):
    with pytest.raises(MalformedMessage) as caught:
        encode(message)
    assert line in str(caught.value)


def test_a_tree_that_contains_itself_is_refused():
    stats = {}
    stats["again"] = stats
    with pytest.raises(MalformedMessage, match="StatsReply: maximum recursion depth"):
        encode(StatsReply(1, stats))


def test_encoding_another_object_is_a_type_error():
    with pytest.raises(TypeError, match="dict is not a message"):
        encode({})


def test_the_version_can_be_read_from_any_version():
    assert wire_version([b"\x01\x07", b"whatever that may be"]) == 7
    assert wire_version([b"\x01"]) is None
    assert wire_version([]) is None
