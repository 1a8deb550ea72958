"""The REPL in a terminal: keys in, a screen out."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from engines import engines_left
from terminal import TMUX, Terminal

from pipeline.config import EngineConfig

pytestmark = pytest.mark.skipif(TMUX is None, reason="tmux is not installed")

READY = r"^/help lists.*\n\n>"


def summaries(screen: str) -> list[str]:
    return re.findall(r"^\d+ tokens? ·.*$", screen, re.MULTILINE)


def reused_tokens(summary: str) -> int:
    """Prompt tokens with reused KV."""
    (reused,) = re.findall(r"KV (\d+)/\d+", summary)
    return int(reused)


async def test_session_with_cancel_completion_policy_change_and_history(
    start_engine, tiny_model: Path, tmp_path: Path
) -> None:
    """The next session, with another engine, has the history of the first."""
    env = {"XDG_STATE_HOME": str(tmp_path)}
    _session(env)
    history = tmp_path / "tandem" / "history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert history.parent.stat().st_mode & 0o777 == 0o700
    assert engines_left() == []
    async with start_engine(EngineConfig(model=tiny_model, name="repl-next")):
        await asyncio.to_thread(_history, env)


def _session(env: dict[str, str]) -> None:
    """With an engine of its own."""
    engine = ("--policy", "layerwise", "--expert-cache", "0.25", "--ignore-eos", "--log-level", "warning")
    with Terminal(*engine, "--max-tokens", "400", env=env) as terminal:
        terminal.until(READY)
        terminal.line("Tell me everything about generators.")
        begun = r"^> Tell me everything about generators\.\n(?!reading the prompt)\S"
        early = terminal.until(begun)
        later = terminal.until(lambda screen: len(screen) > len(early) + 20)
        assert not summaries(later)  # the answer was shown before it was complete

        terminal.keys("C-c")
        cancelled = terminal.until(r"cancelled\n\n>$")
        assert re.search(begun, cancelled, re.MULTILINE)  # the partial answer stays
        terminal.line("/set max_tokens=6")
        terminal.until("^max_tokens=6$")
        terminal.line("And what is a coroutine?")
        second = summaries(terminal.until(r"cut\s+at\s+max_tokens\n\n>$"))[-1]
        assert second.startswith("6 tokens")
        asked = int(re.findall(r"KV 0/(\d+)", cancelled)[-1])
        assert reused_tokens(second) > asked  # the first question and its partial answer

        terminal.type("/pol")
        terminal.until(r"^> /pol\n +/policy ")  # a Tab before the menu is complete is lost
        terminal.keys("Tab")
        terminal.until(r"^> /policy\b")
        terminal.type("rand")
        terminal.until(r"^> /policy rand\n +random ")  # the menu
        terminal.keys("Tab")
        terminal.until(r"^> /policy random\b")
        terminal.keys("Enter")
        terminal.until(r"^policy: random\n\n>$")
        terminal.line("And a decorator?")
        third = summaries(terminal.until(lambda screen: len(summaries(screen)) == 3))[-1]
        assert reused_tokens(third) > reused_tokens(second)  # the KV survives the change of policy
        assert "host 100%" not in third  # the new policy is in effect

        terminal.until(r"\n\n>$")
        terminal.line("/quit")
        assert terminal.end() == (0, True)


def _history(env: dict[str, str]) -> None:
    with Terminal("chat", "--connect", "repl-next", env=env) as terminal:
        terminal.until(READY)
        terminal.type("x")  # the prompt shows it when the history has been read
        terminal.until("^> x$")
        terminal.keys("BSpace", "Up")
        terminal.until(r"^> /quit$")
        terminal.keys("Up", "Up")
        terminal.until(r"^> /policy random$")
        terminal.keys("C-c")
        terminal.until(r"^>$")
        terminal.keys("C-c")
        terminal.until("^Ctrl-D or /quit ends the chat\n>$")
        terminal.keys("C-d")
        assert terminal.end() == (0, True)


async def test_commands_and_announcements_of_other_clients(start_engine, tiny_model: Path, tmp_path) -> None:
    """The terminal runs in a thread of its own, because the engine runs in this one."""
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    arguments = ("chat", "--connect", "repl", "--ignore-eos", "--max-tokens", "5", "--log-level", "warning")
    async with start_engine(EngineConfig(model=tiny_model, name="repl")) as (_, client):
        with Terminal(*arguments, "--system", "Be brief.", env=env) as terminal:
            await asyncio.to_thread(_commands, terminal, tmp_path / "talk.json")

            terminal.type("half a li")
            await asyncio.to_thread(terminal.until, "^> half a li$")
            await client.set_policy("layerwise")
            announced = "^another client changed the policy: layerwise\n> half a li$"
            await asyncio.to_thread(terminal.until, announced)
            terminal.type("ne")
            await asyncio.to_thread(terminal.until, "^> half a line$")

            os.kill(terminal.pid(), signal.SIGTERM)
            assert await asyncio.to_thread(terminal.end) == (1, True)


async def test_chat_ends_with_its_engine(start_engine, tiny_model: Path, tmp_path: Path) -> None:
    arguments = ("chat", "--connect", "repl-end")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(start_engine(EngineConfig(model=tiny_model, name="repl-end")))
        with Terminal(*arguments, env={"XDG_STATE_HOME": str(tmp_path)}) as terminal:
            await asyncio.to_thread(terminal.until, READY)
            terminal.type("too late")
            await asyncio.to_thread(terminal.until, "^> too late$")
            await stack.aclose()
            assert await asyncio.to_thread(terminal.end) == (1, True)
            assert len(re.findall("^launch.py: ", terminal.screen(), re.MULTILINE)) == 1


def _commands(terminal: Terminal, file: Path) -> None:
    terminal.until(READY)
    terminal.until("^system message: Be brief.$")
    terminal.paste("two\nlines")
    terminal.until("^> two\n· lines$")
    terminal.keys("M-Enter")
    terminal.line("and a third: ä 漢 🎉")
    terminal.until(r"^· and a third: ä 漢 🎉\n(?s:.+)cut\s+at\s+max_tokens\n\n>$")

    terminal.line(f"/save {file}")
    terminal.until(r"^saved 1 question to\s")
    saved = json.loads(file.read_text())
    assert [message["role"] for message in saved] == ["system", "user", "assistant"]
    assert saved[1]["content"] == "two\nlines\nand a third: ä 漢 🎉"
    terminal.line("/system off")
    terminal.until("^no system message$")
    terminal.line("/reset")
    terminal.line("/retry")
    terminal.until("^nothing has been asked yet$")
    terminal.line("/why")
    terminal.until("^no answer to explain yet")
    terminal.line(f"/load {file}")
    terminal.until(r"^loaded 1 question from\s")
    terminal.line("/retry")
    for turns in (2, 3, 4):
        if turns > 2:  # with the loaded turn, the second of these exceeds the context
            terminal.line("word " * 110)
        terminal.until(lambda screen, turns=turns: len(summaries(screen)) == turns)
    terminal.until("^dropped 2 old turns: |^dropped 1 old turn: ")
    terminal.line("word " * 300)
    terminal.until("context is 256")
    terminal.line("/stats")
    terminal.until(r"^decode  .*\n\n>$")
    terminal.line("/why")
    why = terminal.until(r"^A token took (?s:.+)^slowest (?s:.+)^fidelity: exact\n\n.+\n(?s:.*)\n>$")
    assert re.search(r"^layer [01] +[\d.]+ [mµ]s ", why, re.MULTILINE)
    for wrong, answer in {
        "/polcy": r"unknown command /polcy; did you mean /policy\?",
        "/policy nothing": "unknown policy 'nothing'",
        "/load /dev/null/no": "cannot read /dev/null/no: Not a directory",
    }.items():
        terminal.line(wrong)
        terminal.until(f"^{answer}")
    assert "Traceback" not in terminal.screen()
    terminal.until(r"\n\n>$")
