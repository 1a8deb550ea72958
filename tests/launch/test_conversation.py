"""A conversation: which turns are dropped in a full context, and its file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_styles import GLM47, HARMONY, QWEN_JSON, Style
from msgspec import structs

from launch.chat.conversation import Conversation, View, load, save
from launch.chat.repl import Screen
from launch.errors import WrongUsage
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import CLEAR
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
            for index in range(2):
                answer.feed(Token(0, index, 1, "x" * 100))
            answer.feed(Done(0, "stop"))
        return answer


class Notices(View):
    def __init__(self) -> None:
        self.notices: list[str] = []
        self.notice = self.notices.append  # type: ignore[method-assign]

    def append(self, text: str) -> None:
        """Shows nothing."""

    def ended(self) -> None:
        """Shows nothing."""


def conversation_with(client: Any, system: str | None, max_tokens: int) -> Conversation:
    settings = {"max_tokens": max_tokens} | structs.asdict(Sampling())
    return Conversation(client, settings, Interrupts(), system)


async def talk(system: str | None, max_tokens: int) -> tuple[CountingClient, Notices, Conversation]:
    client, view = CountingClient(), Notices()
    conversation = conversation_with(client, system, max_tokens)
    for number in range(TURNS):
        await conversation.ask(f"{number:03}{'q' * 77}", view)
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
    if system is not None:
        assert all(messages[0] == ChatMessage("system", system) for messages in client.answered)


async def test_question_beyond_the_context_is_refused_and_costs_no_turn() -> None:
    _, view, conversation = await talk(None, 100)
    before, notices = conversation.turns, len(view.notices)
    for characters, reason in ((8 * CONTEXT, "prompt has 2051 tokens"), (2 * LARGEST, "200000 characters")):
        with pytest.raises(RequestFailed, match=reason) as refused:
            await conversation.ask("q" * characters, view)
        assert "\n" not in str(refused.value)
        assert refused.value.usage
    assert (conversation.turns, len(view.notices)) == (before, notices)


async def test_loaded_conversation_far_beyond_the_context_continues() -> None:
    client, view, conversation = await talk(None, 100)
    conversation.turns = (ChatMessage("user", "q" * 100), ChatMessage("assistant", "a" * 300)) * 2000
    await conversation.ask("and now?", view)
    assert 3 <= len(client.answered[-1]) < 20
    assert view.notices[-1].startswith("dropped 199")


TURNS_OF_A_TALK = (ChatMessage("user", 'a "b"\n漢'), ChatMessage("assistant", ""))


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_saved_conversation_loads_unchanged_from_a_private_file(tmp_path: Path, system: str | None) -> None:
    path = tmp_path / "talk.json"
    save(path, system, TURNS_OF_A_TALK)
    assert load(path) == (system, TURNS_OF_A_TALK)
    assert path.stat().st_mode & 0o777 == 0o600
    for wrong in (path, tmp_path, tmp_path / "no" / "talk.json"):
        with pytest.raises(WrongUsage, match=str(wrong)):
            save(wrong, system, TURNS_OF_A_TALK)
    assert os.listdir(tmp_path) == ["talk.json"]


USER = {"role": "user", "content": "?"}
ASSISTANT = {"role": "assistant", "content": "!"}


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[" * 100_000,
        "{}",
        [USER],
        [ASSISTANT, USER],
        [USER, USER],
        [USER, ASSISTANT, {"role": "system", "content": "x"}],
        [USER | {"name": "x"}, ASSISTANT],
        [USER | {"content": None}, ASSISTANT],
        [USER | {"content": "\ud800"}, ASSISTANT],
        b"\xff\xfe\xff",
        None,
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, content: object) -> None:
    path = tmp_path / "talk.json"
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    if content is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(WrongUsage) as raised:
        load(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


class StyledClient(CountingClient):
    """Answers as a model of this style, a few characters a token."""

    def __init__(self, style: Style, folder: Path) -> None:
        super().__init__()
        (folder / "chat_template.jinja").write_text(style.template)
        self.welcome = structs.replace(self.welcome, model=str(folder))
        self.style = style

    def generate(self, *, messages, marks, **_) -> Answer:
        self.answered.append(tuple(messages))
        assert marks
        answer, text = Answer(0, lambda request: None), self.style.answer
        for index in range(0, len(text), 3):
            answer.feed(Token(0, index, 1, text[index : index + 3]))
        answer.feed(Done(0, "stop"))
        return answer

    async def tokenize(self, **_: Any) -> Any:
        return SimpleNamespace(ending=self.style.ending)


@pytest.mark.parametrize("style", [HARMONY, GLM47, QWEN_JSON], ids=lambda style: style.name)
async def test_reasoning_is_shown_apart_and_given_back_apart(
    style: Style, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = StyledClient(style, tmp_path)
    conversation = conversation_with(client, None, 100)
    reply = await conversation.ask("Rain?", View())
    shown = capsys.readouterr()
    assert shown.err == f"{reply.reasoning}\n"
    assert reply.reasoning.strip() == "Oslo, then."
    assert shown.out.startswith("I look.")
    assert reply.text.startswith("I look.")
    await conversation.ask("And then?", View())
    question, said, _ = client.answered[1]
    assert question == ChatMessage("user", "Rain?")
    assert said == ChatMessage("assistant", reply.text, json.dumps({"reasoning_content": reply.reasoning}))


def test_reasoning_on_a_terminal_has_lines_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with Screen(lambda: False).answer() as view:
        for text in ("I wond", "er \x1b[2J"):
            view.reason(text)
        view.reasoned()
        view.append("yes")
    written = capsys.readouterr().out.rpartition(CLEAR)[2]
    assert written == "I wonder \N{REPLACEMENT CHARACTER}[2J\n\nyes\n"
