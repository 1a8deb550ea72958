"""Starts of other interpreters: their command, configuration, cores, and exit with their parent.

The parent starts `python -P -m workers.child MODULE --lifeline FD` and keeps the pipe's other end open. The
child reads its configuration from the pipe (4 bytes length, big endian, then a msgpack map) and then watches
it: end of file means that the parent has exited, for whatever reason, and the child exits at once. The
configuration may come long after the start: meanwhile the child imports its module. The kernel's PDEATHSIG
usually acts a little earlier. Children ignore SIGINT: a Ctrl-C in the terminal reaches them too, and the
supervisor stops them in order.
"""

from __future__ import annotations

import ctypes
import io
import logging
import os
import resource
import signal
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from msgspec import msgpack

from protocol.program import LineFormatter, VisibleStream

ROOT = Path(__file__).resolve().parents[1]  # where `-m` finds the packages, from any working directory
# Without -P modules are looked up in the working directory first, which may hold a downloaded model.
PYTHON = (sys.executable, "-P")
CHILD_PROCESS = (*PYTHON, "-m", "workers.child")


def environment(threads: int) -> dict[str, str]:
    """Returns the environment of a child whose numerical libraries use so many threads."""
    # An empty part of PYTHONPATH means the working directory.
    folders = (str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    # OpenMP's idle threads spin by default, which steals the cores that the other processes compute on.
    return os.environ | {
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": "1",  # numpy starts them when it is imported, before a worker is bound
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
    }


def limit_memory(more: int) -> None:
    """Let the process allocate so many more bytes from now on: beyond them an allocation fails."""
    fields = Path("/proc/self/status").read_text().partition("VmData:")[2].split()
    wanted = int(fields[0]) * 1024 + more
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


PR_SET_PDEATHSIG = 1
EXIT_PARENT_GONE = 3
MAX_CONFIG = 1 << 20


def enter(lifeline: int) -> Future[dict[str, Any]]:
    """Exit with the parent from now on, and read the configuration from this descriptor while the caller
    continues; its `role` then prefixes the log lines. What this process prints is `visible`. Exits if no
    supervisor started this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout, sys.stderr = visible_stream(1), visible_stream(2)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    config: Future[dict[str, Any]] = Future()
    threading.Thread(target=_watch, args=(lifeline, config), name="lifeline", daemon=True).start()
    return config


class DroppingOutput(io.RawIOBase):
    """Writes to a descriptor that may be non-blocking, as the pipe to the supervisor is. What a full one does
    not take is dropped; when it does again, a line tells how many lines that were."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._dropped = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: bytes, /) -> int:  # type: ignore[override]  # TextIOWrapper writes bytes alone
        note = b""
        if self._dropped:
            lost = f"{self._dropped} lines were dropped"
            note = f"\n{lost}: the supervisor did not read them in time\n".encode()
        left = self._left(note + data)
        told = len(left) <= len(data)
        self._dropped = left.count(b"\n") if told else self._dropped + data.count(b"\n")
        return len(data)

    def _left(self, data: bytes) -> bytes:
        """Write; returns what is not taken."""
        rest = bytes(data)
        with suppress(BlockingIOError):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        return rest


def visible_stream(descriptor: int) -> VisibleStream:
    """Returns a stream of a child that writes there."""
    output: Any = DroppingOutput(descriptor)
    return VisibleStream(output, errors="replace", line_buffering=True)


def pack_config(config: dict[str, Any]) -> bytes:
    """The bytes that the parent writes into a new child's lifeline."""
    packed: bytes = msgpack.encode(config)
    return len(packed).to_bytes(4, "big") + packed


def pin(cores: list[int]) -> str:
    """Bind this process to these cores. Returns "", or if the system refuses, one line with the reason."""
    if not cores:
        return ""
    try:
        os.sched_setaffinity(0, cores)
    except OSError as e:
        return f"not pinned to cores {cores}: {e.strerror}"
    return ""


def _watch(lifeline: int, received: Future[dict[str, Any]]) -> NoReturn:
    try:
        with open(lifeline, "rb", closefd=False) as pipe:
            head = pipe.read(4)
            length = int.from_bytes(head, "big")
            if length > MAX_CONFIG:
                _give_up("the lifeline holds no configuration")
            packed = pipe.read(length)
    except OSError as e:
        _give_up(
            f"the lifeline {lifeline} cannot be read ({e.strerror}): this process is started by launch.py"
        )
    if len(head) < 4 or len(packed) < length:
        os._exit(EXIT_PARENT_GONE)
    config: dict[str, Any] = msgpack.decode(packed)
    role = config.get("role", "child")
    _open_log(role, config.get("log_level", "INFO"), config.get("runtime", ""))
    received.set_result(config)
    os.read(lifeline, 1)  # returns only at end of file: the parent writes nothing after the configuration
    os._exit(EXIT_PARENT_GONE)


def _open_log(role: str, level: str, runtime: str) -> None:
    """Log lines begin with the role."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(f"[{role}] %(message)s"))
    if runtime:
        handler.addFilter(ToldOnce(Path(runtime)))
    logging.basicConfig(level=level, handlers=[handler], force=True)


class ToldOnce(logging.Filter):
    """Drops a record about a `fact` that a process of the same engine has told."""

    def __init__(self, runtime: Path) -> None:
        super().__init__()
        self._runtime = runtime

    def filter(self, record: logging.LogRecord) -> bool:
        fact = getattr(record, "fact", None)
        try:
            if fact is not None:
                (self._runtime / f"told-{fact}").touch(0o600, exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            pass  # that disk is full, too
        return True


def _give_up(why: str) -> NoReturn:
    """End the process from a thread other than its main one."""
    print(why, file=sys.stderr, flush=True)
    os._exit(1)
