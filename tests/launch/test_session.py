"""The commands of a chat, and what they leave behind, with an engine that answers "yes." at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace
from rich.console import Console, RenderableType

from launch.chat.conversation import KEYS, Conversation, View, change
from launch.chat.session import Output, Session, as_typed, parse_line, parse_policy
from launch.errors import AnswerLost, WrongUsage
from launch.terminal.interrupts import Interrupts
from protocol.answer import Answer
from protocol.errors import RequestFailed
from protocol.messages import VERSION, ChatMessage, Done, PolicyChanged, Queued, Sampling, Token, Welcome

WELCOME = Welcome(VERSION, "e", "/models/m", "f", "cpu", "lru", True, 9, 1024, True, True)
YES = ("yes", ".")
START = {"max_tokens": 100, "stop": (), "ignore_eos": False} | structs.asdict(Sampling(0.5))


class StandInEngine:
    """Answers each request with these texts and this end. `sent`: what it was asked."""

    def __init__(self, welcome: Welcome = WELCOME) -> None:
        self.welcome = welcome
        self.endpoint = "ipc:///e"
        self.texts: tuple[str, ...] = YES
        self.end = Done(0, "stop")
        self.sent: list[Any] = []
        self.present: dict[str, Any] = {"policy": "fiddler", "policy_options": {"gate": "own"}}
        self.slow = asyncio.Event()
        self.slow.set()
        self.asked = asyncio.Event()  # for stats

    def generate(self, **fields: Any) -> Answer:
        self.sent.append(fields)
        answer = Answer(0, lambda request: answer.feed(Done(0, "cancelled")))
        tokens = [Token(0, index, 5, text) for index, text in enumerate(self.texts)]
        for message in (Queued(0, 2), *tokens, self.end):
            if message is not None:
                asyncio.get_running_loop().call_soon(answer.feed, message)
        return answer

    async def stats(self) -> dict[str, Any]:
        self.asked.set()
        await self.slow.wait()
        return self.present

    async def set_policy(self, name: str, options: dict[str, str]) -> PolicyChanged:
        self.sent.append((name, options))
        return PolicyChanged(0, name, name != "daop", ("try --set fiddler.gate=own",))


class Kept(Output):
    """Keeps notes as lines, tables as text, answers as they were written, and the events of the last one."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.tables: list[str] = []
        self.answers: list[str] = []
        self.events: list[object] = []

    def note(self, text: str, style: str = "") -> None:
        self.notes.append(text)

    def show(self, what: RenderableType = "") -> None:
        console = Console(width=80)
        with console.capture() as captured:
            console.print(what)
        self.tables.append(captured.get())

    @contextmanager
    def answer(self) -> Iterator[View]:
        self.answers.append("")
        self.events.clear()
        yield KeptView(self)


class KeptView(View):
    def __init__(self, output: Kept) -> None:
        self._output = output
        self.queued = output.events.append  # type: ignore[method-assign]
        self.notice = output.notes.append  # type: ignore[method-assign]

    def append(self, text: str) -> None:
        self._output.answers[-1] += text

    def ended(self) -> None:
        self._output.events.append("ended")


class Chat:
    def __init__(self, **settings: Any) -> None:
        self.engine, self.interrupts, self.output = StandInEngine(), Interrupts(), Kept()
        client: Any = self.engine
        self.conversation = Conversation(client, START | settings, self.interrupts)
        self.session = Session(client, self.conversation, self.interrupts, self.output)

    async def says(self, line: str) -> list[str]:
        """The notes after a line, which does not end the chat."""
        self.output.notes.clear()
        assert await self.session.handle(line)
        return self.output.notes

    async def refuses(self, line: str, words: str, error: type[Exception] = WrongUsage) -> None:
        with pytest.raises(error, match=words):
            await self.session.handle(line)


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


ANSWER = ChatMessage("assistant", "yes.")


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        (" hello /help ", ("ask", " hello /help ")),
        ("//etc is a path", ("ask", "/etc is a path")),
        ("/help", ("help", "")),
        ("/policy  random seed=1 ", ("policy", "random seed=1")),
        ("/system two\nlines", ("system", "two\nlines")),
        (" quit ", ("quit", "")),
        ("exit the shell, how?", ("ask", "exit the shell, how?")),
    ],
)
def test_line_is_parsed_as_command_or_question(line: str, meaning: object) -> None:
    assert parse_line(line) == meaning


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/hlep", "/help"),
        ("/", "/help"),
        ("/nothing-near-it", "/help"),
        ("/quit now", "/quit takes no argument"),
        ("/help policy", "/help takes no argument"),
        ("/save", "needs the name"),
        ("/save x", "nothing to save"),
        ("/retry", "nothing has been asked"),
        ("/why", "no answer"),
        ("/policy random seed", "OPTION=VALUE"),
        ("/set topk=1", "did you mean top_k"),
        ("/set max_tokens", "max_tokens=value"),
        ("/set max_tokens=0", "at least 1"),
        ("/set temperature=warm", "not a number"),
        ("/set temperature=nan", "temperature"),
        ("/set top_p=0", "top_p"),
        ("/set repetition_penalty=1000", "repetition_penalty"),
        ("/set seed=-1", "seed"),
    ],
)
async def test_wrong_command_is_refused_in_one_line_and_changes_nothing(line: str, expected: str) -> None:
    chat = Chat()
    with pytest.raises(WrongUsage) as raised:
        await chat.session.handle(line)
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)
    assert chat.conversation.settings == START
    assert not chat.engine.sent


async def test_question_is_sent_with_all_before_it_and_the_settings() -> None:
    chat = Chat(stop=("END",))
    chat.conversation.system = "Be brief."
    assert await chat.says("one?") == ["2 tokens · first 0.00 s"]
    await chat.says("//etc?")
    first, second = chat.engine.sent
    system = ChatMessage("system", "Be brief.")
    assert first["messages"] == [system, user("one?")]
    assert second["messages"] == [system, user("one?"), ANSWER, user("/etc?")]
    assert chat.conversation.turns == (user("one?"), ANSWER, user("/etc?"), ANSWER)
    assert (chat.output.answers, chat.output.events) == (["yes.", "yes."], [2, "ended"])
    others = {"max_tokens": 100, "sampling": Sampling(0.5), "stop": ("END",), "marks": True}
    # A question alone may leave any room, later ones leave it for an answer.
    for sent, reserve in ((first, 1), (second, 100)):
        assert {key: sent[key] for key in sent if key != "messages"} == others | {
            "reserve": reserve,
            "ignore_eos": False,
        }


async def test_failed_and_lost_answers_leave_the_conversation_unchanged() -> None:
    chat = Chat()
    await chat.says("one?")
    before = chat.conversation.turns
    failed = Done(0, "error", "no memory", stats={"prompt_tokens": 5})
    for texts, end, error, words in (
        ((), replace(failed, stats={}), RequestFailed, "^no memory$"),
        (YES, failed, RequestFailed, "^no memory$"),
        (YES, Done(0, "cancelled"), AnswerLost, "shutting down"),
    ):
        chat.engine.texts, chat.engine.end = texts, end
        asked = len(chat.engine.sent)
        await chat.refuses("two?", words, error)
        assert chat.conversation.turns == before
        assert len(chat.engine.sent) == asked + 1  # not again with fewer turns


async def test_ctrl_c_ends_a_command_that_waits_for_the_engine() -> None:
    chat = Chat()
    chat.engine.slow.clear()
    with chat.interrupts.installed():
        waiting = asyncio.create_task(chat.session.handle("/stats"))
        await chat.engine.asked.wait()
        os.kill(os.getpid(), signal.SIGINT)
        assert await asyncio.wait_for(waiting, 10)
        assert chat.output.notes == ["/stats was cancelled"]
        assert chat.output.tables == []
        # A command that is cancelled from outside is not over.
        chat.engine.asked.clear()
        waiting = asyncio.create_task(chat.session.handle("/stats"))
        await chat.engine.asked.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


def test_set_takes_several_values_and_returns_to_defaults() -> None:
    text = "max_tokens=5 temperature=0.5 top_k=3 top_p=0.9 min_p=0.1 repetition_penalty=1.1 seed=7"
    after = change(START, text, START)
    sampling = structs.asdict(Sampling(0.5, 3, 0.9, 0.1, 1.1, 7))
    assert after == START | {"max_tokens": 5} | sampling
    assert change(after, " ".join(f"{key}=" for key in KEYS), START) == START


async def test_policy_is_switched_with_its_options_and_shown_as_the_engine_has_it() -> None:
    chat = Chat()
    await chat.says("/policy")
    (shown,) = chat.output.tables
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("* ")] == ["fiddler"]
    assert "gate=own" in shown
    note = (await chat.says("/policy adapmoe gate=own")).pop(0)
    assert chat.engine.sent == [("adapmoe", {"gate": "own"})]
    assert note.splitlines()[0] == "policy: adapmoe gate=own"
    assert "approximate" not in note
    assert note.endswith("try /policy fiddler gate=own")
    told = as_typed("avoid that with --set a-b.gate=own --set a-b.sizes=even; or (--set c.d=1)")
    assert told == "avoid that with /policy a-b gate=own sizes=even; or (/policy c d=1)"
    assert "approximate" in (await chat.says("/policy daop")).pop(0)
    chat.engine.present = {}
    await chat.says("/policy")
    assert not any(line.startswith("* ") for line in chat.output.tables[-1].splitlines())  # no preset
    assert parse_policy("random seed=3 churn=1") == ("random", {"seed": "3", "churn": "1"})


async def test_conversation_is_saved_into_a_new_file_and_loaded(tmp_path: Path) -> None:
    chat, path = Chat(), tmp_path / "a talk.json"
    await chat.says("/system Be brief.")
    await chat.says("one?")
    await chat.says(f"/save {path}")
    assert [message["role"] for message in json.loads(path.read_text())] == ["system", "user", "assistant"]
    await chat.refuses(f"/save {path}", "exists")

    later = Chat()
    await later.says("three?")
    assert await later.says(f"/load {path}") == [
        f"loaded 1 question from {path}",
        "system message: Be brief.",
    ]
    assert (later.conversation.turns, later.conversation.system) == (chat.conversation.turns, "Be brief.")
    await later.refuses("/why", "no answer")


async def test_model_without_a_template_cannot_chat() -> None:
    for tokenizer, words in ((True, "template"), (False, "--prompt-tokens")):
        engine: Any = StandInEngine(replace(WELCOME, has_tokenizer=tokenizer, has_chat_template=False))
        with pytest.raises(WrongUsage, match=words):
            Conversation(engine, START, Interrupts())
