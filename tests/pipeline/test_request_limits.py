"""What a request may hold: each excess is refused in one line."""

from __future__ import annotations

import pytest

from pipeline.serving.client_socket import OPTION_LIMIT, ROLE_LIMIT, RequestRefused, read_message
from protocol.codec import encode
from protocol.errors import MalformedMessage
from protocol.messages import Calibrate, ChatMessage, Done, Error, Generate, Score, SetPolicy

CONTEXT = 4096
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
        SetPolicy(3, "p", {"n" * OPTION_LIMIT: "v" * OPTION_LIMIT}),
    ],
)
def test_request_within_the_limits_is_read(message: object) -> None:
    assert read_message(frames(message)) == message


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
        (Calibrate(3, text="", starts=(1,) * 70_000), "starts has 70000 entries"),
        (SetPolicy(3, "p" * (OPTION_LIMIT + 1)), "a policy's name has 1024 characters at most"),
        (SetPolicy(3, "p", {"a": "v" * (OPTION_LIMIT + 1)}), "an option of a policy has 1024 characters"),
        (SetPolicy(3, "p", {"n" * (OPTION_LIMIT + 1): "1"}), "an option of a policy has 1024 characters"),
        (SetPolicy(3, "p", {f"a{i}": "1" for i in range(65)}), "a policy has 64 options at most"),
    ],
)
def test_excess_is_refused_in_one_line(message: object, reason: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        read_message(frames(message))
    answer = refused.value.answer
    assert answer.request == 3
    if isinstance(message, SetPolicy):
        assert isinstance(answer, Error)
        assert reason in answer.text
    else:
        assert isinstance(answer, Done)
        assert reason in answer.error
        assert (answer.reason, answer.usage) == ("error", True)


def test_malformed_message_of_any_size_stays_malformed() -> None:
    for header in (b"\x81\xa1x" + b"x" * 20_000, b"\x81\xa9token_ids\xdd\xff\xff\xff\xff" + bytes(20_000)):
        with pytest.raises(MalformedMessage):
            read_message([frames(CHAT)[0], header])
