"""SIGKILL of the supervisor at random moments: every process of its engine exits within seconds, and the next
start removes the files. With `pytest -s` each kill prints the seconds until the last exit."""

from __future__ import annotations

import os
import random
import shutil
import time
from functools import partial

import pytest
from fault_engines import sweep_all
from marked_engine import LIMIT, Engine, Place
from waiting import wait_until

from launch.runtime import sweep

# What these leave half built, any engine's start may sweep; and they measure.
pytestmark = [pytest.mark.timeout(200), pytest.mark.alone]

OPTIONS = ("--workers", "2", "--policy", "on-demand")  # with a prefetcher and a slab
GONE_LIMIT = 5.0  # seconds that children may outlive their supervisor
SEED = 4
MOMENTS = 4  # between them 0.05 and 4 s after the start: a start takes two or three on an idle machine
STARTED = (2,)  # after this kill the next engine is really started


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
            print(f"{doing}: all exited after {gone:.3f} s")
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
        assert doing == "coordinator, 2 workers, prefetcher, text"
        assert gone < GONE_LIMIT
        kinds = {"directory", "segment slab", "segment hall", "segment control", "store"}
        assert set(place.remains(name)) == kinds
    assert sweep() == [name]  # as the next start does
    sweep_all(place)
    assert place.remains(name) == []
