"""How a command ends: exit codes, signals, connections, and lines that are read from stdin."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from launch import cli
from launch.command_line.options import Options, parse
from launch.errors import AnswerLost, DownloadFailed, StartFailed, WrongUsage
from launch.terminal.interrupts import Interrupts
from pipeline.errors import UsageError
from protocol.errors import EngineGone, RequestFailed
from shm.errors import NotEnoughMemory, SegmentMissing

# --- exit codes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("u"), 2, "u"),
        (NotEnoughMemory("n"), 2, "n"),
        (RequestFailed("r", usage=True), 2, "r"),
        (RequestFailed("r"), 1, "r"),
        (WrongUsage("w"), 2, "w"),
        (StartFailed("s", usage=True), 2, "s"),
        (StartFailed("s"), 1, "s"),
        (AnswerLost("a"), 1, "a"),
        (DownloadFailed("d"), 1, "d"),
        (EngineGone("e"), 1, "e"),
        (SegmentMissing("m"), 1, "m"),
        (ModuleNotFoundError("x", name="rich"), 1, "the Python package rich is missing; in Tandem's folder"),
        (KeyboardInterrupt(), 1, "interrupted"),
        (asyncio.CancelledError(), 1, "interrupted"),
    ],
)
def test_each_error_has_its_exit_code_and_one_line(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    async def command(options: Options, interrupts: Interrupts) -> int:
        raise error

    monkeypatch.setattr(cli, "_command", lambda options: command)
    assert cli.main(["doctor"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"launch.py: {line}")
    assert err.count("\n") == 1


def test_each_command_has_its_function() -> None:
    """The chat where none is named; a replay in place of a benchmark."""
    for words, name in (
        ("", "chat"),
        ("bench", "bench"),
        ("bench --replay /nowhere", "replay"),
        ("cache", "cache"),
        ("generate hello", "generate"),
    ):
        found = cli._command(parse(words.split()))
        assert found.__name__ == name  # type: ignore[attr-defined]


# --- signals ------------------------------------------------------------------------------------------------


async def run(body: Any) -> tuple[Interrupts, list[str], bool]:
    """Run `body(interrupts, calls)` as a command with its signals; returns whether it was cancelled."""
    made: list[Interrupts] = []
    calls: list[str] = []

    async def command() -> None:
        made.append(Interrupts())
        with made[0].installed():
            await body(made[0], calls)

    task = asyncio.create_task(command())
    await asyncio.wait([task])
    return made[0], calls, task.cancelled()


async def send(number: int) -> None:
    os.kill(os.getpid(), number)
    await asyncio.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_signal_that_ends_a_command_is_named(number: signal.Signals) -> None:
    async def body(interrupts: Interrupts, calls: list[str]) -> None:
        interrupts.at_once(lambda: calls.append("at once"))
        assert interrupts.received == ""
        await send(number)

    interrupts, calls, cancelled = await run(body)
    assert (interrupts.received, calls, cancelled) == (number.name, [], True)


async def test_ctrl_c_goes_to_the_innermost_block_any_number_of_times() -> None:
    async def body(interrupts: Interrupts, calls: list[str]) -> None:
        with interrupts.handled_by(lambda: calls.append("between")):
            await send(signal.SIGINT)
            with interrupts.handled_by(lambda: calls.append("answer")):
                await send(signal.SIGINT)
                await send(signal.SIGINT)
            await send(signal.SIGINT)
        assert not interrupts.received
        await send(signal.SIGINT)
        calls.append("not reached")

    _, calls, cancelled = await run(body)
    assert calls == ["between", "answer", "answer", "between"]
    assert cancelled


async def test_other_signals_are_not_meant_for_an_answer_and_a_second_one_ends_at_once() -> None:
    async def body(interrupts: Interrupts, calls: list[str]) -> None:
        interrupts.at_once(lambda: calls.append("at once"))
        with interrupts.handled_by(lambda: calls.append("between")):
            try:
                with interrupts.handled_by(lambda: calls.append("answer")):
                    await send(signal.SIGTERM)
            except asyncio.CancelledError:
                with interrupts.handled_by(lambda: calls.append("answer")):
                    await send(signal.SIGINT)
                calls.append("in order")
                raise

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    interrupts, calls, cancelled = await run(body)
    assert (interrupts.received, calls, cancelled) == ("SIGTERM", ["at once", "in order"], True)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


async def test_ignored_hangup_stays_ignored() -> None:
    async def body(interrupts: Interrupts, calls: list[str]) -> None:
        await send(signal.SIGHUP)
        calls.append("continues")

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        interrupts, calls, cancelled = await run(body)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (interrupts.received, calls, cancelled) == ("", ["continues"], False)
