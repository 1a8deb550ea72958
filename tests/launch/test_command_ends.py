"""How a command ends: exit codes, signals, connections, and lines that are read from stdin."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from launch import cli, connect
from launch.command_line.options import Options, parse
from launch.equality import (
    BF16_BOUND,
    F32_BOUND,
    QUANTIZED_BOUND,
    Comparison,
    Step,
    Verdict,
    compare,
    rounding_bound,
)
from launch.errors import AnswerLost, DownloadFailed, StartFailed, WrongUsage
from launch.runtime import EngineInfo, RuntimeDir
from launch.terminal.interrupts import Interrupts
from launch.terminal.lines import Lines
from launch.terminal.output import print_json, show
from pipeline.errors import UsageError
from protocol.errors import EngineGone, RequestFailed
from protocol.messages import VERSION
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_only_ctrl_c_is_meant_for_an_answer(number: signal.Signals) -> None:
    async def body(interrupts: Interrupts, calls: list[str]) -> None:
        with (
            interrupts.otherwise(lambda: calls.append("between")),
            interrupts.handled_by(lambda: calls.append("answer")),
        ):
            await send(number)

    interrupts, calls, cancelled = await run(body)
    assert (interrupts.received, calls, cancelled) == (number.name, [], True)


async def test_second_signal_calls_what_ends_a_command_at_once() -> None:
    async def body(interrupts: Interrupts, calls: list[str]) -> None:
        for word in ("first", "second"):
            interrupts.at_once(lambda word=word: calls.append(word))
        with interrupts.otherwise(lambda: calls.append("between")):
            try:
                await send(signal.SIGTERM)
            except asyncio.CancelledError:
                await send(signal.SIGINT)  # no further cancellation
                with interrupts.handled_by(lambda: calls.append("answer")):
                    await send(signal.SIGINT)  # it is no longer meant for an answer
                calls.append("in order")
                raise

    interrupts, calls, cancelled = await run(body)
    assert calls == ["first", "second", "first", "second", "in order"]
    assert (interrupts.received, cancelled) == ("SIGTERM", True)


async def test_handlers_end_with_their_blocks() -> None:
    async def body(interrupts: Interrupts, calls: list[str]) -> None:
        with interrupts.handled_by(lambda: calls.append("outer")):
            with interrupts.handled_by(lambda: calls.append("inner")):
                pass
            await send(signal.SIGINT)
        with interrupts.otherwise(lambda: calls.append("between")):
            pass
        await send(signal.SIGINT)
        calls.append("not reached")

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    _, calls, cancelled = await run(body)
    assert (calls, cancelled) == (["outer"], True)
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


# --- connections --------------------------------------------------------------------------------------------


async def test_running_engine_is_found_by_its_name_and_another_is_started() -> None:
    runtime = RuntimeDir.claim("command-ends")
    try:
        where = runtime.endpoint("client.sock")
        runtime.publish(EngineInfo(runtime.name, os.getpid(), "/m", "all-host", where, VERSION))
        for words in ("chat --connect", "chat --connect command-ends"):
            async with connect.endpoint(parse(words.split()), Interrupts()) as found:
                assert found == where
        with pytest.raises(WrongUsage, match="--connect other"):
            async with connect.endpoint(parse("chat --connect other".split()), Interrupts()):
                pass
    finally:
        runtime.remove()


class StandInSupervisor:
    """Notes its life."""

    endpoint, http = "ipc:///started/client.sock", ""
    notes: list[Any]

    def __init__(self, config: Any, *, log_level: str) -> None:
        StandInSupervisor.notes = [(config.name, config.workers, log_level)]

    async def __aenter__(self) -> None:
        self.notes.append("started")

    async def __aexit__(self, *_: object) -> None:
        self.notes.append("stopped")

    def kill(self) -> None:
        self.notes.append("killed")


async def test_started_engine_ends_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "Supervisor", StandInSupervisor)
    options = parse("--name mine --workers 3 --log-level debug".split())
    interrupts = Interrupts()
    async with connect.endpoint(options, interrupts) as found:
        assert found == StandInSupervisor.endpoint
        assert StandInSupervisor.notes == [("mine", 3, "DEBUG"), "started"]
        interrupts.received = "SIGINT"
        interrupts._end(signal.SIGINT)  # the second signal
    assert StandInSupervisor.notes[1:] == ["started", "killed", "stopped"]


# --- lines and words ----------------------------------------------------------------------------------------


async def test_lines_come_whole_whatever_the_pieces() -> None:
    reader, writer = os.pipe()
    try:
        lines = Lines(reader)
        os.write(writer, b"one\n\ntwo\nth")
        assert [await lines.next() for _ in range(3)] == ["one", "", "two"]
        waiting = asyncio.create_task(lines.next())
        await asyncio.sleep(0.01)
        os.write(writer, "é".encode()[:1])
        await asyncio.sleep(0.01)
        assert not waiting.done()
        os.write(writer, "é".encode()[1:] + b"\n\xff\nlast\xc3")
        assert await waiting == "thé"
        assert os.get_blocking(reader)  # as it was
        os.close(writer)
        writer = -1
        ends = [await lines.next() for _ in range(4)]
        assert ends == ["\N{REPLACEMENT CHARACTER}", "last\N{REPLACEMENT CHARACTER}", None, None]
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)


def test_output_is_flushed_text_or_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    show("")
    show("a\n")
    print_json({"é": (1.23456, float("nan"), True, None), 3: -0.000123456})  # type: ignore[dict-item]
    assert capsys.readouterr().out == 'a\n{"é": [1.235, null, true, null], "3": -0.0001235}\n'


# --- the rule of equality -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format_name", "dtype", "bound"),
    [
        ("f32", "f32", F32_BOUND),
        ("f32", "bf16", BF16_BOUND),
        ("bf16", "f32", BF16_BOUND),
        ("bf16", "bf16", BF16_BOUND),
        ("int8", "f32", QUANTIZED_BOUND),
        ("int4-g128", "bf16", QUANTIZED_BOUND),
        ("bf16", "int4", QUANTIZED_BOUND),
        ("f32", "int8", QUANTIZED_BOUND),
    ],
)
def test_bound_is_that_of_the_coarser_part(format_name: str, dtype: str, bound: float) -> None:
    assert rounding_bound(format_name, dtype) == bound
    assert F32_BOUND < BF16_BOUND < QUANTIZED_BOUND


def test_comparison_names_the_first_difference() -> None:
    reference = [Step(1, 2, 0.5), Step(3, 4, 0.25)]
    for tokens, expected in (
        ((1, 3), Comparison(Verdict.EQUAL)),
        ((1, 3, 9), Comparison(Verdict.MISMATCH, 2, 9)),
        ((1,), Comparison(Verdict.MISMATCH, 1, None, 3)),
        ((1, 4), Comparison(Verdict.NEAR_TIE, 1, 4, 3, 0.25)),
        ((2, 3), Comparison(Verdict.MISMATCH, 0, 2, 1, 0.5)),
        ((1, 9), Comparison(Verdict.MISMATCH, 1, 9, 3)),
    ):
        assert compare(tokens, reference, 0.3) == expected
