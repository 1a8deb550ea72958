"""Words at the right edge of a terminal, on a screen that does what a terminal does."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from launch.chat.words import ERASE, WordWrap

WIDTH = 12


def screen(pieces: list[str], width: int = WIDTH) -> list[str]:
    """What a terminal shows of an answer that arrives in these pieces."""
    words, lines = WordWrap(), [""]
    for piece in pieces:
        for codes, text in words.feed(piece, width):
            back = codes.count("\b")
            assert codes in ("", "\b" * back + ERASE + "\n")
            if codes:
                assert back <= len(lines[-1])
                lines[-1] = lines[-1][: len(lines[-1]) - back]
                lines.append("")
            for character in text:
                if character == "\n" or len(lines[-1]) == width:
                    lines.append("")
                lines[-1] += character.strip("\n")
    return [line.rstrip() for line in lines]


def test_a_word_that_does_not_fit_moves_to_the_next_line() -> None:
    for pieces in (["It is the one that fits."], ["It i", "s t", "he on", "e th", "at fits."]):
        assert screen(pieces) == ["It is the", "one that", "fits."]
    assert screen(["a " + "x" * 30, "y b"]) == ["a xxxxxxxxxx", "x" * 12, "xxxxxxxxy b"]
    code = "```\nlong = other(one)\n```\nwords as before"
    assert screen(list(code)) == ["```", "long = other", "(one)", "```", "words as", "before"]


@given(st.text("ab \n", max_size=80), st.sets(st.integers(0, 80)))
def test_nothing_is_lost_and_short_words_stay_whole(text: str, cuts: set[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(places)]
    lines = screen(pieces)
    assert "".join("".join(lines).split()) == "".join(text.split())
    short = [word for word in text.split() if len(word) < WIDTH]
    shown = " ".join(lines).split()
    if len(short) == len(text.split()):
        assert shown == short
