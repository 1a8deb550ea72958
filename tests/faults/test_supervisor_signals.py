"""SIGINT, SIGTERM and a closed terminal, while an engine starts, answers and is idle: it stops in order,
soon, and leaves nothing behind."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid

import psutil
import pytest
from marked_engine import MARK, ROOT, Engine, Place, marked
from waiting import wait_until

pytestmark = pytest.mark.timeout(150)

LIMIT = 60.0  # seconds for a start, on a machine that may be busy
SOON = 30.0  # seconds for an orderly end, on such a machine
OPTIONS = ("--workers", "2", "--chunk", "32")
TERMINAL = shutil.which("setsid")


@pytest.mark.parametrize(
    ("child", "signals"),
    [
        ("loader", [signal.SIGHUP]),
        ("coordinator", [signal.SIGTERM]),
        ("coordinator", [signal.SIGINT, signal.SIGINT]),
    ],
)
def test_signals_during_the_start_stop_the_engine(place, child, signals) -> None:
    name = f"early-{os.getpid()}"
    with Engine(place, name) as engine:
        assert wait_until(lambda: engine.doing().startswith(child), LIMIT)
        for number in signals:
            engine.process.send_signal(number)
            time.sleep(0.05)
        code = engine.process.wait(SOON)
        assert code == 0 or len(signals) == 2  # 0: by the signal
        assert engine.processes() == []
        # A file that a killed loader still wrote is the next start's to remove.
        ended_at_once = {"half-written cache"} if len(signals) == 2 else set[str]()
        assert set(place.remains(name)) <= ended_at_once


# --- in a terminal of its own -------------------------------------------------------------------------


class InTerminal:
    """`launch.py` as the leader of a session with a terminal; `shown` is what is on it."""

    def __init__(self, place: Place, *words: str) -> None:
        self.shown = b""
        self._mark = uuid.uuid4().hex
        self._keys, terminal = os.openpty()
        places = {"XDG_RUNTIME_DIR": str(place.runtime), "XDG_CACHE_HOME": str(place.cache)}
        command = [sys.executable, str(ROOT / "launch.py"), *words, "--model", str(place.model)]
        self.process = subprocess.Popen(
            [str(TERMINAL), "--ctty", *command, "--device", "cpu", *place.options],
            env=os.environ | places | {MARK: self._mark, "TERM": "xterm"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
        os.close(terminal)
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> InTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes():
            process.kill()
        self.process.wait(LIMIT)
        self.close()

    def processes(self) -> list[psutil.Process]:
        return list(marked(self._mark))

    def type(self, keys: bytes) -> None:
        os.write(self._keys, keys)

    def close(self) -> None:
        """Close the terminal's window."""
        self._closing.set()
        self._reader.join(LIMIT)  # first: a terminal that is being read is not closed
        if self._keys >= 0:
            os.close(self._keys)
            self._keys = -1

    def _read(self) -> None:
        while not self._closing.is_set():
            if select.select([self._keys], [], [], 0.02)[0]:
                try:
                    self.shown += os.read(self._keys, 4096)
                except OSError:  # the other end is closed
                    return


def closes(terminal: InTerminal) -> None:
    terminal.close()


def interrupts_twice(terminal: InTerminal) -> None:
    for _ in range(2):
        terminal.type(b"\x03")
        time.sleep(0.05)


@pytest.mark.skipif(TERMINAL is None, reason="needs setsid of util-linux")
@pytest.mark.parametrize("does", [closes, interrupts_twice])
def test_engine_of_a_command_stops_when_it_is_interrupted(place, does) -> None:
    """During an answer of an engine that was started for this command, which is slow enough to answer for
    half a minute."""
    name = f"person-{os.getpid()}"
    answer = ("generate", "--prompt-tokens", "5,6,7", "--max-tokens", "250", "--ignore-eos", "--name", name)
    with InTerminal(place, *answer, "--host-slowdown", "500") as terminal:
        assert wait_until(lambda: b"is ready after" in terminal.shown, LIMIT)
        assert wait_until(lambda: not terminal.shown.rstrip().endswith(b"on cpu"), LIMIT)  # it answers
        does(terminal)
        assert terminal.process.wait(SOON) == 1
        assert terminal.processes() == []
        assert place.remains(name) == []
        assert b"Traceback" not in terminal.shown


@pytest.mark.skipif(TERMINAL is None, reason="needs setsid of util-linux")
def test_a_terminal_that_is_closed_while_the_engine_starts(place: Place) -> None:
    name = f"person-{os.getpid()}"
    with InTerminal(place, "serve", "--name", name) as terminal:
        assert wait_until(lambda: b"memory" in terminal.shown, LIMIT)
        terminal.close()
        code = terminal.process.wait(SOON)
        assert terminal.processes() == []
        assert place.remains(name) == [], (code, list(place.runtime.rglob("*")))
