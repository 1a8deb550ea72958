"""Finds the leaks of a test session: processes, shared-memory segments, runtime directories.

A session may be several processes (`-n 2`), each with a folder inside the folder of the process that started
it. Each looks for processes and runtime directories of its own folder before it exits, while what would exit
with it still runs. A segment's name does not say which test process made it, and a segment outlives its
maker: the starting process looks for segments, and for whatever else remains, after the others have exited.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

SHM = Path("/dev/shm")


def segments() -> set[str]:
    """Names of the project's present segments."""
    return {path.name for path in SHM.glob("tandem-*")}


def leaks(place: Path, segments_before: set[str] | None) -> list[str]:
    """What the session with this folder left, a line each; segments only if those before it are known."""
    ours = {p.pid: p for p in _processes_of(place)}
    found = [f"process {pid}: {_command(p)}" for pid, p in ours.items()]
    if segments_before is not None:
        new = segments() - segments_before
        if new:  # another program's engine may have started meanwhile and still run
            new -= _mapped_by_others(set(ours))
        found += [f"segment /dev/shm/{name}" for name in sorted(new)]
    return found + [f"runtime directory {path}" for path in _runtime_directories(place)]


def _runtime_directories(place: Path) -> Iterator[Path]:
    for root in sorted([place / "tandem", *place.glob("*/tandem")]):
        if root != place / "cache" / "tandem" and root.is_dir():
            # the folder of the store's lock files, .locks, is no engine's and stays
            yield from (path for path in sorted(root.iterdir()) if not path.name.startswith("."))


def _processes_of(place: Path) -> Iterator[psutil.Process]:
    """Processes with a runtime directory in this folder, whatever their parent is now."""
    for process in psutil.process_iter():
        try:
            theirs = process.environ().get("XDG_RUNTIME_DIR", "")
            if process.pid == os.getpid() or not Path(theirs).is_relative_to(place):
                continue
            # the resource tracker is Python's own and ends with this process
            if process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in _command(process):
                yield process
        except psutil.Error:
            continue  # it has exited, or is another user's


def _mapped_by_others(ours: set[int]) -> set[str]:
    mapped: set[str] = set()
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.pid not in ours:
                maps = process.memory_maps()
                mapped |= {Path(m.path).name for m in maps if m.path.startswith("/dev/shm/tandem-")}
        except psutil.Error:
            continue
    return mapped


def _command(process: psutil.Process) -> str:
    return " ".join(process.cmdline())[:120]
