"""TextStream: the text of all tokens is exactly the whole decoding, cut at the first stop string."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import UNICODE, cut

from pipeline.errors import RequestError
from pipeline.text.detokenizer import (
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    ByteDecoder,
    RunDecoder,
    StopStrings,
)
from pipeline.text.tokenizer import Tokenizer


@settings(deadline=None, max_examples=150)
@given(
    pieces=st.lists(st.text("ab", max_size=5), max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
)
def test_overlapping_stop_strings_end_at_the_first_complete(pieces: list[str], stop: list[str]) -> None:
    stops = StopStrings(stop)
    text = "".join(pieces)
    shown = ""
    for piece in pieces:
        shown += stops.push(piece)
        if stops.found:
            break
        so_far = "".join(pieces)[: len(shown)]
        assert shown == so_far
    else:
        shown += stops.finish()
    assert shown == cut(text, stop)
    assert stops.found == any(word in text for word in stop)


def test_every_short_stop_string_is_found_at_its_first_place() -> None:
    """A stop string whose prefix overlaps itself several times, such as aabaaa, falls back more than once."""
    words = ["".join(letters) for size in range(1, 7) for letters in itertools.product("ab", repeat=size)]
    rng = random.Random(0)
    for word in words:
        texts = [word[:end] + word for end in range(len(word))]
        texts += [word[:end] + word[start:] + word for end in range(len(word)) for start in range(len(word))]
        texts += ["".join(rng.choices("ab", k=12)) for _ in range(8)]
        for text in texts:
            stops = StopStrings([word])
            assert stops.push(text) + stops.finish() == cut(text, [word]), (word, text)
            assert stops.found == (word in text)


@pytest.mark.parametrize(
    ("stop", "pieces", "shown"),
    [
        (["aaabb"], ["aaaa", "baabb"], ["a", "aaabaabb"]),
        (["ab", "b"], ["xab"], ["x"]),
        (["b", "ab"], ["xa", "b"], ["x", ""]),
        (["abc", "b"], ["xab", "c"], ["xa"]),
        (["abcd", "cx"], ["abc", "x"], ["", "ab"]),
    ],
)
def test_held_back_text_is_returned_as_soon_as_it_is_certain(stop, pieces, shown) -> None:
    stops = StopStrings(stop)
    assert [stops.push(piece) for piece in pieces[: len(shown)]] == shown
    assert stops.found == any(word in "".join(pieces) for word in stop)
    if stops.found:
        assert stops.finish() == ""


@settings(deadline=None, max_examples=40)
@given(text=UNICODE, data=st.data())
def test_resumed_stream_continues_as_the_first(tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    """At any point, including within a character or a possible stop string."""
    ids = tokenizer.encode(text) + data.draw(st.lists(st.integers(0, 430), max_size=8))
    whole = tokenizer.decoder.decode(ids)
    places = st.integers(0, max(0, len(whole) - 2))
    words = st.builds(lambda a, n: whole[a : a + n] or "x", places, st.integers(1, 6))
    stop = data.draw(st.lists(words, max_size=2))
    first = tokenizer.decoder.stream(stop)
    shown = [first.push(token) for token in ids]
    rest = first.finish()
    for place in range(len(ids) + 1):
        second = tokenizer.decoder.stream(stop)
        second.resume(ids[:place])
        assert [second.push(token) for token in ids[place:]] == shown[place:]
        assert second.finish() == rest
        assert second.stopped == first.stopped


def test_run_of_byte_tokens_is_decoded_when_it_ends() -> None:
    """One invalid byte makes exactly its whole run invalid."""
    calls: list[list[int]] = []

    def decode(ids: Sequence[int]) -> str:
        calls.append(list(ids))
        return "".join("?" if token >= 256 else "b" for token in ids)

    pieces = RunDecoder(decode, lambda token: token < 256)
    assert [pieces.push(token) for token in (1, 2, 3)] == ["", "", ""]
    assert pieces.push(300) == "bbb?"
    assert calls == [[1, 2, 3, 300]]


def test_incomplete_character_at_the_end_is_one_replacement() -> None:
    pieces = ByteDecoder(lambda token: bytes([token]))
    assert [pieces.push(byte) for byte in "a👩".encode()[:-1]] == ["a", "", "", ""]
    assert pieces.finish() == "\ufffd"
    assert pieces.finish() == ""


def test_invalid_stop_strings_are_refused(tokenizer: Tokenizer) -> None:
    tokenizer.decoder.stream(["x" * MAX_STOP_CHARACTERS] * MAX_STOP_STRINGS)
    for stop in ([""], ["x" * 513], ["x"] * 17):
        with pytest.raises(RequestError, match="allowed"):
            tokenizer.decoder.stream(stop)


@pytest.mark.parametrize("stop", [[], ["\n\nUser:", "</answer>"]], ids=["plain", "stops"])
def test_work_per_token_does_not_grow(tokenizer: Tokenizer, stop: list[str]) -> None:
    ids = tokenizer.encode("the value of the generator naïve 日本 " * 40)[1:]
    stream = tokenizer.decoder.stream(stop)
    parts = []
    for _ in range(6):
        start = time.process_time()
        for _ in range(5):
            for token in ids:
                stream.push(token)
        parts.append((time.process_time() - start) / (5 * len(ids)))
    assert min(parts[3:]) < 3 * max(min(parts[:3]), 1e-6)
    assert min(parts) < 200e-6


def test_self_similar_stop_strings_are_fast() -> None:
    """Long, self-similar stop strings over text that almost matches them."""
    stops = StopStrings(["a" * 511 + "b"] * 16)
    start = time.process_time()
    for _ in range(1000):
        stops.push("aaaa")
    assert time.process_time() - start < 2
