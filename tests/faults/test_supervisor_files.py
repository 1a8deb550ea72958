"""No other user can read, write or enter the files of a running engine, whatever the umask."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from marked_engine import Engine, Place

from shm.locks import build_folder
from shm.store import store_name

SHM = Path("/dev/shm")
SOON = 30.0  # seconds for an orderly end, on a machine that may be busy
OPTIONS = ("--workers", "2", "--policy", "on-demand")


@pytest.fixture
def place(place: Place) -> Place:
    place.cache.rmdir()  # for the engine to make
    return place


@dataclass(frozen=True)
class Made:
    """Paths of one engine, by what they are for."""

    runtime: list[Path]
    cache: list[Path]
    segments: list[Path]
    locks: list[Path]


def made_by(place: Place, name: str) -> Made:
    store = store_name(place.key)[1:]
    build = build_folder()
    return Made(
        runtime=[place.runtime / "tandem", *(place.runtime / "tandem").rglob("*")],
        cache=[place.cache, *place.cache.rglob("*")],
        segments=[p for p in SHM.iterdir() if p.name == store or p.name.startswith(f"tandem-{name}-")],
        locks=[build.parent, build, *build.iterdir()],
    )


def open_files(processes: list[psutil.Process], places: tuple[Path, ...]) -> set[Path]:
    """What these processes have open or mapped below these folders, and still has a name there."""
    found = set()
    for process in processes:
        found |= {Path(file.path) for file in process.open_files()}
        found |= {Path(entry.path) for entry in process.memory_maps()}
    below = {path for path in found if any(path.is_relative_to(folder) for folder in places)}
    return {path for path in below if path.exists()}


async def test_files_of_an_engine_are_private_until_a_closed_terminal_ends_it(place: Place) -> None:
    """During the whole start, all files are in a folder that only their user can enter, as new sockets are
    before their mode is set. The engine then answers a client."""
    name = f"files-{os.getpid()}"
    old = os.umask(0)
    loose: set[Path] = set()
    try:
        with Engine(place, name) as engine:
            ready = asyncio.create_task(asyncio.to_thread(engine.wait_ready))
            while not ready.done():
                made = made_by(place, name)
                tops = [*made.runtime[:1], *made.cache[:1], *made.segments, *made.locks[:2]]
                loose |= {path for path in tops if mode(path) & 0o077}
                await asyncio.sleep(0.002)
            await ready
            engine.ask(100)
            made = made_by(place, name)
            everything = [*made.runtime, *made.cache, *made.segments, *made.locks]
            names = {path.name for path in everything}
            assert {"lock", "engine.json", "control.sock", "client.sock", "work.sock", "fetch.sock"} <= names
            assert {".locks", place.key, "store.bin"} <= names
            assert len(made.segments) == 4  # store, slab, hall, control
            loose |= {path for path in everything if stat.S_IMODE(path.lstat().st_mode) & 0o077}
            assert [path for path in everything if path.lstat().st_uid != os.geteuid()] == []
            # All open files of the engine in those folders were checked.
            opened = open_files(engine.processes(), (place.runtime, place.cache, SHM))
            assert opened <= {*everything}
            engine.process.send_signal(signal.SIGHUP)
            assert engine.process.wait(SOON) == 0
            assert engine.processes() == []
            assert place.remains(name) == []
    finally:
        os.umask(old)
    assert loose == set()


def mode(path: Path) -> int:
    try:
        return stat.S_IMODE(path.lstat().st_mode)
    except FileNotFoundError:
        return 0
