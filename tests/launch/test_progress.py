"""The lines about a load where there is no terminal."""

from __future__ import annotations

import logging
import time

import pytest

from launch.terminal import load_progress as progress
from launch.terminal.load_progress import LoadingBar
from protocol.messages import Progress

MB = 10**6


def test_a_rate_is_that_of_the_stage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tandem")
    begun = now = time.monotonic()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    bar = LoadingBar()
    heard = [
        (0.0, "allocating", 0),
        (1.0, "allocating", 50),
        (10.0, "encoding", 0),  # a slow stage before it says nothing of this one
        (12.0, "encoding", 40),
        (16.0, "encoding", 120),
        (17.0, "encoding", 130),
        (21.0, "encoding", 200),
        (21.5, "writing", 100),  # by another stage done already
        (27.0, "writing", 155),
    ]
    for second, stage, done in heard:
        now = begun + second
        bar.update(Progress(stage, done * MB, 200 * MB))
    said = [record.message for record in caplog.records]
    assert said == [
        "store: encoding, 0 of 200 MB",
        "store: encoding, 120 of 200 MB, 20 MB/s, 4 s left",
        "store: encoding, 200 of 200 MB, 18 MB/s, 0 s left",
        "store: writing, 155 of 200 MB, 10 MB/s, 4 s left",
    ]
