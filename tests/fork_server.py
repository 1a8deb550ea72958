"""Engine processes forked from one that has imported everything, instead of a Python start for each.

Importing torch, the coordinator's and the workers' modules takes more processor time than most tests do.
A fork server therefore starts `workers.child` for engines within a test process: with the same entry point,
arguments, descriptors, environment, working directory and parent as `asyncio.create_subprocess_exec` would.
Engines that a test starts by a command line run as users run them.

A forked process must be a child of the test process, which waits for it and ends it by its own exit. Linux
makes the nearest subreaper among its ancestors the parent of an orphan: the test process is a subreaper while
it waits for the server's answer.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[1])
ENTRY = ("-m", "workers.child")
PRELOADED = (
    "torch",
    "pipeline.coordinator",
    "pipeline.loader",
    "pipeline.device.cpu",
    "workers.child",
    "workers.expert_worker",
    "workers.prefetcher",
    "workers.kernels.reference",
    "transformers.modeling_rope_utils",
    "transformers.models.auto.configuration_auto",
    "transformers.models.auto.tokenization_auto",
)
SETTINGS = {  # numerical libraries read these once, so every engine process has the same
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
    "OPENBLAS_NUM_THREADS": "1",
}
PR_SET_CHILD_SUBREAPER = 36
START_LIMIT = 100.0  # seconds; importing takes a few on an idle machine
ADOPTION_LIMIT = 10.0  # seconds until the kernel has given an orphan to the test process
MAX_REQUEST = 1 << 20
COMMAND_BYTES = 1000  # for the command line that a forked process shows

_prctl = ctypes.CDLL(None).prctl


class ForkedProcess:
    """As much of `asyncio.subprocess.Process` as the supervisor uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._reap)

    async def wait(self) -> int:
        return await asyncio.shield(self._exited)

    def send_signal(self, number: int) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._exited.set_result(self.returncode)


class ForkServer:
    """The test process's side. The server is started when it is first needed."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._exec = asyncio.create_subprocess_exec

    def install(self) -> None:
        """Start `workers.child` through this server from now on, and everything else as before."""
        asyncio.create_subprocess_exec = self._start  # type: ignore[assignment]

    def remove(self) -> None:
        asyncio.create_subprocess_exec = self._exec

    def close(self) -> None:
        """End the server; processes that it started continue."""
        self.remove()
        if self._socket is not None and self._server is not None:
            self._socket.close()
            self._server.wait(START_LIMIT)

    async def _start(self, *command: Any, **options: Any) -> Any:
        if command[1:3] != ENTRY:
            return await self._exec(*command, **options)
        (lifeline,) = options["pass_fds"]
        request = {
            "argv": command[2:],
            "environment": options["env"],
            "lifeline": lifeline,
            "folder": os.getcwd(),
            "cores": sorted(os.sched_getaffinity(0)),
            "umask": _umask(),
            "parent": os.getpid(),
        }
        connection = self._connection()
        _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(connection, [json.dumps(request).encode()], [lifeline, options["stdout"]])
            answer = connection.recv(100)
        finally:
            _prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise RuntimeError("the fork server ended")
        return ForkedProcess(int(answer))

    def _connection(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.settimeout(START_LIMIT)
            with theirs:
                self._server = subprocess.Popen(
                    [sys.executable, "-P", __file__, str(theirs.fileno()), " " * COMMAND_BYTES],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    env=os.environ | SETTINGS | {"PYTHONPATH": ROOT},
                )
        return self._socket


def _umask() -> int:
    mask = os.umask(0o777)
    os.umask(mask)
    return mask


def serve(connection: socket.socket) -> None:
    """The server: until the test process closes its end."""
    gc.disable()  # as in an executed child: what is imported does not become garbage
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("the fork server has threads, and a fork would lose them")
    while True:
        packet, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST, 2)
        if not packet:
            return
        middle = os.fork()
        if middle == 0:
            if os.fork() == 0:
                _run(json.loads(packet), *descriptors, connection)
            os._exit(0)
        os.waitpid(middle, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _run(request: dict[str, Any], lifeline: int, stdout: int, connection: socket.socket) -> None:
    """Run the forked process until its exit. Does not return."""
    code = 1
    try:
        deadline = time.monotonic() + ADOPTION_LIMIT
        while os.getppid() != request["parent"]:
            if time.monotonic() > deadline:
                sys.exit("the test process did not become this process's parent")
            time.sleep(0.0005)
        os.setsid()
        connection.send(str(os.getpid()).encode())
        os.dup2(stdout, 1)
        os.dup2(stdout, 2)
        _take_over(request, lifeline)
        importlib.import_module("workers.child").main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _take_over(request: dict[str, Any], lifeline: int) -> None:
    """Become what an executed process would be: no other descriptors, and the requested environment."""
    wanted = request["lifeline"]
    others = [int(name) for name in os.listdir("/proc/self/fd")]
    if lifeline != wanted:
        os.dup2(lifeline, wanted)
    for descriptor in others:
        if descriptor > 2 and descriptor != wanted:
            try:
                os.close(descriptor)
            except OSError:
                continue  # the one that listed the folder
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cores"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch = sys.modules["torch"]
    torch.set_num_threads(int(request["environment"]["OMP_NUM_THREADS"]))
    sys.argv = list(request["argv"])
    _show_command([sys.executable, *ENTRY, *sys.argv[1:]])


def _show_command(words: list[str]) -> None:
    """Overwrite the command line that other processes see, for programs that tell processes apart by it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5), which counts from 1
    shown = "".join(f"{word}\0" for word in words).encode()[: end - start]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
