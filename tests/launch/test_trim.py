"""Which turns of a conversation are kept when the context is full."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.chat.conversation import MARKUP, answer_room, trimmed
from protocol.messages import ChatMessage


def talk(*sizes: int) -> list[ChatMessage]:
    """Turns of so many characters, roles alternating; a character and its share of the markup is a token."""
    roles = ("user", "assistant")
    return [ChatMessage(roles[i % 2], "x" * (size - MARKUP)) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("context", "most", "room"),
    [(1024, 100, 256), (1024, 300, 300), (1024, 700, 700), (1024, 2000, 1024), (1, 512, 1)],
)
def test_room_is_max_tokens_and_at_least_a_quarter(context: int, most: int, room: int) -> None:
    assert answer_room(context, most) == room


def test_so_many_turns_are_dropped_that_half_of_their_part_is_free() -> None:
    turns = talk(*(50 for _ in range(16)), 24)
    kept, room = trimmed(turns, None, tokens=824, context=1024, room=256)
    assert (kept, room) == (turns[10:], 256)  # of 744 tokens for earlier turns, 300 are filled
    again, _ = trimmed(turns, "x" * (400 - MARKUP), tokens=1224, context=1024, room=256)
    assert again == turns[14:]  # of 344 tokens beside the system message, 100


def test_last_pair_may_fill_all_that_is_left() -> None:
    turns = talk(100, 100, 100, 300, 24)
    assert trimmed(turns, None, tokens=624, context=1024, room=512)[0] == turns[2:]
    assert trimmed(turns, None, tokens=6240, context=1024, room=512)[0] == turns[4:]


def test_room_is_reduced_before_a_long_system_message_costs_every_turn() -> None:
    turns, system = talk(50, 50, 24), "x" * (500 - MARKUP)
    assert trimmed(turns, system, tokens=624, context=1024, room=512) == (turns, 256)
    assert trimmed(turns, system, tokens=1624, context=1024, room=256) == (turns[2:], 256)


@given(
    sizes=st.lists(st.integers(MARKUP, 500), min_size=1, max_size=20),
    tokens=st.integers(1, 5000),
    context=st.integers(1, 2000),
    most=st.integers(1, 2000),
)
def test_trimming_ends_with_the_question_alone(sizes, tokens, context, most) -> None:
    turns = talk(*sizes, *sizes, 30)
    question, room, steps = turns[-1], answer_room(context, most), 0
    while len(turns) > 1:
        turns, room = trimmed(turns, None, tokens=tokens, context=context, room=room)
        assert turns[-1] is question
        assert len(turns) % 2
        steps += 1
        assert steps <= len(sizes) + 1
