"""The commands of a chat, and what they leave behind, with an engine that answers "yes." at once."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console, RenderableType
from waiting import until

from launch.chat import command
from launch.chat.conversation import KV_NAME, Conversation
from launch.chat.session import Session
from launch.chat.settings import AnswerSettings
from launch.command_line.options import parse
from launch.errors import AnswerLost, WrongUsage
from launch.terminal.interrupts import Interrupts
from protocol.answer import Answer
from protocol.errors import RequestFailed
from protocol.messages import VERSION, ChatMessage, Done, PolicyChanged, Queued, Sampling, Token, Welcome

WELCOME = Welcome(VERSION, "e", "/models/m", "f", "cpu", "lru", True, 9, 1024, True, True)
YES = ("yes", ".")


class StandInEngine:
    """Answers each request with these texts and this end. `sent`: what it was asked."""

    def __init__(self, welcome: Welcome = WELCOME) -> None:
        self.welcome = welcome
        self.endpoint = "ipc:///e"
        self.texts: tuple[str, ...] = YES
        self.end = Done(0, "stop")
        self.sent: list[Any] = []
        self.present: dict[str, Any] = {"policy": "fiddler", "policy_options": {"gate": "own"}}
        self.refusal: RequestFailed | None = None
        self.slow = asyncio.Event()
        self.slow.set()

    def generate(self, **fields: Any) -> Answer:
        self.sent.append(fields)
        answer = Answer(0, lambda request: answer.feed(Done(0, "cancelled")))
        tokens = [Token(0, index, 5, text) for index, text in enumerate(self.texts)]
        for message in (Queued(0, 2), *tokens, self.end):
            if message is not None:
                asyncio.get_running_loop().call_soon(answer.feed, message)
        return answer

    async def stats(self) -> dict[str, Any]:
        await self.slow.wait()
        return self.present

    async def set_policy(self, name: str, options: dict[str, str]) -> PolicyChanged:
        self.sent.append((name, options))
        if self.refusal is not None:
            raise self.refusal
        return PolicyChanged(0, name, name != "daop", ("try --set fiddler.gate=own",))


class Chat:
    """A session whose output is kept: notes as lines, tables as text, answers as they were written."""

    def __init__(self, *, summaries: bool = False, **settings: Any) -> None:
        self.engine, self.interrupts = StandInEngine(), Interrupts()
        start = AnswerSettings(**{"max_tokens": 100, "sampling": Sampling(0.5)} | settings)
        self.conversation = Conversation(self.engine, start)  # type: ignore[arg-type]
        self.notes: list[str] = []
        self.tables: list[str] = []
        self.answers: list[str] = []
        self.events: list[object] = []  # of the last answer but its text
        output = SimpleNamespace(width=80, note=self.notes.append, show=self.show)
        self.session = Session(
            self.engine,  # type: ignore[arg-type]
            self.conversation,
            self.interrupts,
            output,
            self.view,
            summaries=summaries,
        )

    def show(self, what: RenderableType = "") -> None:
        console = Console(width=80)
        with console.capture() as captured:
            console.print(what)
        self.tables.append(captured.get())

    @contextmanager
    def view(self) -> Iterator[Any]:
        self.answers.append("")
        self.events.clear()

        def append(text: str) -> None:
            self.answers[-1] += text

        yield SimpleNamespace(
            append=append,
            queued=self.events.append,
            cancelling=lambda: self.events.append("cancelling"),
            ended=lambda: self.events.append("ended"),
            notice=self.notes.append,
        )

    async def says(self, line: str) -> list[str]:
        """The notes after a line, which does not end the chat."""
        self.notes.clear()
        assert await self.session.handle(line)
        return self.notes

    async def refuses(self, line: str, words: str, error: type[Exception] = WrongUsage) -> None:
        with pytest.raises(error, match=words):
            await self.session.handle(line)


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


ANSWER = ChatMessage("assistant", "yes.")


async def test_question_is_sent_with_all_before_it_and_the_settings() -> None:
    chat = Chat(stop=("END",))
    chat.conversation.system = "Be brief."
    assert await chat.says("one?") == []  # no summary
    await chat.says("//etc?")
    first, second = chat.engine.sent
    system = ChatMessage("system", "Be brief.")
    assert first["messages"] == [system, user("one?")]
    assert second["messages"] == [system, user("one?"), ANSWER, user("/etc?")]
    assert chat.conversation.turns == (user("one?"), ANSWER, user("/etc?"), ANSWER)
    assert (chat.answers, chat.events) == (["yes.", "yes."], [2, "ended"])
    others = {"conversation": KV_NAME, "max_tokens": 100, "sampling": Sampling(0.5), "stop": ("END",)}
    # A question alone may leave any room, later ones leave a quarter of the context at least.
    for sent, reserve in ((first, 1), (second, 256)):
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


async def test_ctrl_c_ends_an_answer_and_keeps_what_there_is() -> None:
    chat = Chat(summaries=True)
    chat.engine.end = None  # type: ignore[assignment]  # the answer goes on
    with chat.interrupts.installed():
        asking = asyncio.create_task(chat.session.handle("one?"))
        await until(lambda: chat.answers == ["yes."])
        os.kill(os.getpid(), signal.SIGINT)
        assert await asyncio.wait_for(asking, 10)
    assert chat.conversation.turns == (user("one?"), ANSWER)
    assert chat.notes[0].endswith("cancelled")
    assert chat.events == [2, "cancelling", "ended"]
    assert not chat.interrupts.received


async def test_ctrl_c_ends_a_command_that_waits_for_the_engine() -> None:
    chat = Chat()
    chat.engine.slow.clear()
    with chat.interrupts.installed():
        waiting = asyncio.create_task(chat.session.handle("/stats"))
        await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        assert await asyncio.wait_for(waiting, 10)
        assert chat.notes == ["/stats was cancelled"]
        assert chat.tables == []
        # A command that is cancelled from outside is not over.
        waiting = asyncio.create_task(chat.session.handle("/stats"))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_settings_hold_for_the_next_question_and_return_to_those_of_the_start() -> None:
    chat = Chat(max_tokens=7)
    (note,) = await chat.says("/set max_tokens=5 seed=3")
    assert re.search(r"max_tokens\W+5\b.*seed\W+3\b", note)
    assert "top_k" not in note
    assert len(await chat.says("/set max_tokens=5")) == 1
    assert chat.tables == []
    await chat.says("one?")
    assert (chat.engine.sent[0]["max_tokens"], chat.engine.sent[0]["sampling"]) == (5, Sampling(0.5, seed=3))
    assert any("seed" in note for note in await chat.says("/set temperature=0"))  # without effect
    context = chat.engine.welcome.context
    for most, noted in ((context - 1, False), (context, True)):
        notes = await chat.says(f"/set max_tokens={most}")
        assert any(f"{context} tokens together" in note for note in notes) is noted
    await chat.says("/set max_tokens=5")
    await chat.refuses("/set max_tokens=9 top_p=7", "top_p")
    assert chat.conversation.settings.max_tokens == 5
    await chat.says("/set max_tokens= seed= temperature=")
    assert chat.conversation.settings == AnswerSettings(7, Sampling(0.5))
    await chat.says("/set")
    assert "max_tokens" in chat.tables[-1]


async def test_policy_is_switched_with_its_options_and_shown_as_the_engine_has_it() -> None:
    chat = Chat()
    await chat.says("/policy")
    assert [line.split()[1] for line in chat.tables[0].splitlines() if line.startswith("* ")] == ["fiddler"]
    assert "gate=own" in chat.tables[0]
    shown = len(chat.tables)
    note = (await chat.says("/policy adapmoe adapmoe.gate=own")).pop(0)
    assert chat.engine.sent == [("adapmoe", {"gate": "own"})]
    assert note.splitlines()[0] == "policy: adapmoe gate=own; /help policy adapmoe lists its options"
    assert len(chat.tables) == shown  # the options are for /help
    assert "approximate" not in note
    assert note.endswith("--set fiddler.gate=own")
    assert "approximate" in (await chat.says("/policy daop")).pop(0)
    chat.engine.refusal = RequestFailed("add --set daop.gate=own", usage=True)
    with pytest.raises(RequestFailed, match=r"^add --set daop.gate=own$") as refused:
        await chat.session.handle("/policy daop")
    assert refused.value.usage
    chat.engine.present = {}
    await chat.says("/policy")
    assert not any(line.startswith("* ") for line in chat.tables[-1].splitlines())  # lru is no preset


async def test_files_are_overwritten_only_if_this_session_knows_them_or_is_forced(tmp_path: Path) -> None:
    chat, path, other = Chat(), tmp_path / "a talk.json", tmp_path / "other.json"
    await chat.refuses(f"/save {path}", "nothing to save")
    await chat.refuses("/save", "needs the name")
    await chat.refuses("/save --force", "needs the name")
    await chat.says("/system Be brief.")
    await chat.says("one?")
    other.touch()
    await chat.refuses(f"/save {other}", "exists")
    assert other.read_text() == ""
    await chat.says(f"/save {path}")
    await chat.says("two?")
    await chat.says(f"/save {path}")  # its own
    saved = json.loads(path.read_text())
    assert (saved["model"], saved["system"], len(saved["messages"])) == ("/models/m", "Be brief.", 4)
    assert await chat.says(f"/save {other} --force") == [f"saved 2 questions to {other}"]
    assert json.loads(other.read_text()) == saved

    await chat.says(f"/save {tmp_path}/no--force")
    assert (tmp_path / "no--force").exists()

    later = Chat()
    await later.says("three?")
    await later.refuses(f"/save {path}", "exists")
    notes = await later.says(f"/load {path}")
    assert notes == [f"loaded 2 questions from {path}", "system message: Be brief."]
    assert (len(later.conversation.turns), later.conversation.system) == (4, "Be brief.")
    await later.refuses("/why", "no answer")
    await later.says(f"/save {path}")  # loaded, so known
    for model, known in (("/models/other", False), ("", True)):
        other.write_text(json.dumps(saved | {"model": model, "system": None}))
        notes = await later.says(f"/load {other}")
        assert any("/models/other" in note for note in notes) is not known
        assert len(notes) == 2 - known
        assert later.conversation.system is None


@contextmanager
def stdin_from(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with open(path) as file:
        monkeypatch.setattr("sys.stdin", file)
        yield


async def test_chat_from_a_pipe_goes_on_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @asynccontextmanager
    async def client(*_: object) -> AsyncIterator[StandInEngine]:
        yield engine

    monkeypatch.setattr(command, "reconnecting_client", client)
    for context, words, most, lines, code, answers in (
        (1024, "--stop A --stop B --top-p 0.5", 512, "one?\n/set seed=3\ntwo?\n", 0, 2),
        (100, "", 50, "/retry\none?\n/nothing\n\n/quit\ntwo?\n", 1, 1),
        (1, "", 1, "one?", 0, 1),
        (100, "--max-tokens 70 --system Brief.", 70, "/system\none?", 0, 1),
    ):
        engine = StandInEngine(replace(WELCOME, context=context, sampling=Sampling(0.25)))
        (tmp_path / "lines").write_text(lines)
        with stdin_from(tmp_path / "lines", monkeypatch):
            options = parse(["chat", *words.split(), "--connect"])
            assert await command.chat(options, Interrupts()) == code
        out, err = capsys.readouterr()
        assert out == "yes.\n" * answers
        assert err.count("launch.py: ") == 2 * code
        assert ("Brief." in err) is ("Brief." in words)
        sent = engine.sent[0]
        assert sent["max_tokens"] == most
        assert sent["sampling"].temperature == 0.25  # the model's
        assert (sent["stop"], sent["sampling"].top_p) == ((("A", "B"), 0.5) if "A" in words else ((), 1.0))
        assert sent["messages"][-1] == user("one?")


async def test_model_without_a_template_cannot_chat() -> None:
    for tokenizer, words in ((True, "template"), (False, "--prompt-tokens")):
        engine = StandInEngine(replace(WELCOME, has_tokenizer=tokenizer, has_chat_template=False))
        with pytest.raises(WrongUsage, match=words):
            Conversation(engine, AnswerSettings(9, Sampling()))  # type: ignore[arg-type]
