"""Engine processes and commands forked from a process that has imported everything, instead of a Python start
for each.

Importing torch, the coordinator's and the workers' modules takes more processor time than most tests do.
A fork server therefore starts `workers.child` for engines within a test process: with the same entry point,
arguments, descriptors, environment, working directory and parent as `asyncio.create_subprocess_exec` would.
`ForkedPython` starts `launch.py`, or the code of an option `-c`, in the same way, and the engine of a command
that was forked is forked too. What a test executes (`subprocess`) runs as users run it, with its engine.

A forked process must be a child of the process that starts it, which waits for it and ends it by its own
exit. That process has started the server, and Linux lets the server fork a sibling of itself. A command has
a server of its own, forked from it before it starts a thread.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

ROOT = str(Path(__file__).resolve().parents[1])
ENTRY = ("-P", "-m", "workers.child")
PRELOADED = (
    "torch",
    "pipeline.coordinator",
    "pipeline.loader",
    "pipeline.device.cpu",
    "pipeline.text.process",
    "workers.child",
    "workers.expert_worker",
    "workers.prefetcher",
    "workers.kernels.reference",
    "pipeline.generic.backbone",
    "transformers.modeling_rope_utils",
    "transformers.models.auto.configuration_auto",
    "transformers.models.auto.tokenization_auto",
    "launch.cli",
    "uvloop",
    *(f"launch.{name}" for name in ("calibrate", "generate", "score", "serve", "bench.replay")),
    *(f"launch.{name}.command" for name in ("chat", "stress", "bench", "doctor", "cache")),
)
EXIT_AT = "TESTED_EXIT_AT"  # variable: see `_exit_at_steps`
HOOK = "TESTED_HOOK"  # variable: a file that an engine's process executes, if it is there, when it starts
READ_AT_START = ("PYTHON", "LC_", "LANG", "TORCH")  # variables that a forked process cannot change
HUB = ("HF_", "huggingface_hub")  # variables that this package reads when it is imported
SETTINGS = {  # numerical libraries read these once, so every engine process has the same
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
    "OPENBLAS_NUM_THREADS": "1",
}
CLONE_PARENT = 0x8000
CLONE = {"x86_64": 56, "aarch64": 220}[os.uname().machine]  # the number of the system call
START_LIMIT = 100.0  # seconds; importing takes a few on an idle machine
MAX_REQUEST = 1 << 20
MOST_DESCRIPTORS = 16
SPACE = " " * 2000  # for the command line, and the environment, that a forked process shows

PR_GET_TID_ADDRESS = 40

_library = ctypes.PyDLL(None)  # keeps the interpreter's lock, as os.fork does


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
    """The side of the process that starts others. The server is started when it is first needed."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        """`connection`: to a server that runs already."""
        self._server: subprocess.Popen[bytes] | None = None
        self._socket = connection
        self._lock = threading.Lock()
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

    def fork(
        self,
        arguments: list[str],
        environment: Mapping[str, str],
        folder: str,
        streams: tuple[int, int, int],
        passed: tuple[int, ...] = (),
    ) -> int:
        """The id of a new child of this process: of an engine's, if it gets descriptors, its lifeline among
        them, or else a command."""
        request = {
            "argv": arguments,
            "environment": dict(environment),
            "passed": sorted(passed),
            "folder": folder,
            "cores": sorted(os.sched_getaffinity(0)),
            "umask": _umask(),
        }
        descriptors = [*streams, *sorted(passed)]
        with self._lock:
            connection = self._connection()
            socket.send_fds(connection, [json.dumps(request).encode()], descriptors)
            answer = connection.recv(100)
        if not answer:
            raise RuntimeError("the fork server ended")
        return int(answer)

    async def _start(self, *command: Any, **options: Any) -> Any:
        if command[1:4] != ENTRY or options["stdin"] == subprocess.PIPE:  # the doctor's trials have pipes
            return await self._exec(*command, **options)
        return ForkedProcess(self._fork_child(command[3:], **options))

    def _fork_child(
        self,
        arguments: tuple[str, ...],
        *,
        pass_fds: tuple[int, ...],
        env: dict[str, str],
        stdout: int,
        **_: Any,
    ) -> int:
        with open(os.devnull, "rb") as nothing:
            return self.fork(list(arguments), env, os.getcwd(), (nothing.fileno(), stdout, stdout), pass_fds)

    def _connection(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.settimeout(START_LIMIT)
            with theirs:
                self._server = subprocess.Popen(
                    [sys.executable, "-P", __file__, str(theirs.fileno()), SPACE],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    env=os.environ | SETTINGS | {"PYTHONPATH": ROOT, "SPACE": SPACE},
                )
        return self._socket


SERVER = ForkServer()  # the test process's


class ForkedPython(subprocess.Popen[str]):
    """`launch.py` or `-c CODE`, with arguments, in a forked process."""

    passed: tuple[int, ...] = ()

    def __init__(self, *arguments: str, **options: Any) -> None:
        """`options`: of Popen. TypeError for those that a forked process cannot have."""
        if unknown := options.keys() - {"stdin", "stdout", "stderr", "env", "cwd"}:
            raise TypeError(f"a forked process cannot have {unknown}")
        super().__init__([sys.executable, *arguments], text=True, **options)

    def __exit__(self, kind: Any, *error: Any) -> None:
        """Killed where the block has failed; else it is waited for."""
        if kind is not None:
            self.kill()
        super().__exit__(kind, *error)

    def _execute_child(self, args: list[str], *positional: Any) -> None:
        """Instead of Popen's own, which would execute: it has made the pipes, and closes their other ends."""
        cwd, env = positional[4:6]
        streams = positional[9:15]  # of stdin, stdout and stderr: what the process gets, or -1, and our end
        given = tuple(fd if fd >= 0 else standard for standard, fd in enumerate((streams[0], *streams[3::2])))
        environment = os.environ if env is None else env
        for name in {*environment, *os.environ}:
            changed = environment.get(name) != os.environ.get(name)
            if changed and name.startswith(READ_AT_START) and name != "PYTHONPATH":
                raise ValueError(f"the fork server has read {name} already: execute this process")
        self.pid = SERVER.fork(args[1:], environment, str(cwd or os.getcwd()), given, self.passed)
        self._child_created = True
        self._close_pipe_fds(*streams)


class ForkedChild(ForkedPython):
    """An engine's process that runs this module; `lifeline`: the end that it reads."""

    def __init__(self, module: str, lifeline: int, **options: Any) -> None:
        self.passed = (lifeline,)
        super().__init__(ENTRY[-1], module, "--lifeline", str(lifeline), **options)


def _umask() -> int:
    mask = os.umask(0o777)
    os.umask(mask)
    return mask


def preload() -> None:
    gc.disable()  # as in an executed child: what is imported does not become garbage
    for name in PRELOADED:
        importlib.import_module(name)
    # What torch does at exit takes longer than a fork: it lists what it has compiled, which is nothing, and
    # forgets its operators one by one.
    atexit.unregister(importlib.import_module("torch._dynamo.utils").dump_compile_times)
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.freeze()
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("the fork server has threads, and a fork would lose them")


def serve(connection: socket.socket) -> None:
    """The server: until the process that it serves closes its end."""
    while True:
        packet, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST, MOST_DESCRIPTORS)
        if not packet:
            return
        pid = _fork_sibling()
        if pid == 0:
            _run(json.loads(packet), descriptors)
        connection.send(str(pid).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_sibling() -> int:
    """Fork this process, which has a single thread, into a child of its parent. Returns as `os.fork`."""
    known = ctypes.c_void_p()  # where the C library keeps its thread's id, which its own fork renews
    _library.prctl(PR_GET_TID_ADDRESS, ctypes.byref(known), 0, 0, 0)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = _library.syscall(CLONE, CLONE_PARENT, 0, 0, 0, 0)
    if pid == 0:
        if known.value:
            ctypes.c_int.from_address(known.value).value = os.getpid()
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError("the system refused another process")
    return pid


def _run(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Run the forked process until its exit."""
    code, interrupted = 1, False
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if request["passed"]:
            os.setsid()
        own = None if request["passed"] else _server_of_a_command()
        _take_over(request, descriptors, own)
        if own is None:
            if place := os.environ.get(EXIT_AT):
                _exit_at_steps(Path(place))
            if Path(hook := os.environ.get(HOOK, "")).is_file():
                exec(Path(hook).read_text(), {})  # noqa: S102 - a test's
            importlib.import_module("workers.child").main()
        else:
            ForkServer(own).install()
            _run_python()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        traceback.print_exc()
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        code = 120  # Python's, where a stream cannot be flushed
    finally:
        if interrupted:  # as Python ends
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code)


def _exit_at_steps(place: Path) -> None:
    """Let this process kill itself before or after a step, as soon as the file `place` says so: with the
    step's line, "module:Class:method before". The steps are the lines of the file .steps beside it. The
    first process that reads it removes it."""
    for step in place.with_suffix(".steps").read_text().splitlines():
        module, owner, method = step.split(":")
        _may_exit(getattr(importlib.import_module(module), owner), method, step, place)


def _may_exit(owner: Any, method: str, step: str, place: Path) -> None:
    works = getattr(owner, method)

    def exits(when: str) -> None:
        with suppress(FileNotFoundError):
            if place.read_text() == f"{step} {when}":
                place.unlink()
                os.kill(os.getpid(), signal.SIGKILL)

    def stepping(*arguments: Any, **options: Any) -> Any:
        exits("before")
        answer = works(*arguments, **options)
        exits("after")
        return answer

    setattr(owner, method, stepping)


def _run_python() -> None:
    """What sys.argv says: a file, or the code of an option -c."""
    gc.enable()
    prefix, package = HUB
    if any(name.startswith(prefix) for name in os.environ):
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
    if sys.argv[0] == "-c":
        code = sys.argv.pop(1)
        sys.argv[0] = "-c"
        exec(code, {"__name__": "__main__"})  # noqa: S102 - a test's
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def _server_of_a_command() -> socket.socket:
    """Fork a server from this process, before it becomes the command. It ends with the command."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        try:
            _close_all_but({theirs.fileno()})
            serve(theirs)
        finally:
            os._exit(0)
    theirs.close()
    ours.settimeout(START_LIMIT)
    return ours


def _take_over(request: dict[str, Any], descriptors: list[int], own: socket.socket | None) -> None:
    """Become what an executed process would be: no other descriptors, and the requested environment."""
    kept = set() if own is None else {own.fileno()}
    # Numbers that are to be given may be in use for another of them.
    wanted = {0, 1, 2, *request["passed"]}
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(wanted) + 1) for fd in descriptors]
    for descriptor, number in zip(high, sorted(wanted), strict=True):
        os.dup2(descriptor, number)
    _close_all_but(kept | wanted)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cores"])
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    sys.argv = list(request["argv"])
    if own is not None:
        _show([sys.executable, *sys.argv])
    else:
        _show([sys.executable, *ENTRY, *sys.argv[1:]])
        torch = sys.modules["torch"]
        torch.set_num_threads(int(request["environment"]["OMP_NUM_THREADS"]))


def _close_all_but(kept: set[int]) -> None:
    """Close every descriptor but these and the standard ones."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                continue  # the one that listed the folder


def _show(words: list[str]) -> None:
    """Overwrite the command line and the environment that other processes see, for programs that tell
    processes apart by them. The C library has no pointer to the old environment since that was cleared."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # arg_start, arg_end, env_start and env_end of proc(5), which counts from 1
    command, environment = (map(int, fields[45:47]), map(int, fields[47:49]))
    variables = [f"{name}={value}" for name, value in os.environ.items()]
    for (start, end), lines in ((command, words), (environment, variables)):
        shown = "".join(f"{line}\0" for line in lines).encode(errors="surrogateescape")[: end - start]
        ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    preload()
    serve(socket.socket(fileno=int(sys.argv[1])))
