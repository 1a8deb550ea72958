"""Output that nobody reads: it blocks no process, and what is lost is counted. And a child's last words."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import psutil
import pytest
from engines import start
from scripted_children import ScriptedProcess
from waiting import until, wait_until

from launch.processes.children import Child, ChildOutput
from launch.runtime import running_engines
from launch.terminal.log import CLEAR, LogHandler
from launch.terminal.output import BackgroundOutput
from protocol.sockets import Identity
from workers.lifetime import DroppingOutput

LINE = b"x" * 99 + b"\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Reader and writer."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def fill(writer: int) -> None:
    """The other processes that write to it stay blocking."""
    again = os.open(f"/proc/self/fd/{writer}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        while True:
            os.write(again, b"\n")
    except BlockingIOError:
        os.close(again)


def read_all(reader: int) -> list[bytes]:
    """The lines that are there now."""
    os.set_blocking(reader, False)
    text = b""
    try:
        while part := os.read(reader, 1 << 20):
            text += part
    except BlockingIOError:
        pass
    return text.splitlines(keepends=True)


def test_an_engine_whose_output_nobody_reads_starts_recovers_and_ends(pipe: tuple[int, int]) -> None:
    """Standard output and error are one pipe, which is full from the start."""
    name = f"unread-{os.getpid()}"
    fill(pipe[1])
    arguments = ("serve", "--name", name, "--workers", "2", "--log-level", "debug")
    with start(*arguments, stdout=pipe[1], stderr=pipe[1]) as process:
        assert wait_until(lambda: any(engine.name == name for engine in running_engines()), 60)

        def workers() -> set[int]:
            found = set()
            for child in psutil.Process(process.pid).children():
                with suppress(psutil.Error):  # it has exited
                    if "workers.expert_worker" in child.cmdline():
                        found.add(child.pid)
            return found

        killed = workers()
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: len(workers() - killed) == 2, 60)
        process.terminate()
        assert process.wait(30) == 0


def test_lines_that_do_not_fit_are_counted_once_the_output_flows(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = pipe
    monkeypatch.setattr("launch.terminal.output.PATIENCE", 0.001)
    output = BackgroundOutput(writer)
    for _ in range(5000):
        output.write(LINE)
    lines = list[bytes]()

    def flowed() -> bool:
        lines.extend(read_all(reader))
        return output.wait_written(0.01)

    assert wait_until(flowed, 20)
    lines += read_all(reader)
    (told,) = [line for line in lines if b"dropped" in line]
    assert lines.index(told) == len(lines) - 1
    assert told == b"[tandem] %d lines were dropped: nobody read them in time\n" % (5001 - len(lines))
    output.write(LINE)
    assert wait_until(lambda: read_all(reader) == [LINE], 20)


def test_a_reader_that_has_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    output = BackgroundOutput(writer)
    for _ in range(3):
        output.write(LINE)
    assert isinstance(output.error, BrokenPipeError)
    os.close(writer)


def test_a_child_drops_what_the_supervisor_does_not_read(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.set_blocking(writer, False)
    output = DroppingOutput(writer)
    for _ in range(1000):
        output.write(LINE)
    kept = len(read_all(reader))
    output.write(LINE)
    told = b"%d lines were dropped: the supervisor did not read them in time\n" % (1000 - kept)
    assert read_all(reader) == [b"\n", told, LINE]


async def test_a_child_s_lines_are_passed_on_whole_and_its_last_ones_tell_of_memory(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    writer = os.dup(pipe[1])
    child = Child(
        Identity("worker", 1, 0), cast(Any, ScriptedProcess()), -1, b"", ChildOutput(os.dup(pipe[0]))
    )
    assert child.output is not None
    monkeypatch.setattr(resource, "getrlimit", lambda which: (10**9, 10**9))
    perhaps = "the worker 1 was killed by SIGABRT; perhaps for want of memory: ulimit -v allows each process"
    assert child.exit_reason(-signal.SIGABRT) == f"{perhaps} 1.00 GB; raise it"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert child.exit_reason(-signal.SIGABRT) == "the worker 1 was killed by SIGABRT"
    os.write(writer, b"terminate called after thro")
    os.write(writer, b"wing std::bad_alloc\x1b\n[worker] end")
    shown = ""

    def first_line() -> bool:
        nonlocal shown
        shown += capsys.readouterr().err
        return shown == "terminate called after throwing std::bad_alloc\N{REPLACEMENT CHARACTER}\n"

    await until(first_line)
    monkeypatch.setattr(LogHandler, "bar_drawn", True)
    cast(ScriptedProcess, child.process).end(-signal.SIGABRT)
    code = await child.wait_exit()
    assert capsys.readouterr().err == f"{CLEAR}[worker] end\n"
    words = "the worker 1 was killed by SIGABRT: the system refused it memory or a thread (it said 'termin"
    assert child.exit_reason(code).startswith(words)
    assert child.exit_reason(-signal.SIGKILL) == "the worker 1 was killed by SIGKILL"
    os.close(writer)
