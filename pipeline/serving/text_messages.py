"""Clients' messages with a text: what the text process has to encode of them, and the same messages with
token ids instead. A text that can never be served is refused before it is encoded."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from msgspec.structs import replace

from pipeline.errors import PromptTooLong, RequestError
from pipeline.text.detokenizer import Detokenizer
from protocol.messages import Calibrate, ChatMessage, Encode, Encoded, Generate, Score, Tokenize

TextMessage = Generate | Score | Calibrate | Tokenize


class TextMessages:
    """Of one model. Immutable; used by the event loop."""

    def __init__(self, tokenizer: Detokenizer | None, context: int) -> None:
        """`tokenizer`: for the least length of a text, not to encode; `context`: tokens of prompt and answer
        together."""
        self._tokenizer = tokenizer
        self._context = context

    def to_encode(self, message: TextMessage) -> Encode | None:
        """What has to be encoded, None for a message of token ids. Raises RequestError, one line."""
        match message:
            case Generate():
                given = [message.prompt is not None, message.token_ids is not None]
                if sum(given) + (message.messages is not None) != 1:
                    raise RequestError("give exactly one of prompt, token_ids and messages")
                if message.messages is None:
                    text = self._of_text(message.prompt)
                else:
                    text = self._of_messages(message.messages, message.template)
                if grammar := message.shaping.grammar:
                    self._need_tokenizer("a grammar")
                    text = replace(text or Encode(), grammar=grammar)
                return text
            case Tokenize():
                given = [message.text is not None, message.token_ids is not None]
                if sum(given) + (message.messages is not None) != 1:
                    raise RequestError("give exactly one of text, messages and token_ids")
                self._need_tokenizer("a text")
                if message.messages is not None:
                    return self._of_messages(message.messages, message.template)
                if message.token_ids is not None:
                    return Encode(token_ids=message.token_ids)
                return Encode((message.text or "",))
            case Score() | Calibrate():
                if (message.text is None) == (message.token_ids is None):
                    raise RequestError("give exactly one of text and token_ids")
                if isinstance(message, Score):
                    return self._of_text(message.text)
                return None if message.text is None else self._of_excerpts(message.text, message.starts)

    def _of_messages(self, messages: tuple[ChatMessage, ...], template: str) -> Encode:
        turns = len(messages)
        tokenizer = self._need_tokenizer("messages")
        if turns > self._context:  # each is a token at least
            raise PromptTooLong(f"{turns} turns do not fit the context of {self._context}", turns)
        self._check_length(tokenizer, sum(len(turn.content) for turn in messages))
        return Encode(messages=messages, template=template)

    def _of_text(self, text: str | None) -> Encode | None:
        if text is None:
            return None
        self._check_length(self._need_tokenizer("text"), len(text))
        return Encode((text,))

    def _of_excerpts(self, text: str, starts: tuple[int, ...]) -> Encode:
        places = [0, *starts, len(text)]
        check_starts(places)
        if self._tokenizer is None:
            raise RequestError("a text needs a tokenizer, and this model has none; give token ids")
        return Encode(tuple(text[start:end] for start, end in pairwise(places)))

    def _check_length(self, tokenizer: Detokenizer, characters: int) -> None:
        """Refuse a text far beyond the context before it is encoded, which would delay other texts."""
        least = tokenizer.min_tokens(characters)
        if least > self._context:
            raise PromptTooLong(
                f"the prompt has {characters} characters, at least {least} tokens, the context is"
                f" {self._context}, including the answer; shorten it",
                least,
            )

    def _need_tokenizer(self, what: str) -> Detokenizer:
        if self._tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer, and this model has none; give token ids")
        return self._tokenizer


def check_starts(places: list[int]) -> None:
    """Of excerpts: the first one's, the others', and the text's end. Raises RequestError."""
    if sorted(places) != places:
        raise RequestError("starts must ascend, within the text")


def with_ids(message: Generate | Score | Calibrate, answer: Encoded) -> Generate | Score | Calibrate:
    """The message with the ids of its text."""
    ids = tuple(answer.ids.tolist())
    match message:
        case Generate(token_ids=given) if given is not None:  # only its grammar was checked
            return message
        case Generate():
            return replace(message, prompt=None, messages=None, token_ids=ids)
        case Score():
            return replace(message, text=None, token_ids=ids)
        case Calibrate():
            starts = np.cumsum(answer.lengths[:-1], dtype=np.int64)
            return replace(message, text=None, token_ids=ids, starts=tuple(starts.tolist()))
