"""Fixtures of the loader's tests: the supervisor's side and a small checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_checkpoint
import zmq
from loader_harness import Supervisor

from shm.segment import unlink
from shm.store import store_name


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    context = zmq.Context()
    supervisor = Supervisor(tmp_path, context)
    yield supervisor
    supervisor.control.close(linger=0)
    context.term()
    for fingerprint in supervisor.fingerprints:
        unlink(store_name(fingerprint))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_checkpoint.write(tmp_path / "model")
