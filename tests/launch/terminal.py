"""A terminal for tests: a command in tmux, driven by keys and read from its screen."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import psutil
from engines import LAUNCH, ROOT

TMUX = shutil.which("tmux")
# The command's exit code, and whether the terminal echoes typed text again.
LIMIT = 30.0  # seconds; a start takes two or three on an idle machine
PROLOGUE = "trap : INT; "  # a Ctrl-C is the command's, not its shell's
EPILOGUE = "; echo EXIT=$?; stty -a | tr ' ;' '\\n\\n' | grep -x -e echo -e -echo; read never"


class Terminal:
    """`launch.py` in a terminal of its own; ended, with everything that it started, with the block."""

    def __init__(self, *arguments: str, env: dict[str, str], width: int = 80, height: int = 40) -> None:
        self._folder = tempfile.mkdtemp(prefix="tt-", dir="/tmp")  # short: socket paths are
        self._size = ("-x", str(width), "-y", str(height))
        # tmux sets TERM in its windows, so another value has to be set inside
        inside = {"TERM": "screen-256color", "LC_ALL": "C.UTF-8"} | env
        words = [f"{name}={value}" for name, value in inside.items()]
        self._command = PROLOGUE + shlex.join(["env", *words, sys.executable, LAUNCH, *arguments]) + EPILOGUE

    def __enter__(self) -> Terminal:
        self._tmux("new-session", "-d", *self._size, "-c", str(ROOT), "sh", "-c", self._command)
        return self

    def __exit__(self, *_: object) -> None:
        shell = psutil.Process(int(self._tmux("display-message", "-p", "#{pane_pid}")))
        started = shell.children(recursive=True)
        self._tmux("kill-server")
        _, left = psutil.wait_procs(started, timeout=20)
        for process in left:
            process.kill()
        shutil.rmtree(self._folder)

    def keys(self, *names: str) -> None:
        """Press keys by tmux's names: Enter, C-c, Tab, Up, M-Enter."""
        self._tmux("send-keys", *names)

    def type(self, text: str) -> None:
        self._tmux("send-keys", "-l", text)

    def line(self, text: str) -> None:
        self.type(text)
        self.keys("Enter")

    def paste(self, text: str) -> None:
        """Paste as a terminal does: in brackets, if the command has requested them."""
        self._tmux("set-buffer", text)
        self._tmux("paste-buffer", "-p")

    def screen(self) -> str:
        """The screen and its scrollback, lines without their trailing spaces."""
        lines = self._tmux("capture-pane", "-p", "-S", "-200").splitlines()
        return "\n".join(line.rstrip() for line in lines).rstrip("\n")

    def until(self, pattern: str | Callable[[str], object], limit: float = LIMIT) -> str:
        """The screen as soon as the pattern is found in it, or the condition holds."""
        holds = pattern if callable(pattern) else re.compile(pattern, re.MULTILINE).search
        deadline = time.monotonic() + limit
        while not holds(shown := self.screen()):
            assert time.monotonic() < deadline, f"{pattern!r} did not come; the screen is:\n{shown}"
            time.sleep(0.05)
        return shown

    def end(self) -> tuple[int, bool]:
        """Wait for the command's end: its exit code, and whether the terminal echoes again."""
        shown = self.until(r"^EXIT=\d+\n-?echo$")
        return int(shown.rpartition("EXIT=")[2].split()[0]), shown.endswith("\necho")

    def pid(self) -> int:
        """Of `launch.py`."""
        shell = psutil.Process(int(self._tmux("display-message", "-p", "#{pane_pid}")))
        return next(p.pid for p in shell.children(recursive=True) if LAUNCH in p.cmdline())

    def _tmux(self, *arguments: str) -> str:
        assert TMUX is not None
        command = [TMUX, "-u", "-S", f"{self._folder}/tmux", "-f", os.devnull, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout
