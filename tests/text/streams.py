"""The check that every TextStream passes, and texts for it."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from pipeline.text.tokenizer import Tokenizer
from protocol.messages import ChatMessage

UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    ["  two  spaces ", "👩‍👩‍👧‍👦 family", "é́́", "naïve €uro 日本語", "a\n\n\tb ", "🇩🇪🇫🇷", " "]
)


def rendered(tokenizer: Tokenizer, messages: Sequence[ChatMessage]) -> list[int]:
    """Returns the ids of a conversation, as the text process makes them."""
    return tokenizer.encode_prompt(tokenizer.prompt(messages))


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first complete stop string, the longest of those that end together."""
    ends = [
        (place + len(word), -len(word))
        for word in stop
        for place in range(len(text))
        if text.startswith(word, place)
    ]
    if not ends:
        return text
    end, length = min(ends)
    return text[: end + length]


def check(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str]) -> None:
    whole = tokenizer.decoder.decode(ids)
    wanted = cut(whole, stop)
    stream = tokenizer.decoder.stream(stop)
    shown = ""
    for token in ids:
        text = stream.push(token)
        shown += text
        assert wanted.startswith(shown), "a later token changed text that was returned"
    shown += stream.finish()
    assert shown == wanted
    assert stream.stopped == any(word in whole for word in stop)
    assert stream.finish() == ""
