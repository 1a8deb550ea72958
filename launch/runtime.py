"""Runtime directories: the sockets and files of running engines, by name.

    $XDG_RUNTIME_DIR/tandem/<name>/     or /tmp/tandem-<uid>/<name>/, all 0700
        lock            flocked exclusively by the supervisor as long as it runs
        engine.json     written when the engine is ready: name, pid, model, endpoint, version
        control.sock    children -> supervisor
        client.sock     clients -> coordinator; work.sock, fetch.sock: its own children

The holder of the lock owns the directory. A directory with a free lock belonged to a killed supervisor: the
next start removes it, with the engine's own shared-memory segments. It also removes segments without a
directory; $XDG_RUNTIME_DIR is removed at a logout.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from launch.errors import WrongUsage, system_reason
from pipeline.models.shapes import short_name
from protocol.errors import ProtocolError
from protocol.files import is_own_directory, private_directory, read_small
from protocol.messages import VERSION
from protocol.program import COMMAND, PROGRAM
from protocol.sockets import ipc_endpoint, runtime_root
from shm.atomic_file import atomic_file
from shm.locks import leads_to
from shm.segment import engine_prefix, is_segment, shm_names

NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")
SEGMENT = re.compile(r"tandem-([A-Za-z0-9_-]{1,32})-[0-9a-f]{6}-[a-z]+-[0-9]+")
SHM = Path("/dev/shm")
MAX_INFO = 1 << 16  # bytes of engine.json
INFO = "engine.json"
MACHINE_INFO = "machine.json"  # of a machine in a cluster (`cluster/node.py`)
LOCK_TRIES = 10  # another process that tests the lock holds it for a moment

log = logging.getLogger("tandem")


@dataclass(frozen=True)
class EngineInfo:
    """A running engine, as its engine.json describes it."""

    name: str
    pid: int
    model: str
    endpoint: str
    version: int


class RuntimeDir:
    """One engine's directory, held by the lock until `remove`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.name = path.name
        self._lock = lock
        self._segments = engine_prefix(path)  # also when the directory has been replaced by a link
        # systemd-tmpfiles skips a directory that is locked, and everything in it.
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):
            fcntl.flock(self._folder, fcntl.LOCK_SH | fcntl.LOCK_NB)

    @classmethod
    def claim(cls, name: str) -> RuntimeDir:
        """Create the directory and take its lock. Raises WrongUsage where the name is not valid or is that of
        a running engine, ProtocolError where the directory would not be private."""
        if not NAME.fullmatch(name) or name == "store":  # /tandem-store-* are stores
            raise WrongUsage(
                f"--name {name!r}: a name has 1 to 32 letters, digits, _ or -, and is not 'store'"
            )
        path = runtime_root() / name
        for _ in range(LOCK_TRIES):
            try:
                private_directory(path)
            except ProtocolError as e:
                if not isinstance(e.__cause__, FileNotFoundError):
                    raise
                continue  # its previous owner removed it just now
            lock = _try_lock(path, create=True)
            if lock is not None:
                _remove_contents(path)
                return cls(path, lock)
            time.sleep(0.02)
        raise WrongUsage(f"an engine named {name!r} is running; use --connect {name} or another --name")

    @property
    def intact(self) -> bool:
        """Tells whether this is still the directory of its name, with the lock in it."""
        return self._lock >= 0 and leads_to(self.path / "lock", self._lock)

    def endpoint(self, name: str) -> str:
        """Returns the address of a socket in it. Raises ProtocolError where its path is too long."""
        return ipc_endpoint(self.path, name)

    def publish(self, info: EngineInfo) -> None:
        """Write engine.json, whole or not at all."""
        with atomic_file(self.path / INFO, sync=False) as file:
            file.write(msgspec.json.encode(info))

    def remove_of_coordinator(self) -> None:
        """Remove the segments that an exited coordinator made: its slab and hall, lanes that no worker has
        mapped."""
        for path in segments(self.path):
            if any(kind in path.name for kind in ("-slab-", "-hall-", "-lane-")):
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the engine's segments and the directory, then release the lock. Idempotent. After another
        program had removed the directory, one of that name stays: another user's, or another engine's with
        that engine's segments."""
        if self._lock < 0:
            return
        try:
            if not is_own_directory(self.path):
                for path in _segments(self._segments):
                    path.unlink(missing_ok=True)
            elif self.intact or not (self.path / "lock").exists():
                _remove_all(self.path)
        finally:
            os.close(self._folder)
            os.close(self._lock)
            self._lock = -1


def running_engines() -> list[EngineInfo]:
    """Returns the engines of this user that are ready, by name."""
    engines = []
    for path in _engine_dirs():
        if (lock := _try_lock(path)) is not None:  # its supervisor was killed
            os.close(lock)
            continue
        with suppress(OSError, msgspec.DecodeError):  # not ready yet, or stopped meanwhile
            # another version's may hold more, and lack what has a default
            engines.append(msgspec.json.decode(read_small(path / INFO, MAX_INFO), type=EngineInfo))
    return engines


def find_engine(name: str | None) -> EngineInfo:
    """Returns the running engine of this name, or the only one. Raises WrongUsage, also for another
    version's."""
    engines = running_engines()
    matching = [engine for engine in engines if name in (None, engine.name)]
    if not matching and name is not None:
        there = f"running: {', '.join(e.name for e in engines)}" if engines else "none is running"
        raise WrongUsage(f"--connect {name}: no engine of that name is ready ({there})")
    if not matching:
        raise WrongUsage(f"no engine is running; start one with `{COMMAND} serve`")
    if len(matching) > 1:
        which = ", ".join(f"{e.name} ({short_name(e.model)})" for e in matching)
        raise WrongUsage(f"{len(matching)} engines are running; choose one with --connect NAME: {which}")
    engine = matching[0]
    if engine.version != VERSION:
        raise WrongUsage(
            f"engine {engine.name} speaks protocol version {engine.version}, this program version {VERSION};"
            f" use the {PROGRAM} that it was started with"
        )
    return engine


def sweep() -> list[str]:
    """Remove the files of killed supervisors; returns the engines' names."""
    swept = []
    for path in _engine_dirs():
        if (path / MACHINE_INFO).exists():
            continue  # its Ray may go on, and `cluster stop` finds it by this
        lock = _try_lock(path)
        if lock is not None:
            try:
                _remove_all(path)
                swept.append(path.name)
            except OSError as e:  # no reason to fail this start
                log.warning(f"what the killed engine {path.name} left cannot be removed: {system_reason(e)}")
            os.close(lock)
        elif not (path / "lock").exists():
            with suppress(OSError):  # not empty: not an engine's, or claimed just now
                path.rmdir()
    for name in _without_directory():
        with suppress(WrongUsage):  # claimed just now by an engine, which removes them itself
            RuntimeDir.claim(name).remove()
            swept.append(name)
    return swept


def segments(runtime: Path) -> list[Path]:
    """Returns an engine's own shared-memory segments."""
    return _segments(engine_prefix(runtime))


def _segments(prefix: str) -> list[Path]:
    """Returns the segments tandem-<name>-<hash>-<kind>-<number>. The kind has no dash, so that engine
    `a` never claims what belongs to engine `a-b`."""
    own = re.compile(rf"{re.escape(prefix[1:])}[a-z]+-[0-9]+")
    return [path for name in sorted(shm_names(own)) if is_segment(path := SHM / name)]


def _engine_dirs() -> Iterator[Path]:
    with suppress(FileNotFoundError):
        for path in sorted(runtime_root().iterdir()):
            if NAME.fullmatch(path.name) and path.is_dir():
                yield path


def _try_lock(path: Path, create: bool = False) -> int | None:
    """Takes the directory's lock, or returns None where it is held or the directory is being removed."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    try:
        lock = os.open(path / "lock", flags, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_ino == os.stat(path / "lock").st_ino:
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass  # held, or unlinked between opening and locking
    os.close(lock)
    return None


def _without_directory() -> list[str]:
    """Names engines that have segments and no directory, which exists longer than the segments."""
    root = runtime_root()
    matches = [SEGMENT.fullmatch(name) for name in shm_names(SEGMENT) if is_segment(SHM / name)]
    paths = [root / name for name in sorted({match[1] for match in matches if match})]
    return [path.name for path in paths if not path.exists() and segments(path)]


def _remove_contents(path: Path) -> None:
    """Remove an engine's segments, and all files in its directory but the lock, which the caller holds."""
    for segment in segments(path):
        segment.unlink(missing_ok=True)
    entries: list[Path] = []
    with suppress(FileNotFoundError):  # another program has removed the directory
        entries = list(path.iterdir())
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != "lock":
            entry.unlink(missing_ok=True)


def _remove_all(path: Path) -> None:
    _remove_contents(path)
    # From here on another engine may claim the directory; then it is not empty, and stays.
    (path / "lock").unlink(missing_ok=True)
    try:
        path.rmdir()
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.ENOENT):
            raise
