"""What others wrote, at every exit to a terminal or a log: answers, names of tensors and files, an engine's
errors, a child's output. Commands and children are real; only an engine is played."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq
from engines import ROOT, run, start
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from launch.runtime import EngineInfo, RuntimeDir
from launch.terminal.progress import ProgressDisplay
from launch.terminal.tables import Column, Table, VisibleConsole, render
from protocol.codec import decode, encode
from protocol.messages import VERSION, Done, Error, Generate, Heartbeat, Hello, Token, Welcome
from protocol.program import escaped, one_line, visible
from protocol.sockets import bind_router
from workers.lifetime import pack_config

# Clears the screen, writes the clipboard, makes a link; C1; a line over the line; separators; an override.
EVIL = "\x1b[2J\x1b]52;c;eA==\x07\x1b]8;;http://x\x1b\\\x9b2J\x9d0;x\x9c\ra\vb\x85c\u2028d\u2029e\u202e[link=x]f[/link]"
LINES = f"one\n\ttwo {EVIL}\n"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def test_every_character_that_controls_a_terminal_is_replaced() -> None:
    every = "".join(map(chr, range(0x11000)))
    kept = visible(every)
    assert {a for a, b in zip(every, kept, strict=True) if a != b} == set(CONTROL.findall(every))
    assert set(kept) - {"\n", "\t"} == set(one_line(every))
    for text in ("a\tb\nc", "漢 é 🙂 \u200f", ""):
        assert visible(text) == text


@given(st.text(st.characters(exclude_categories=[])))
def test_escaped_json_is_the_same_value(text: str) -> None:
    written = escaped(json.dumps({text: [text]}, ensure_ascii=False))
    assert not CONTROL.search(written)
    assert json.loads(written) == {text: [text]}


# --- answers and errors of an engine -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """An engine's name, whose answers and errors are EVIL."""
    runtime = RuntimeDir.claim(f"evil-{os.getpid()}")
    context, stopped = zmq.Context(), threading.Event()
    socket = bind_router(context, runtime.endpoint("client.sock"))
    thread = threading.Thread(target=play, args=(socket, stopped))
    thread.start()
    runtime.publish(EngineInfo(runtime.name, os.getpid(), "m", runtime.endpoint("client.sock"), VERSION))
    yield runtime.name
    stopped.set()
    thread.join()
    context.destroy(0)
    runtime.remove()


def play(socket: zmq.Socket[bytes], stopped: threading.Event) -> None:
    known = set[bytes]()
    while not stopped.is_set():
        answers: list[tuple[bytes, object]] = [(peer, Heartbeat()) for peer in known]
        if socket.poll(200):
            peer, *frames = socket.recv_multipart()
            match decode(frames):
                case Hello():
                    known.add(peer)
                    welcome = Welcome(VERSION, "e", "m", "f", "cpu", "p", True, 9, 9, True, True)
                    answers.append((peer, welcome))
                case Generate(request=request, prompt="error"):
                    answers.append((peer, Error(request, LINES)))
                case Generate(request=request):
                    answers += [(peer, Token(request, 0, 5, LINES)), (peer, Done(request, "stop", text=EVIL))]
        for peer, message in answers:
            with suppress(zmq.ZMQError):  # a client that has gone
                socket.send_multipart([peer, *encode(message)])


def test_an_answer_is_exact_in_a_file_and_in_json(engine: str, tmp_path: Path) -> None:
    written = []
    for options in ([], ["--json"]):
        with (tmp_path / "out").open("wb") as out:
            assert start("generate", "x", "--connect", engine, *options, stdout=out).wait(30) == 0
        written.append((tmp_path / "out").read_bytes().decode())
    plain, as_json = written
    assert plain == f"{LINES}{EVIL}\n"
    assert json.loads(as_json)["text"] == LINES + EVIL
    assert not CONTROL.search(as_json)


def read_terminal(terminal: int) -> str:
    """What is shown until all processes have closed it."""
    shown = b""
    with suppress(OSError):
        while part := os.read(terminal, 4096):
            shown += part
    return shown.decode()


def test_an_answer_cannot_control_a_terminal(engine: str) -> None:
    terminal, end = os.openpty()
    with start("generate", "x", "--connect", engine, stdout=end, stderr=subprocess.PIPE) as process:
        os.close(end)
        shown = read_terminal(terminal)
        process.wait(30)
    os.close(terminal)
    assert shown == f"{visible(LINES + EVIL)}\n".replace("\n", "\r\n")


def test_an_error_of_an_engine_is_a_line(engine: str) -> None:
    code, out, err = run("generate", "error", "--connect", engine)
    assert (code, out, err) == (2, "", f"launch.py: {one_line(LINES)}\n")


# --- names -----------------------------------------------------------------------------------------------


def test_the_names_of_files_and_engines_are_shown_in_a_line(tmp_path: Path) -> None:
    name = EVIL.replace("/", "")
    for arguments in (["score", "--text"], ["generate", "hi", "--model"]):
        code, out, err = run(*arguments, str(tmp_path / name))
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert one_line(name) in err
    code, _, err = run("generate", "hi", "--connect", name)
    assert (code, err.count("\n"), CONTROL.search(err.rstrip("\n"))) == (2, 1, None)


# --- logs, tables and displays ----------------------------------------------------------------------------


CHILD = """
import logging, sys, warnings
def main(config):
    logging.getLogger("x").warning("first %s", config["text"])
    logging.getLogger("other").addHandler(logging.StreamHandler())  # as libraries do
    logging.getLogger("other").error("second %s", config["text"])
    warnings.warn("third " + config["text"])
    print("fourth", config["text"])
    raise ValueError("fifth " + config["text"])
"""


def test_a_child_cannot_control_a_terminal_by_what_it_logs_and_prints(tmp_path: Path) -> None:
    (tmp_path / "evil_module.py").write_text(CHILD)
    reader, lifeline = os.pipe()
    os.write(lifeline, pack_config({"role": "loader", "text": LINES}))
    terminal, end = os.openpty()
    command = [sys.executable, "-m", "workers.child", "evil_module", "--lifeline", str(reader)]
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    with subprocess.Popen(
        command, stdout=end, stderr=end, pass_fds=[reader], env=os.environ | {"PYTHONPATH": path}
    ) as process:
        os.close(end)
        shown = read_terminal(terminal)
        assert process.wait(30) == 1
    for descriptor in (terminal, reader, lifeline):
        os.close(descriptor)
    lines = shown.replace("\r\n", "\n").split("\n")
    assert lines[0] == f"[loader] first {one_line(LINES)}"
    text = "\n".join(lines)
    assert all(f"{word} {visible(LINES)}" in text for word in ("third", "fourth", "fifth"))
    assert not CONTROL.search(text)


def test_tables_and_displays_show_names_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    names: Column[str | Text] = Column("name [bold]b[/bold]", lambda name: name, text=True)
    table = Table([names], [EVIL, Text(EVIL)], title=EVIL)
    plain = render(table, EVIL, max_width=110)
    assert not CONTROL.search(plain)
    assert plain.count("[link=x]f[/link]") == 4
    assert "[bold]b[/bold]" in plain
    coloured = VisibleConsole(file=io.StringIO(), force_terminal=True, width=100)
    coloured.print(table, Text(EVIL, style="red"), EVIL)
    assert not CONTROL.search(re.sub("\x1b\\[[0-9;]*m", "", coloured.file.getvalue()))

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with ProgressDisplay("items") as display:
        display.update(EVIL, note=EVIL)
    drawn = re.sub("\r|\x1b\\[[?0-9;]*[A-Za-z]", "", sys.stderr.getvalue())
    assert "2J" in drawn
    assert not CONTROL.search(drawn)
