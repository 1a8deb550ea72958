"""Progress displays: log lines where stderr is no terminal, and the bars of a terminal."""

from __future__ import annotations

import io
import logging
import sys
import time

import pytest

from launch.terminal import progress
from launch.terminal.log import LogHandler
from launch.terminal.progress import ProgressDisplay

MB = 10**6


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_give_the_rate_of_the_stage(monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO, logger="tandem")
    began = now = time.monotonic()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    display = ProgressDisplay("bytes")
    updates = [
        (0.0, "allocating", 0),
        (1.0, "allocating", 50),
        (10.0, "encoding", 0),  # the rate of the slow stage before does not count
        (12.0, "encoding", 40),
        (16.0, "encoding", 120),
        (17.0, "encoding", 130),
        (21.0, "encoding", 200),
        (21.5, "writing", 100),  # done by the stage before
        (27.0, "writing", 155),
    ]
    for second, stage, done in updates:
        now = began + second
        display.update(stage, done * MB, 200 * MB)
    lines = [record.message for record in caplog.records]
    assert lines == [
        "encoding, 0 B of 200.0 MB",
        "encoding, 120.0 MB of 200.0 MB, 20.0 MB/s, 4 s left",
        "encoding, 200.0 MB of 200.0 MB, 18.2 MB/s, 0 s left",
        "writing, 155.0 MB of 200.0 MB, 10.0 MB/s, 4 s left",
    ]


def test_a_line_of_the_log_clears_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FakeTerminal())
    monkeypatch.setenv("TERM", "xterm")
    handler = LogHandler()
    record = logging.LogRecord("tandem", logging.WARNING, "", 0, "warning: x", None, None)
    with ProgressDisplay("bytes") as display:
        display.update("allocating", 1, 2)
        handler.emit(record)
    handler.emit(record)
    assert sys.stderr.getvalue().count("\r\x1b[2K[tandem] warning: x\n") == 1
    assert sys.stderr.getvalue().endswith("[tandem] warning: x\n")
    assert not sys.stderr.getvalue().endswith("\r\x1b[2K[tandem] warning: x\n")
