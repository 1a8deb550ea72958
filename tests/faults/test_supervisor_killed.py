"""SIGKILL of the supervisor at random moments: every process of its engine exits within seconds, and the next
start removes the files. `benchmarks/supervisor_kills.py` does the same for any number of kills."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from waiting import wait_until

from benchmarks.marked_engine import LIMIT, Engine, Place
from benchmarks.supervisor_kills import GONE_LIMIT
from launch.runtime import sweep
from protocol.sockets import runtime_root
from shm.disk_cache import sweep_cache
from shm.locks import sweep as sweep_stores

# What these leave half built, any engine's start may sweep; and they measure.
pytestmark = [pytest.mark.timeout(200), pytest.mark.alone]

SEED = 4
MOMENTS = 4  # between them 0.05 and 4 s after the start: a start takes two or three on an idle machine
STARTED = (2,)  # after this kill the next engine is really started


@pytest.fixture
def place(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """With a prefetcher and a segment for the device's memory; nothing is cached yet."""
    folder = Path(tempfile.mkdtemp(prefix="tk-", dir="/tmp"))  # short: socket paths are
    place = Place(folder, tiny_model, ("--workers", "2", "--policy", "on-demand"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place.runtime))  # for the sweeps
    yield place
    sweep_all(place)  # also after a failure
    shutil.rmtree(folder)


def sweep_all(place: Place) -> None:
    """Sweep as a start does first."""
    sweep()
    sweep_stores(runtime_root())
    sweep_cache(place.cache / "tandem")


def test_children_exit_with_the_supervisor_and_the_next_start_removes_files(place: Place) -> None:
    chance = random.Random(SEED)
    left_something = 0
    for number in range(MOMENTS):
        name = f"kill{number}-{os.getpid()}"
        if number % 2:
            shutil.rmtree(place.cache / "tandem", ignore_errors=True)
        with Engine(place, name) as engine:
            if number == MOMENTS - 1:  # on a busy machine the others may come before there is anything
                assert wait_until(partial(place.remains, name), LIMIT)
            time.sleep(chance.uniform(0.05, 4.0))
            doing, gone = engine.kill()
            assert gone < GONE_LIMIT, doing
            left_something += bool(place.remains(name))
            if number in STARTED:
                engine.next_start()
            else:
                sweep_all(place)
        assert place.remains(name) == [], doing
    assert left_something


def test_supervisor_kill_during_an_answer(place: Place) -> None:
    name = f"killed-{os.getpid()}"
    with Engine(place, name) as engine:
        engine.wait_ready()
        engine.ask(200)
        doing, gone = engine.kill()
        assert doing == "coordinator, 2 workers, prefetcher"
        assert gone < GONE_LIMIT
        kinds = {"directory", "segment slab", "segment control", "store", "lock .use"}
        assert set(place.remains(name)) == kinds
    sweep_all(place)
    assert place.remains(name) == []
