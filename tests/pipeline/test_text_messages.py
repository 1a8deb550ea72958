"""What is encoded of clients' messages, and what is refused before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.errors import PromptTooLong, RequestError
from pipeline.serving.text_messages import TextMessages, with_ids
from protocol.messages import Calibrate, ChatMessage, Encode, Encoded, Generate, Score

CONTEXT = 20
TURN = ChatMessage("user", "x")
IDS = (1, 2)


class Estimate:
    """A tokenizer that is asked only for the least number of tokens: one for ten characters."""

    def __init__(self, least: int | None = None) -> None:
        self._least = least

    def min_tokens(self, characters: int) -> int:
        return characters // 10 if self._least is None else self._least


def asked(message: Any, tokenizer: Any = None) -> Encode | None:
    return TextMessages(tokenizer or Estimate(), CONTEXT).to_encode(message)


def answer(*lengths: int) -> Encoded:
    return Encoded(np.arange(sum(lengths), dtype=np.int32), lengths)


@pytest.mark.parametrize(
    ("message", "job", "found", "ids"),
    [
        (Generate(1, prompt="ab"), Encode(("ab",)), answer(2), Generate(1, token_ids=(0, 1))),
        (Generate(1, messages=(TURN,)), Encode((), (TURN,)), answer(3), Generate(1, token_ids=(0, 1, 2))),
        (Generate(1, messages=()), Encode((), ()), answer(0), Generate(1, token_ids=())),
        (Score(1, text=""), Encode(("",)), answer(1), Score(1, token_ids=(0,))),
        (
            Calibrate(1, text="abcdef", starts=(2, 5)),
            Encode(("ab", "cde", "f")),
            answer(4, 1, 2),
            Calibrate(1, token_ids=tuple(range(7)), starts=(4, 5)),
        ),
    ],
)
def test_texts_are_replaced_by_their_ids(message, job, found, ids) -> None:
    assert asked(message) == job
    assert with_ids(message, found) == ids
    assert asked(ids) is None


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Generate(1), "give exactly one of prompt, token_ids and messages"),
        (Generate(1, prompt="a", messages=(TURN,)), "give exactly one of prompt, token_ids and messages"),
        (Generate(1, prompt="a", token_ids=IDS), "give exactly one of prompt, token_ids and messages"),
        (Score(1), "give exactly one of text and token_ids"),
        (Score(1, text="a", token_ids=IDS), "give exactly one of text and token_ids"),
        (Calibrate(1), "give exactly one of text and token_ids"),
        (Calibrate(1, text="abc", starts=(2, 1)), "starts must ascend, within the text"),
        (Calibrate(1, text="abc", starts=(4,)), "starts must ascend, within the text"),
        (Calibrate(1, text="abc", starts=(-1,)), "starts must ascend, within the text"),
    ],
)
def test_messages_that_are_never_encoded(message, reason: str) -> None:
    with pytest.raises(RequestError, match=f"^{reason}$"):
        asked(message)


@pytest.mark.parametrize(
    ("message", "length", "reason"),
    [
        (
            Generate(1, prompt="x" * 210),
            21,
            "the prompt has 210 characters, at least 21 tokens, the context is",
        ),
        (
            Score(1, text="x" * 210),
            21,
            "the prompt has 210 characters, at least 21 tokens, the context is 20",
        ),
        (
            Generate(1, messages=(ChatMessage("user", "x" * 100), ChatMessage("user", "x" * 110))),
            21,
            "the prompt has 210 characters, at least 21 tokens, the context is 20, including the answer",
        ),
        (Generate(1, messages=(TURN,) * 21), 21, "21 turns do not fit the context of 20"),
    ],
)
def test_text_far_beyond_the_context_is_refused_before_it_is_encoded(message, length, reason) -> None:
    with pytest.raises(PromptTooLong, match=f"^{reason}") as refused:
        asked(message)
    assert refused.value.tokens == length
    if "turns" not in reason:
        assert asked(message, Estimate(CONTEXT)) is not None  # it may just fit


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (Generate(1, prompt="a"), "text"),
        (Generate(1, messages=(TURN,)), "messages"),
        (Score(1, text="a"), "text"),
        (Calibrate(1, text="a"), "a text"),
    ],
)
def test_model_without_tokenizer_takes_ids_alone(message, what: str) -> None:
    texts = TextMessages(None, CONTEXT)
    reason = f"^{what} needs a tokenizer, and this model has none; give token ids$"
    with pytest.raises(RequestError, match=reason):
        texts.to_encode(message)
    assert texts.to_encode(Generate(1, token_ids=IDS)) is None
