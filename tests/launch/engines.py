"""Helpers of these tests: `launch.py` as a process, and the files and processes of an engine."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
from fork_server import ForkedPython

from launch.runtime import segments
from pipeline.checkpoint.index import CheckpointIndex, fingerprint
from pipeline.models.facts import expert_shape
from protocol.sockets import runtime_root
from shm.layout import format_named
from shm.store import store_name

ROOT = Path(__file__).parents[2]
LAUNCH = str(ROOT / "launch.py")
LIMIT = 120.0  # seconds; a start takes two or three on an idle machine


def start(*arguments: str, executed: bool = False, **options: Any) -> subprocess.Popen[str]:
    """Start `launch.py`. `executed`: as users do, by a Python of its own, with its engine; else by a fork.
    `options`: of Popen."""
    if executed:
        return subprocess.Popen([sys.executable, LAUNCH, *arguments], text=True, **options)
    return ForkedPython(LAUNCH, *arguments, **options)


def launch(
    *arguments: str, limit: float = LIMIT, written: str = "", **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run `launch.py` with this on its stdin, for at most `limit` seconds. `options`: of `start`."""
    pipe = subprocess.PIPE
    with start(*arguments, stdin=pipe, stdout=pipe, stderr=pipe, **options) as process:
        try:
            out, err = process.communicate(written, limit)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def run(*arguments: str, **options: Any) -> tuple[int, str, str]:
    """Run `launch.py` to its end: exit code, stdout and stderr. `options`: of `start`."""
    done = launch(*arguments, **options)
    return done.returncode, done.stdout, done.stderr


class Launched:
    """A running `launch.py`; its stderr is kept in a file. Killed at the end of the block."""

    def __init__(
        self,
        *arguments: str,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.PIPE,
        executed: bool = False,
    ) -> None:
        """`executed`: of `start`."""
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed at the end of the block
        self.process = start(*arguments, executed=executed, stdin=stdin, stdout=stdout, stderr=self._stderr)

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(LIMIT)
        if self.process.stdout is not None:
            self.process.stdout.close()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._stderr.close()

    @property
    def stderr(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()

    def line(self) -> str:
        """The next line of stdout; "" when the process has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, module: str) -> psutil.Process:
        """The first child that runs this module."""
        return next(c for c in self.children() if runs(c, module))

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, limit: float = LIMIT) -> tuple[int, str, str]:
        """Wait for the end: exit code, the rest of stdout, all of stderr."""
        out, _ = self.process.communicate(timeout=limit)
        return self.process.returncode, out or "", self.stderr


def runs(process: psutil.Process, module: str) -> bool:
    try:
        return module in process.cmdline()
    except psutil.Error:  # it has ended
        return False


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def engines_left() -> list[str]:
    """Names of the existing runtime directories."""
    return sorted(p.name for p in runtime_root().iterdir() if not p.name.startswith("."))


def store_of(model: Path, format_name: str = "bf16") -> Path:
    """The path of a checkpoint's store in shared memory."""
    return Path("/dev/shm" + store_name(fingerprint_of(model, format_name)))


def fingerprint_of(model: Path, format_name: str = "bf16") -> str:
    index = CheckpointIndex.open(model)
    return fingerprint(index, format_name, expert_shape(index.config, None, format_named(format_name)).tile)


def own_segments(name: str) -> list[str]:
    """Of this session's engine; another session may have one of the same name."""
    return [path.name for path in segments(runtime_root() / name)]
