"""Hostile frames: reproducible from the seed, of every kind."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from launch.stress.hostile import KINDS, MUTATIONS, HostileFrames
from protocol.codec import decode
from protocol.errors import MalformedMessage
from protocol.messages import TAGS


@given(st.integers(0, 2**64))
@settings(max_examples=40, deadline=None)
def test_frames_decode_or_are_refused_as_malformed(seed: int) -> None:
    for message in islice(HostileFrames(seed), 100):
        assert message.frames
        try:
            assert type(decode(message.frames)) in TAGS.values()
        except MalformedMessage:
            assert message.kind not in ("valid", "replay")


def test_stream_follows_from_the_seed() -> None:
    first, again, other = ([s.frames for s in islice(HostileFrames(n), 2000)] for n in (5, 5, 6))
    assert first == again
    assert first != other


def test_stream_has_every_kind_and_message() -> None:
    messages = list(islice(HostileFrames(0), 20_000))
    kinds = Counter(message.kind for message in messages)
    assert set(kinds) == set(KINDS)
    valid = [message.frames for message in messages if message.kind == "valid"]
    assert {frames[0][0] for frames in valid} == set(TAGS)
    replayed = [message.frames for message in messages if message.kind == "replay"]
    assert len({tuple(frames) for frames in replayed}) < len(replayed)
    refused = Counter(message.kind for message in messages if not is_message(message.frames))
    for kind in MUTATIONS:
        assert refused[kind] > 0.5 * kinds[kind]
    assert max(sum(map(len, message.frames)) for message in messages) > 4 << 20


def is_message(frames: list[bytes]) -> bool:
    try:
        decode(frames)
    except MalformedMessage:
        return False
    return True
