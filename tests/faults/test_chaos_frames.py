"""Hostile frames: reproducible from the seed, of every kind."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from launch.stress.hostile import KINDS, MUTATIONS, hostile_messages
from protocol.codec import decode
from protocol.errors import MalformedMessage
from protocol.messages import TAGS


@given(st.integers(0, 2**64))
@settings(max_examples=40)
def test_frames_decode_or_are_refused_as_malformed(seed: int) -> None:
    for kind, frames in islice(hostile_messages(seed), 100):
        assert frames
        try:
            assert type(decode(frames)) in TAGS.values()
        except MalformedMessage:
            assert kind not in ("valid", "replay")


def test_stream_follows_from_the_seed() -> None:
    first, again, other = (list(islice(hostile_messages(seed), 2000)) for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_stream_has_every_kind_and_message() -> None:
    messages = list(islice(hostile_messages(0), 20_000))
    kinds = Counter(kind for kind, _ in messages)
    assert set(kinds) == set(KINDS)
    assert {frames[0][0] for kind, frames in messages if kind == "valid"} == set(TAGS)
    replayed = [frames for kind, frames in messages if kind == "replay"]
    assert len(set(map(tuple, replayed))) < len(replayed)
    refused = Counter(kind for kind, frames in messages if not is_message(frames))
    for kind in MUTATIONS:
        assert refused[kind] > 0.5 * kinds[kind]
    valid = next(frames for kind, frames in messages if kind == "valid")
    huge = [MUTATIONS["huge"](Random(draw), valid) for draw in range(200)]
    assert max(sum(map(len, frames)) for frames in huge) > 4 << 20


def is_message(frames: list[bytes]) -> bool:
    try:
        decode(frames)
    except MalformedMessage:
        return False
    return True
