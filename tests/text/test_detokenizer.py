"""TextStream: the text of all tokens is exactly the whole decoding, cut at the first stop string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import UNICODE, cut

from pipeline.errors import RequestError
from pipeline.text.detokenizer import (
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    StopStrings,
)
from pipeline.text.tokenizer import Tokenizer


@settings(max_examples=150)
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


@settings(max_examples=40)
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


def test_invalid_stop_strings_are_refused(tokenizer: Tokenizer) -> None:
    tokenizer.decoder.stream(["x" * MAX_STOP_CHARACTERS] * MAX_STOP_STRINGS)
    for stop in ([""], ["x" * 513], ["x"] * 17):
        with pytest.raises(RequestError, match="allowed"):
            tokenizer.decoder.stream(stop)
