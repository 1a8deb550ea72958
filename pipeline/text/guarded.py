"""Process entry: a model's tokenizer under limits, in a process that can be killed.

A tokenizer's files may hold any regular expression and any replacement, which the library applies to the
tokens as it loads them: it may not end, or fill the memory, without a moment in which a signal is handled.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np

from pipeline.errors import ModelError, RequestError, UsageError
from pipeline.text.tokenizer import Tokenizer
from workers.interpreter import PYTHON, environment

LOAD_SECONDS = 20  # of the processor; the largest known tokenizer takes 3
ENCODE_RATE = 20_000  # bytes a second at least
MEMORY = 4 << 30  # bytes that the library may allocate
WALL_FACTOR = 30  # times slower than the processor: a disk that has to be read first, a busy machine
POLL_SECONDS = 0.02
PR_SET_PDEATHSIG = 1
NONE, IDS, FAILED, FAILED_AS_REQUEST = b"-", b"+", b"!", b"?"  # the first byte of an answer


class GuardedLoad:
    """A trial load of a model's tokenizer. Starts at once; a context manager that ends it."""

    def __init__(self, model_dir: Path) -> None:
        """Forks: the calling process has no threads that hold locks, and imports nothing for this."""
        self._model = model_dir
        self._answer, given = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _run_forked(parent, model_dir, given)
        os.close(given)
        self._code: int | None = None

    def wait(self, waiting: Callable[[], None]) -> None:
        """Raises ModelError, one line, where the tokenizer cannot be loaded within the limits. `waiting` is
        called meanwhile, and may raise. Does nothing after the first time."""
        if self._code is not None:
            return
        until = time.monotonic() + WALL_FACTOR * LOAD_SECONDS
        while not select.select([self._answer], [], [], POLL_SECONDS)[0]:
            waiting()
            if time.monotonic() > until:
                os.kill(self._pid, signal.SIGKILL)
        answer = os.read(self._answer, 4096)  # nothing where the process was killed
        _check(self._model, self._reap(), answer, LOAD_SECONDS)

    def _reap(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code

    def __enter__(self) -> GuardedLoad:
        return self

    def __exit__(self, *_: object) -> None:
        if self._code is None:
            os.kill(self._pid, signal.SIGKILL)
            self._reap()
        os.close(self._answer)


def _run_forked(parent: int, model_dir: Path, output: int) -> NoReturn:
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):  # the library writes a report of each of its panics to 2
            os.dup2(null, standard)
        os._exit(_run(parent, LOAD_SECONDS, MEMORY, model_dir, False, output))
    finally:
        os._exit(1)


def encode_guarded(model_dir: Path, text: str) -> list[int] | None:
    """Ids of a text, None for a model without tokenizer. Raises ModelError where its tokenizer fails or takes
    too long, RequestError where the text is not valid Unicode."""
    given = text.encode(errors="surrogatepass")
    with _start(model_dir, "--encode", stdin=subprocess.PIPE) as process:
        answer = process.communicate(given)[0]
    answer = _check(model_dir, process.returncode, answer, _encode_seconds(given))
    ids: list[int] = np.frombuffer(answer[1:], np.int32).tolist()
    return ids if answer[:1] == IDS else None


def _encode_seconds(given: bytes) -> int:
    return LOAD_SECONDS + len(given) // ENCODE_RATE


def _start(model_dir: Path, *how: str, stdin: int) -> subprocess.Popen[bytes]:
    # stderr: the library writes a report of each of its panics there.
    limits = (str(os.getpid()), str(LOAD_SECONDS), str(MEMORY))
    command = (*PYTHON, "-m", "pipeline.text.guarded", *limits, str(model_dir), *how)
    null = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=null, env=environment(1))


def _check(model_dir: Path, code: int, answer: bytes, seconds: int) -> bytes:
    """The answer. Raises what the other process raised, or ModelError for its end."""
    if code == 0 and answer[:1] in (FAILED, FAILED_AS_REQUEST):
        kind = ModelError if answer[:1] == FAILED else RequestError
        raise kind(answer[1:].decode(errors="replace"))
    if code == 0:
        return answer
    ended = signal.Signals(-code).name if code < 0 else f"code {code}"
    what = {
        -signal.SIGPROF: f"took longer than {seconds} s",
        -signal.SIGABRT: f"failed, or needs more than {MEMORY / (1 << 30):g} GB of memory",
    }
    raise ModelError(f"the tokenizer in {model_dir} {what.get(code, f'ended its process ({ended})')}")


def _limit(seconds: int, memory: int) -> None:
    """From now on. The kernel ends the process, also within the library."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    limit_memory(memory)


def limit_memory(more: int) -> None:
    """Of what this process allocates from now on, in bytes: beyond it the allocation fails."""
    fields = Path("/proc/self/status").read_text().partition("VmData:")[2].split()
    wanted = int(fields[0]) * 1024 + more
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def main(parent: int, seconds: int, memory: int, model_dir: Path, encode: bool) -> int:
    """Load the tokenizer, and write the ids of the text on stdin; or a ModelError's line. Returns the exit
    code."""
    output = os.dup(1)
    os.dup2(2, 1)
    return _run(parent, seconds, memory, model_dir, encode, output)


def _run(parent: int, seconds: int, memory: int, model_dir: Path, encode: bool, output: int) -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # which has exited already
        return 1
    from transformers import PreTrainedTokenizerFast  # noqa: F401 - takes memory, and time on a cold disk

    try:
        _limit(seconds, memory)
        answer = _answer(Tokenizer.load(model_dir), encode)
    except UsageError as e:
        kind = FAILED_AS_REQUEST if isinstance(e, RequestError) else FAILED
        answer = kind + str(e).encode(errors="replace")[:2000]
    with os.fdopen(output, "wb") as file:
        file.write(answer)
    return 0


def _answer(tokenizer: Tokenizer | None, encode: bool) -> bytes:
    if tokenizer is None or not encode:
        return NONE
    given = sys.stdin.buffer.read()
    signal.setitimer(signal.ITIMER_PROF, _encode_seconds(given))
    try:
        ids = tokenizer.encode(given.decode(errors="surrogatepass"))
    except RequestError:
        raise
    except BaseException as e:  # the library raises any
        reason = " ".join(str(e).split())[:200] or type(e).__name__
        raise ModelError(f"the model's tokenizer failed: {reason}") from e
    return IDS + np.array(ids, np.int32).tobytes()


if __name__ == "__main__":
    numbers = (int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    os._exit(main(*numbers, Path(sys.argv[4]), "--encode" in sys.argv[5:]))
