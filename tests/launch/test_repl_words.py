"""The REPL's parts that need no terminal: commands, settings, files, completions, text layout."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from launch.chat.commands import Call, parse_line, parse_policy
from launch.chat.conversation import Transcript
from launch.chat.input import MAX_LINES, CommandCompleter, PrivateFileHistory
from launch.chat.settings import KEYS, AnswerSettings, change, echo, value_text
from launch.errors import OutputFailed, WrongUsage
from pipeline.policies.presets import PRESETS
from protocol.messages import ChatMessage, Sampling

START = AnswerSettings(100, Sampling(repetition_penalty=1.1), ("END",))


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("", None),
        ("  \n ", None),
        (" hello /help ", " hello /help "),
        ("//etc is a path", "/etc is a path"),
        ("/help", Call("help", "")),
        ("/policy  random seed=1 ", Call("policy", "random seed=1")),
        ("/system two\nlines", Call("system", "two\nlines")),
        ("/help policy fiddler", Call("help", "policy fiddler")),
        ("exit", Call("quit", "")),
        (" quit ", Call("quit", "")),
        ("/exit", Call("quit", "")),
        ("/bye", Call("quit", "")),
        ("exit the shell, how?", "exit the shell, how?"),
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
        ("/quit now", "no argument"),
        ("/bye now", "/bye takes no argument"),
        ("/exit now", "/exit takes no argument"),
    ],
)
def test_wrong_command_is_refused_in_one_line(line: str, expected: str) -> None:
    with pytest.raises(WrongUsage) as raised:
        parse_line(line)
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


def test_policy_options_may_carry_the_preset_name() -> None:
    assert parse_policy("random seed=3 random.churn=1") == ("random", {"seed": "3", "churn": "1"})
    with pytest.raises(WrongUsage, match="OPTION=VALUE"):
        parse_policy("random seed")


def test_settings_change_and_return_to_defaults() -> None:
    text = "max_tokens=5 temperature=0.5 top_k=3 top_p=0.9 min_p=0.1 seed=7 ignore_eos=on"
    text += " stop='a b' stop=\\\\n"
    after = change(START, text, START)
    assert after == AnswerSettings(5, Sampling(0.5, 3, 0.9, 0.1, 1.1, 7), ("a b", "\n"), True)
    assert after.without_effect() == []
    again = change(START, " ".join(f"{key}={value_text(after, key)}" for key in KEYS if key != "stop"), START)
    assert again == after.put("stop", START.stop)  # /set accepts what it shows
    assert change(after, " ".join(f"{key}=" for key in KEYS), START) == START
    assert change(after, "stop=none seed=none", START).get("stop") == ()
    shown = echo(START, after, text)
    assert shown[:2] == ["max_tokens=5", "temperature=0.5"]
    assert change(START, " ".join(shown), START) == after  # /set accepts what it echoes
    assert echo(after, after, "top_k=3") == ["top_k=3 (as before)"]
    assert echo(after, START, "top_k= stop=") == ["top_k=0", "stop=END"]
    (line,) = change(after, "temperature=0", START).without_effect()
    assert line.startswith("top_k, top_p, min_p, seed have no effect")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("topk=1", "top_k"),
        ("temp=0.3", "did you mean temperature?"),
        ("max_tokens", "max_tokens=value"),
        ("max_tokens=0", "at least 1"),
        ("temperature=warm", "not a number"),
        ("temperature=nan", "temperature"),
        ("top_p=0", "top_p"),
        ("min_p=2", "min_p"),
        ("repetition_penalty=1000", "repetition_penalty"),
        ("seed=-1", "seed"),
        ("ignore_eos=maybe", "on or off"),
        ("stop='a", "quotation"),
    ],
)
def test_wrong_setting_is_refused_in_one_line(text: str, expected: str) -> None:
    with pytest.raises(WrongUsage) as raised:
        change(START, f"max_tokens=7 {text}", START)
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


TALK = Transcript.of("model", "Be brief.", (ChatMessage("user", 'a "b"\n漢'), ChatMessage("assistant", "")))


def test_saved_conversation_loads_unchanged_from_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text("before")
    path.chmod(0o644)
    TALK.save(path)
    assert Transcript.load(path) == TALK
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["talk.json"]


def test_failed_save_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(OutputFailed, match="No such file"):
        TALK.save(tmp_path / "no" / "talk.json")
    with pytest.raises(OutputFailed, match="directory"):
        TALK.save(tmp_path)
    assert os.listdir(tmp_path) == []


USER = {"role": "user", "content": "?"}
ASSISTANT = {"role": "assistant", "content": "!"}


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[" * 100_000,
        '{"messages": ' + "[" * 100_000,
        "[]",
        {"model": "m"},
        {"messages": [], "sytem": "x"},
        {"messages": {}},
        {"messages": [], "system": ""},
        {"messages": [], "model": 1},
        {"messages": [USER]},
        {"messages": [ASSISTANT, USER]},
        {"messages": [USER, USER]},
        {"messages": [USER | {"name": "x"}, ASSISTANT]},
        {"messages": [USER | {"content": None}, ASSISTANT]},
        {"messages": [USER | {"content": "\ud800"}, ASSISTANT]},
        b"\xff\xfe\xff",
        b'{"messages": [], "model": "\xff"}',
    ],
)
def test_other_json_is_refused_in_one_line(tmp_path: Path, content: object) -> None:
    path = tmp_path / "talk.json"
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(WrongUsage) as raised:
        Transcript.load(path)
    assert str(raised.value).startswith(f"{path} is not a saved conversation: ")
    assert "\n" not in str(raised.value)


def test_load_refuses_pipes_devices_and_missing_files(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, tmp_path / "no", Path("/dev/zero")):
        with pytest.raises(WrongUsage, match=str(path)):
            Transcript.load(path)


@pytest.mark.parametrize(
    ("line", "some", "none"),
    [
        ("/", {"/help ", "/policy ", "/quit"}, set()),
        ("/s", {"/set ", "/save ", "/stats", "/system "}, {"/help "}),
        ("/w", {"/why"}, {"/stats"}),
        ("/help ", {"policy ", "set"}, {"random"}),
        ("/help policy ra", {"random"}, {"fiddler"}),
        ("/policy ", set(PRESETS), set()),
        ("/policy ra", {"random"}, {"fiddler"}),
        ("/policy random ", {"seed=", "churn="}, {"scope="}),
        ("/policy random seed=1 churn=", {"churn=0", "churn=1"}, set()),
        ("/policy dali ", {"window=", "prediction="}, {"depth="}),
        ("/policy dali prediction=", {"prediction=none", "prediction=lookahead"}, {"prediction=greedy"}),
        ("/set to", {"top_k=", "top_p="}, {"stop="}),
        ("/set top_k=1 ignore_eos=", {"ignore_eos=on", "ignore_eos=off"}, set()),
        ("/load {}/talk", {".json"}, set()),
        ("//", set(), {"help "}),
        ("what is /", set(), {"help "}),
        ("/system a\n/", set(), {"help "}),
    ],
)
def test_completion(tmp_path: Path, line: str, some: set[str], none: set[str]) -> None:
    (tmp_path / "talk.json").touch()
    text = line.replace("{}", str(tmp_path))
    found = {c.text for c in CommandCompleter().get_completions(Document(text), CompleteEvent())}
    assert some <= found
    assert not none & found
    assert some or not found


async def test_history_file_is_private_and_damaged_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "state" / "tandem" / "history"
    warnings: list[str] = []
    first = PrivateFileHistory(path, warnings.append)
    assert [line async for line in first.load()] == []
    for line in ("one", "two\nlines \ud800", "three"):
        first.append_string(line)
    path.write_bytes(path.read_bytes() + b"\xff damaged\n{}\n")
    second = PrivateFileHistory(path, warnings.append)
    assert [line async for line in second.load()] == ["three", "two\nlines \ud800", "one"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert warnings == []

    path.unlink()
    path.mkdir()
    third = PrivateFileHistory(path, warnings.append)
    assert [line async for line in third.load()] == []
    third.append_string("four")
    assert len(warnings) == 1
    assert third.get_strings() == ["four"]


async def test_history_file_is_cut_to_its_newest_lines(tmp_path: Path) -> None:
    path = tmp_path / "tandem" / "history"
    path.parent.mkdir()
    for lines, kept in ((2 * MAX_LINES, 2 * MAX_LINES), (2 * MAX_LINES + 1, MAX_LINES)):
        path.write_text("".join(f'"line {n}"\n' for n in range(lines)))
        loaded = [line async for line in PrivateFileHistory(path, pytest.fail).load()]
        assert loaded == [f"line {n}" for n in reversed(range(lines - kept, lines))]
        assert path.read_text().splitlines() == [f'"{line}"' for line in reversed(loaded)]


async def test_history_does_not_follow_a_link(tmp_path: Path) -> None:
    path = tmp_path / "tandem" / "history"
    path.parent.mkdir()
    (tmp_path / "other").write_text("")
    path.symlink_to(tmp_path / "other")
    warnings: list[str] = []
    history = PrivateFileHistory(path, warnings.append)
    assert [line async for line in history.load()] == []
    history.append_string("one")
    assert len(warnings) == 1
    assert (tmp_path / "other").read_text() == ""
