"""Folders and their contents: runtime directory, running engines, stores in shared memory, disk cache."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from launch.cache.command import free_bytes
from launch.cache.entries import scan
from launch.doctor.finding import Finding, Topic
from launch.runtime import SHM, EngineInfo, running_engines, sweep
from launch.terminal.format import count
from pipeline.models.shapes import short_name
from protocol.errors import ProtocolError
from protocol.private_files import make_folders
from protocol.program import COMMAND, user_folder
from protocol.sockets import ipc_endpoint, runtime_root
from shm.errors import ShmError
from shm.locks import sweep as sweep_stores
from shm.segment import byte_size

TOPIC = Topic("places")
LONGEST = "x" * 32  # an engine's name
LISTED = f"`{COMMAND} cache` lists and prunes"
OWN_FOLDER = "set XDG_RUNTIME_DIR to a folder of your own with a short name"


def inspect() -> list[Finding]:
    """Removes the leftovers of killed engines, as every start does, and reports them."""
    return [*_runtime_findings(), *cache_findings(user_folder("CACHE"))]


def _facts(engine: EngineInfo) -> list[str]:
    ways = {"shm": ["work through shared memory"], "zmq": ["work over sockets"]}
    facts = [short_name(engine.model), engine.policy, f"process {engine.pid}"]
    return facts + ways.get(engine.exchange, [])


def _runtime_findings() -> Iterator[Finding]:
    means = "it holds the engines' sockets, in folders with mode 0700"
    try:
        root = runtime_root()
        ipc_endpoint(root / LONGEST, "control.sock")
        swept = sweep()
        removed = sweep_stores()
        engines = running_engines()
    except (ProtocolError, ShmError) as e:
        # These errors end in what to do, after the last semicolon.
        text, _, do = str(e).rpartition("; ")
        do = do.removeprefix("run: ") if text else OWN_FOLDER
        yield TOPIC.problem(text or str(e), means, do, prevents=True)
        return
    except OSError as e:
        yield TOPIC.problem(f"runtime directory: {e}", means, OWN_FOLDER, prevents=True)
        return
    yield TOPIC.ok(f"runtime directory {root} is private", means)
    if swept or removed:
        names = ", ".join([*swept, *(name.lstrip("/") for name in removed)])
        yield TOPIC.note(f"leftovers of killed engines: {names}", "they have just been removed")
    if engines:
        names = ", ".join(f"{e.name} ({', '.join(_facts(e))})" for e in engines)
        means = "they use cores and memory, so the figures measured below are too low"
        do = f"{COMMAND} chat --connect {engines[0].name}\nto stop it: kill {engines[0].pid}"
        yield TOPIC.note(f"running engines: {names}", means, do)
    else:
        yield TOPIC.ok("no engine is running", "none competes for cores and memory")


def cache_findings(folder: Path) -> list[Finding]:
    """Counts what `launch.py cache` lists: stores in shared memory, if any, and the disk cache."""
    entries = scan(folder)
    stores = [entry.size for entry in entries if not entry.on_disk]
    found = [_cache_finding(folder, sum(entry.size for entry in entries if entry.on_disk))]
    if stores:
        head = f"{count(len(stores), 'store')} of experts in {SHM}"
        means = "used by running engines or kept by --keep-store for the next start of the same model"
        found.insert(0, TOPIC.ok(f"{head}, {byte_size(sum(stores))}", f"{means}; {LISTED} them"))
    return found


def _cache_finding(folder: Path, size: int) -> Finding:
    try:
        make_folders(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
            file.flush()
    except OSError as e:
        means = "engines run without it, but convert a model's experts at every start"
        do = f"ls -ld {folder}; df -h {folder}"
        return TOPIC.note(f"cache {folder}: {e.strerror}", means, do)
    means = f"it holds experts in the engine's format, so that a model is converted once; {LISTED} it"
    free = byte_size(free_bytes(folder))
    return TOPIC.ok(f"cache {folder}: {byte_size(size)}, disk has {free} free", means)
