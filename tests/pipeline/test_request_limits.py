"""What a request may hold: each excess is refused in one line, a list above the context undecoded."""

from __future__ import annotations

import time

import pytest

from pipeline.serving.request_limits import OPTION_LIMIT, ROLE_LIMIT, RequestReader, RequestRefused
from protocol.codec import decode, encode, outline
from protocol.errors import MalformedMessage
from protocol.messages import Calibrate, ChatMessage, Done, Error, Generate, Score, SetPolicy

CONTEXT = 4096
READ = RequestReader(CONTEXT)
CHAT = Generate(3, messages=(ChatMessage("user", "x"), ChatMessage("r" * ROLE_LIMIT, "y" * 100_000)))


def frames(message: object) -> list[bytes]:
    return [bytes(frame) for frame in encode(message)]


@pytest.mark.parametrize(
    "message",
    [
        CHAT,
        Generate(3, token_ids=(1,) * CONTEXT, resume=(2,) * CONTEXT),
        Generate(3, token_ids=(1 << 40,) * CONTEXT),
        Score(3, text="x" * 100_000),
        Calibrate(3, token_ids=(1,) * 100_000, starts=(1, 2)),
        SetPolicy(3, "p", {"n" * OPTION_LIMIT: "v" * OPTION_LIMIT, "b": 1.5}),
    ],
)
def test_request_within_the_limits_is_read(message: object) -> None:
    assert READ(frames(message)) == message


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            Generate(3, messages=(ChatMessage("r" * (ROLE_LIMIT + 1), "x"),)),
            "a turn's role has 256 characters",
        ),
        (
            Generate(3, messages=(ChatMessage("r" * 4_000_000, "x"),)),
            "a turn's role has 256 characters",
        ),
        (Generate(3, messages=(ChatMessage("", ""),) * 5000), "5000 turns do not fit the context of 4096"),
        (Generate(3, prompt="", resume=(1,) * 50_000), "resume has 50000 tokens, the context is 4096"),
        (Score(3, token_ids=(1,) * 50_000), "token_ids has 50000 tokens, the context is 4096"),
        (Calibrate(3, text="", starts=(1,) * 70_000), "starts has 70000 entries"),
        (SetPolicy(3, "p" * (OPTION_LIMIT + 1)), "a policy's name has 1024 characters at most"),
        (SetPolicy(3, "p", {"a": "v" * (OPTION_LIMIT + 1)}), "an option of a policy has 1024 characters"),
        (SetPolicy(3, "p", {"n" * (OPTION_LIMIT + 1): 1}), "an option of a policy has 1024 characters"),
        (SetPolicy(3, "p", {"a": [1]}), "an option of a policy has a text or a number"),
        (SetPolicy(3, "p", {"a": {}}), "an option of a policy has a text or a number"),
        (SetPolicy(3, "p", {f"a{i}": 1 for i in range(65)}), "a policy has 64 options at most"),
    ],
)
def test_excess_is_refused_in_one_line(message: object, reason: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        READ(frames(message))
    answer = refused.value.answer
    assert answer.request == 3
    if isinstance(message, SetPolicy):
        assert isinstance(answer, Error)
        assert reason in answer.text
    else:
        assert isinstance(answer, Done)
        assert reason in answer.error
        assert (answer.reason, answer.usage) == ("error", True)


def test_million_ids_are_refused_without_decoding_them() -> None:
    """Much faster than decoding them takes, and with their number."""
    message = frames(Generate(7, token_ids=tuple(range(1 << 16)) * 16))
    began = time.thread_time()
    decode(message)
    decoding, began = time.thread_time() - began, time.thread_time()
    with pytest.raises(RequestRefused) as refused:
        READ(message)
    assert time.thread_time() - began < 0.3 * decoding
    assert isinstance(refused.value.answer, Done)
    assert refused.value.answer.stats == {"prompt_tokens": 1 << 20}


def test_outline_of_anything_raises_nothing() -> None:
    assert outline(frames(Generate(7, token_ids=(1,) * 20))) == {
        "request": 7,
        "token_ids": 20,
    }
    header = frames(Generate(1 << 40, token_ids=(1,) * 20))[1]
    assert outline([b"", header])["request"] == 1 << 40
    for end in range(len(header)):
        outline([b"", header[:end]])
    assert outline([]) == outline([b"\x03\x05"]) == outline([b"", b"\x91" * 5000]) == {}
    assert outline([b"", b"\x81" + b"\x91" * 5000]) == outline([b"", b"\x81\xa1x" + b"\x91" * 5000]) == {}
    assert outline([b"", b"\x81\xa7request\xc0"]) == {}


def test_malformed_message_of_any_size_stays_malformed() -> None:
    for header in (b"\x81\xa1x" + b"x" * 20_000, b"\x81\xa9token_ids\xdd\xff\xff\xff\xff" + bytes(20_000)):
        with pytest.raises(MalformedMessage):
            READ([frames(CHAT)[0], header])
