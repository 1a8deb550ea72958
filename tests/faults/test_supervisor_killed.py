"""SIGKILL of the supervisor while its engine starts or answers: every process of its engine exits, and the
next start removes the files."""

from __future__ import annotations

import os
import shutil

import pytest
from fault_engines import sweep_all
from marked_engine import LIMIT, Engine, Place
from waiting import wait_until

from launch.runtime import sweep

pytestmark = pytest.mark.timeout(200)

OPTIONS = ("--workers", "2", "--policy", "on-demand")  # with a prefetcher and a slab
# When the supervisor is killed: as soon as this child runs, or anything has been made.
MOMENTS = ["no children", "loader", "coordinator", "prefetcher"]


def test_children_exit_with_the_supervisor_and_the_next_start_removes_files(place: Place) -> None:
    for number, moment in enumerate(MOMENTS):
        name = f"kill{number}-{os.getpid()}"
        if number % 2:
            shutil.rmtree(place.cache / "tandem", ignore_errors=True)
        with Engine(place, name) as engine:
            assert wait_until(lambda moment=moment, engine=engine: moment in engine.doing(), LIMIT)
            assert wait_until(lambda name=name: place.remains(name), LIMIT)
            doing = engine.kill()
            assert place.remains(name) != [], doing
            if moment == "coordinator":
                engine.next_start()
            else:
                sweep_all(place)
        assert place.remains(name) == [], doing


def test_supervisor_kill_during_an_answer(place: Place) -> None:
    name = f"killed-{os.getpid()}"
    with Engine(place, name) as engine:
        engine.wait_ready()
        engine.ask(200)
        assert engine.kill() == "coordinator, 2 workers, prefetcher, text"
        kinds = {"directory", "segment slab", "segment hall", "segment control", "store"}
        assert set(place.remains(name)) == kinds
    assert sweep() == [name]  # as the next start does
    sweep_all(place)
    assert place.remains(name) == []
