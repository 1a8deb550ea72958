"""How a command ends: exit codes, signals, connections, and lines that are read from stdin."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from launch import cli
from launch.command_line.options import Options, parse
from launch.connect import reconnect, session
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
from launch.terminal.format import MISSING, count, model_name, percent
from launch.terminal.interrupts import Interrupts
from launch.terminal.lines import Lines
from launch.terminal.log import NOTICE, child_level, hidden, notice
from launch.terminal.output import print_json, show
from pipeline.assets import model_dir
from pipeline.errors import UsageError
from protocol.client import Client
from protocol.errors import EngineGone, RequestFailed
from protocol.messages import VERSION
from protocol.visible import one_line
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


@pytest.mark.parametrize("code", [0, 1])
def test_exit_code_of_a_command_is_that_of_the_program(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def command(options: Options, interrupts: Interrupts) -> int:
        return code

    monkeypatch.setattr(cli, "_command", lambda options: command)
    assert cli.main(["doctor"]) == code


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
            async with session.endpoint(parse(words.split()), Interrupts()) as found:
                assert found == where
        with pytest.raises(WrongUsage, match="--connect other"):
            async with session.endpoint(parse("chat --connect other".split()), Interrupts()):
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
    monkeypatch.setattr(session, "Supervisor", StandInSupervisor)
    options = parse("--name mine --workers 3 --log-level debug".split())
    interrupts = Interrupts()
    async with session.endpoint(options, interrupts) as found:
        assert found == StandInSupervisor.endpoint
        assert StandInSupervisor.notes == [("mine", 3, "DEBUG"), "started"]
        interrupts.received = "SIGINT"
        interrupts._end(signal.SIGINT)  # the second signal
    assert StandInSupervisor.notes[1:] == ["started", "killed", "stopped"]


@pytest.mark.parametrize("reconnects", [True, False])
async def test_clients_of_commands_have_their_name_and_retry(
    reconnects: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []

    class StandIn:
        on_pause: Any = None
        on_reconnect: Any = None

    @asynccontextmanager
    async def connect(where: Any, **how: Any) -> AsyncIterator[StandIn]:
        seen.append((where, how))
        yield StandIn()
        seen.append("closed")

    @asynccontextmanager
    async def endpoint(*_: object) -> AsyncIterator[str]:
        yield "ipc:///there"
        seen.append("ended")

    monkeypatch.setattr(Client, "connect", connect)
    module = reconnect if reconnects else session
    monkeypatch.setattr(module, "endpoint", endpoint)
    opened: Any = reconnect.reconnecting_client if reconnects else session.connected
    caplog.set_level(logging.INFO)
    async with opened(parse(["chat"]), Interrupts()) as client:
        if reconnects:
            client.on_pause(EngineGone("why"))
            assert reconnect.WAITING in caplog.text
            assert "why" not in caplog.text  # a detail
            assert reconnect.ANSWERS not in caplog.text
            client.on_reconnect()
            assert reconnect.ANSWERS in caplog.text
        else:
            assert client.on_pause is client.on_reconnect is None
    retry = {"retry": reconnect.RETRY_SECONDS} if reconnects else {}
    assert seen == [("ipc:///there", {"name": "launch.py"} | retry), "closed", "ended"]


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


@pytest.mark.parametrize(("text", "lines"), [("", []), ("a", ["a"]), ("a\n", ["a"]), ("\n", [""])])
async def test_end_of_the_last_line_is_no_line(text: str, lines: list[str], tmp_path: Any) -> None:
    (tmp_path / "file").write_text(text)
    with (tmp_path / "file").open() as file:
        read = Lines(file.fileno())
        assert [await read.next() for _ in range(len(lines) + 1)] == [*lines, None]


def test_words_of_figures_and_names() -> None:
    assert [count(n, "round") for n in (0, 1, 2)] == ["0 rounds", "1 round", "2 rounds"]
    assert model_name(str(model_dir())) == "the embedded model"
    assert model_name(str(model_dir()), article="") == "embedded model"
    assert model_name("/a/b/model") == model_name("/a/b/model", article="") == "model"
    assert one_line("a\x1b[2J\nb é") == "a\ufffd[2J\ufffdb é"
    assert [percent(share) for share in (0.004, 0.005, 0.994, 0.995, 1.2, -0.1)] == [
        *("<1%", "0%", "99%", ">99%", "120%", "-10%"),
    ]
    assert percent(None, 2) == MISSING


def test_output_is_flushed_text_or_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    show("")
    show("a\n")
    print_json({"é": (1.23456, float("nan"), True, None), 3: -0.000123456})  # type: ignore[dict-item]
    assert capsys.readouterr().out == 'a\n{"é": [1.235, null, true, null], "3": -0.0001235}\n'


def test_log_levels_of_commands_and_children(caplog: pytest.LogCaptureFixture) -> None:
    assert [child_level(level) for level in ("NOTICE", "DEBUG", "ERROR")] == ["WARNING", "DEBUG", "ERROR"]
    caplog.set_level(NOTICE, "tandem")
    notice("always said")
    logging.getLogger("tandem").info("a detail")
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(NOTICE, "always said")]
    assert logging.INFO < NOTICE < logging.WARNING


@pytest.mark.parametrize(("level", "shown"), [(logging.WARNING, False), (logging.INFO, True)])
def test_warnings_of_a_package_are_hidden_for_a_block(level: int, shown: bool) -> None:
    root, records = logging.getLogger(), list[str]()

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    handler, before = Kept(), root.level
    root.addHandler(handler)
    root.setLevel(level)
    try:
        with hidden("launch.processes"):
            for name in ("launch.processes.control", "launch.stress"):
                logging.getLogger(name).warning(f"warning of {name}")
                logging.getLogger(name).error(f"error of {name}")
        logging.getLogger("launch.processes.control").warning("after it")
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
    hidden_line = "warning of launch.processes.control"
    assert (hidden_line in records) is shown
    assert [line for line in records if line != hidden_line] == [
        "error of launch.processes.control",
        "warning of launch.stress",
        "error of launch.stress",
        "after it",
    ]


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
