"""launch.py under a Python without the required packages: the project's `.venv` takes over."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import venv
from contextlib import suppress
from pathlib import Path

import pytest

from workers.lifetime import ROOT

OUTPUT = "echo all; echo why >&2; sleep 0.5;"


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the standard library alone."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    return folder / "bin" / "python"


def run(python: Path, launcher: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), "-u", str(launcher), *arguments], capture_output=True, text=True, timeout=60, cwd="/"
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout without an environment: the launcher and what it reads, and the packages."""
    for name in ("launch.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for package in ("launch", "pipeline", "protocol", "shm", "workers"):
        (tmp_path / package).symlink_to(ROOT / package)
    return tmp_path


def test_command_continues_with_the_environment_of_the_checkout(bare_python: Path, checkout: Path) -> None:
    (checkout / ".venv").symlink_to(sys.prefix)
    done = run(bare_python, checkout / "launch.py", "cache", "--no-such-option")
    assert done.returncode == 2
    assert "--no-such-option" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_an_environment_the_error_names_the_command_that_makes_it(bare_python, checkout) -> None:
    done = run(bare_python, checkout / "launch.py", "doctor")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"launch.py: packages are missing; first: cd {checkout} && make run\n"


def test_complete_environment_is_used_as_it_is(checkout: Path) -> None:
    """The checkout has no .venv, so a second environment would be an error."""
    done = run(Path(sys.executable), checkout / "launch.py", "cache", "--no-such-option")
    assert done.returncode == 2
    assert "--no-such-option" in done.stderr


def test_interrupt_while_modules_are_imported_is_one_line(bare_python: Path, checkout: Path) -> None:
    """Sent before the first interpreter runs, it reaches the second one's first moments."""
    (checkout / ".venv").symlink_to(sys.prefix)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        for python in (Path(sys.executable), bare_python):
            command = [str(python), str(checkout / "launch.py"), "doctor"]
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            ) as process:
                process.send_signal(signal.SIGINT)
                assert process.communicate(timeout=60) == ("", "launch.py: interrupted\n")
                assert process.returncode == 1
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def everything(terminal: int) -> bytes:
    """Returns what was written to a terminal whose other end is closed; it may come in pieces."""
    said = b""
    with suppress(OSError):  # what a terminal says at its end
        while piece := os.read(terminal, 1 << 16):
            said += piece
    return said


@pytest.mark.parametrize("on_terminal", [False, True])
def test_step_of_make_says_what_it_does_and_where_its_output_is(tmp_path: Path, on_terminal: bool) -> None:
    log = tmp_path / "log"
    for code in (0, 3):
        log.write_text("")
        ours, theirs = os.openpty()
        shown = subprocess.run(
            [ROOT / ".ci/step", log, "doing it", "sh", "-c", f"{OUTPUT} exit {code}"],
            stdout=subprocess.PIPE,
            stderr=theirs if on_terminal else subprocess.PIPE,
            env={**os.environ, "TERM": "xterm"},
        )
        assert (shown.returncode, shown.stdout) == (code, b"")
        assert log.read_text().splitlines()[1:] == ["all", "why"]
        os.close(theirs)
        said = (everything(ours) if on_terminal else shown.stderr).decode()
        os.close(ours)
        *before, last = re.split(r"\r\x1b\[2K|\r?\n", said.removesuffix("\n").removesuffix("\r"))
        failure = f"make: doing it failed: why (all of it: {log})"
        if on_terminal:
            assert re.fullmatch(r"make: doing it, \d+ s  why", before[-1])
            assert last == failure * (code > 0)
        else:
            assert [*before, last] == ["make: doing it ...", *[failure] * (code > 0)]


def test_step_of_make_names_the_file_that_is_compiled_and_no_warning(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    output = "echo '  cc -O3 -Wall -Iinclude -c c/avx2.c -o /tmp/avx2.o -pthread'; echo WARNING: old; sleep 1"
    command = [ROOT / ".ci/step", tmp_path / "log", "compiling", "sh", "-c", output]
    subprocess.run(command, stderr=theirs, env={**os.environ, "TERM": "xterm"}, check=True)
    os.close(theirs)
    said = everything(ours).decode()
    assert re.search(r"make: compiling, \d+ s  c/avx2\.c\r", said)
    assert "WARNING" not in said
    os.close(ours)
