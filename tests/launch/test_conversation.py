"""A conversation: its turns, which of them are dropped in a full context, and its messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.chat.conversation import MARKUP, Conversation, answer_room, trimmed
from launch.chat.settings import AnswerSettings
from launch.terminal.interrupts import Interrupts
from protocol.answer import Answer
from protocol.errors import MalformedMessage, RequestFailed
from protocol.messages import VERSION, ChatMessage, Done, Sampling, Token, Welcome

CONTEXT = 1024
LARGEST = 100_000  # characters of a message to this engine
TURNS = 30


class CountingClient:
    """Refuses as an engine does, by a token for every four characters, and answers with a text of 50."""

    def __init__(self) -> None:
        self.welcome = Welcome(VERSION, "e", "m", "f", "cpu", "all-host", True, 9, CONTEXT, True, True)
        self.answered: list[tuple[ChatMessage, ...]] = []
        self.requests = 0
        self.tokens = 2  # of an answer

    def generate(self, *, messages, reserve, **_) -> Answer:
        self.requests += 1
        answer = Answer(0, lambda request: None)
        characters = sum(len(message.content) for message in messages)
        if characters > LARGEST:
            raise MalformedMessage("too large")
        tokens = characters // 4 + 3 * len(messages)
        if tokens + reserve > CONTEXT:
            stats = {"prompt_tokens": tokens}
            answer.feed(Done(0, "error", f"the prompt has {tokens} tokens", stats=stats, usage=True))
        else:
            self.answered.append(tuple(messages))
            for index in range(self.tokens):
                answer.feed(Token(0, index, 1, "x" * 100))
            answer.feed(Done(0, "stop"))
        return answer


class Notices:
    def __init__(self) -> None:
        self.notices: list[str] = []

    def queued(self, position: int) -> None: ...
    def append(self, text: str) -> None: ...
    def cancelling(self) -> None: ...
    def ended(self) -> None: ...

    def notice(self, text: str) -> None:
        self.notices.append(text)


async def talk(system: str | None, max_tokens: int) -> tuple[CountingClient, Notices, Conversation]:
    client, view, interrupts = CountingClient(), Notices(), Interrupts()
    conversation = Conversation(client, AnswerSettings(max_tokens, Sampling()), system)  # type: ignore[arg-type]
    for number in range(TURNS):
        await conversation.ask(f"{number:03}{'q' * 77}", view, interrupts)
    return client, view, conversation


@pytest.mark.parametrize(("system", "max_tokens"), [(None, 100), (None, 512), ("s" * 400, 100)])
async def test_most_turns_only_add_to_the_prompt(system: str | None, max_tokens: int) -> None:
    client, view, _ = await talk(system, max_tokens)
    grown = [
        later[: len(earlier)] == earlier
        for earlier, later in zip(client.answered, client.answered[1:], strict=False)
    ]
    drops = grown.count(False)
    assert 1 <= drops <= TURNS / 4
    assert len(view.notices) == drops
    assert client.requests == TURNS + drops  # the engine's count makes the first estimate good enough
    assert all("dropped the" in notice and "--" not in notice for notice in view.notices)
    if system is not None:
        assert all(messages[0] == ChatMessage("system", system) for messages in client.answered)


async def test_constant_dropping_beside_a_long_system_message_is_said_once() -> None:
    client, view, conversation = await talk("s" * 2400, 512)
    assert len(view.notices) == 1
    assert all(len(messages) >= 4 for messages in client.answered[1:])  # the last turn is kept
    conversation.system = None
    await conversation.ask("short?", view, Interrupts())
    assert len(view.notices) == 1
    conversation.system = "s" * 2400
    conversation.restore([*conversation.turns] * 4)
    client.tokens = 0  # also above an answer without text
    await conversation.ask("and now?", view, Interrupts())
    assert len(view.notices) == 2


async def test_question_beyond_the_context_is_refused_and_costs_no_turn() -> None:
    _, view, conversation = await talk(None, 100)
    before, notices = conversation.turns, len(view.notices)
    for characters, reason in ((8 * CONTEXT, "prompt has 2051 tokens"), (2 * LARGEST, "200000 characters")):
        with pytest.raises(RequestFailed, match=reason) as refused:
            await conversation.ask("q" * characters, view, Interrupts())
        assert "\n" not in str(refused.value)
        assert refused.value.usage
    assert (conversation.turns, len(view.notices)) == (before, notices)


async def test_loaded_conversation_far_beyond_the_context_continues() -> None:
    client, view, conversation = await talk(None, 100)
    pair = (ChatMessage("user", "q" * 100), ChatMessage("assistant", "a" * 300))
    conversation.restore(pair * 2000)
    await conversation.ask("and now?", view, Interrupts())
    assert 3 <= len(client.answered[-1]) < 12
    assert view.notices[-1].startswith("dropped the 199")
    fresh, first = Conversation(client, AnswerSettings(100, Sampling())), Notices()  # type: ignore[arg-type]
    fresh.restore((user := ChatMessage("user", "q" * 3600), ChatMessage("assistant", "")))
    await fresh.ask("and now?", first, Interrupts())
    assert [notice.split(":")[0] for notice in first.notices] == ["dropped the oldest turn"]
    assert user not in client.answered[-1]


def turns_of(*sizes: int) -> list[ChatMessage]:
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
    turns = turns_of(*(50 for _ in range(16)), 24)
    kept, room = trimmed(turns, None, tokens=824, context=1024, room=256)
    assert (kept, room) == (turns[10:], 256)  # of 744 tokens for earlier turns, 300 are filled
    again, _ = trimmed(turns, "x" * (400 - MARKUP), tokens=1224, context=1024, room=256)
    assert again == turns[14:]  # of 344 tokens beside the system message, 100


def test_last_pair_may_fill_all_that_is_left() -> None:
    turns = turns_of(100, 100, 100, 300, 24)
    assert trimmed(turns, None, tokens=624, context=1024, room=512)[0] == turns[2:]
    assert trimmed(turns, None, tokens=6240, context=1024, room=512)[0] == turns[4:]


def test_room_is_reduced_before_a_long_system_message_costs_every_turn() -> None:
    turns, system = turns_of(50, 50, 24), "x" * (500 - MARKUP)
    assert trimmed(turns, system, tokens=624, context=1024, room=512) == (turns, 256)
    assert trimmed(turns, system, tokens=1624, context=1024, room=256) == (turns[2:], 256)


@given(
    sizes=st.lists(st.integers(MARKUP, 500), min_size=1, max_size=20),
    tokens=st.integers(1, 5000),
    context=st.integers(1, 2000),
    most=st.integers(1, 2000),
)
def test_trimming_ends_with_the_question_alone(sizes, tokens, context, most) -> None:
    turns = turns_of(*sizes, *sizes, 30)
    question, room, steps = turns[-1], answer_room(context, most), 0
    while len(turns) > 1:
        turns, room = trimmed(turns, None, tokens=tokens, context=context, room=room)
        assert turns[-1] is question
        assert len(turns) % 2
        steps += 1
        assert steps <= len(sizes) + 1
