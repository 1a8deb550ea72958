"""A conversation that outgrows the context, with an engine that only counts."""

from __future__ import annotations

import pytest

from launch.chat.conversation import Conversation
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
