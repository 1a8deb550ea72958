"""What runs on each machine in processes of Ray's: a look at the machine, and the keeper of its expert host.
Imports neither ray nor torch; the liaison makes a task and an actor of them.

The host itself is no child of the actor (`pipeline/cluster/keeper.py`): it outlives the actor, Ray on its
machine, and
Ray's head. An actor that is started again adopts it."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import signal
import socket
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from launch.processes.cores import Cores
from pipeline.assets import model_dir
from pipeline.cluster.keeper import HostConfig, HostKeeper
from pipeline.cluster.place import logs
from pipeline.errors import PipelineError
from pipeline.models.shapes import is_shape
from protocol.files import read_small
from protocol.messages import VERSION
from protocol.program import installed, user_folder
from shm.atomic_file import atomic_file
from shm.kernel_files import contents, parse_cpuinfo
from shm.segment import available_memory, free_shm_bytes
from workers.kernels.native import VERSION as KERNELS
from workers.kernels.native import best
from workers.lifetime import PR_SET_PDEATHSIG

PER_CORE, SHARE = (
    1 << 27,
    16,
)  # bytes that each core reads at a time; at most 1 / SHARE of the free memory in all
SECONDS = 0.3  # of measuring
RATES, MAX_RATES = "read-rates.json", 1 << 16  # file of what was measured, and its bytes at most
CHECK_SECONDS = 0.1  # between looks at the host
LINES, LINE_LENGTH = 20, 300  # of a host's log that are passed on at once, and characters of each
LOG_BYTES = 1 << 16  # of it that are read at once
WATCH_SECONDS = 5.0  # that a call waits for a change
ECHO_SECONDS = 20.0  # that the echo serves
ECHO_BYTES = 1 << 20  # of one message, at most


def versions() -> dict[str, str]:
    """Returns what must be equal on all machines, without signs that a label of Ray's cannot have."""
    found = {
        "tandem": installed("tandem"),
        "protocol": VERSION,
        "kernels": KERNELS,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }
    return {name: re.sub("[^A-Za-z0-9.-]", "", str(value)) for name, value in found.items()}


def look(model: str | None, again: bool) -> dict[str, Any]:
    """Returns what this machine has. `model`: path, or None for the embedded model; `again`: measure how fast
    it reads its memory also where that is known."""
    cores, cpu = Cores.here(), parse_cpuinfo(contents(Path("/proc/cpuinfo")))
    path = model_dir() if model is None else Path(model)
    return {
        "versions": versions(),
        "variant": best().variant,
        "host": socket.gethostname(),
        "cpu": cpu,
        "cores": cores.computing,
        "memory": available_memory(),
        "shm": free_shm_bytes(),
        "rate": known_rate(cpu, cores.computing, again),
        "model": is_shape(path) or path.exists(),
        "workers": cores.default_workers(),
    }


def known_rate(cpu: str, cores: int, again: bool) -> float:
    """Returns the greatest rate that was ever measured here, since other programs only lower it. It is kept:
    who holds what, and so what is on each machine's disk, should not change from start to start."""
    path = user_folder("CACHE") / RATES
    rates: dict[str, float] = {}
    with suppress(OSError, msgspec.DecodeError):
        rates = msgspec.json.decode(read_small(path, MAX_RATES), type=dict[str, float])
    key = f"{cpu}, {cores} cores"
    if again or key not in rates:
        rates[key] = max(read_rate(cores), rates.get(key, 0.0))
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(path) as file:
                file.write(msgspec.json.encode(rates))
    return rates[key]


def read_rate(cores: int) -> float:
    """Returns the bytes a second that so many threads together read from memory."""
    each = max(1 << 20, min(PER_CORE, available_memory() // SHARE // cores))
    blocks = [np.ones(each // 64 * 64, np.uint8) for _ in range(cores)]
    read = best().read
    until = time.perf_counter() + SECONDS

    def count(block: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
        done = 0
        while time.perf_counter() < until:
            read(block)
            done += block.size
        return done

    began = time.perf_counter()
    with ThreadPoolExecutor(cores) as threads:
        total = sum(threads.map(count, blocks))
    return total / (time.perf_counter() - began)


class LogLines:
    """The latest lines of a host's log, each with its file and the byte at which it ends there: a restarted
    actor gives a line the same place. Lines of the host before stay, whose file the next host removes."""

    def __init__(self, name: str) -> None:
        """`name`: the host's."""
        self._name, self._prefix = name, f"[{name}] "
        self._file, self._at = "", 0  # that is read, and its bytes that were
        self._last = ""
        self.latest: deque[tuple[str, int, str]] = deque(maxlen=LINES)

    def read(self) -> bool:
        """Read on; returns whether there are new lines. Of equal ones in a row the first counts."""
        new = False
        for path in logs(self._name):
            if path.name != self._file:
                self._file, self._at = path.name, 0
            with suppress(OSError), open(path, "rb") as file:
                self._at = max(self._at, os.fstat(file.fileno()).st_size - LOG_BYTES)
                file.seek(self._at)
                data = file.read(LOG_BYTES)
                for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
                    self._at += len(line)
                    text = line.decode("utf-8", "replace").rstrip().removeprefix(self._prefix)[:LINE_LENGTH]
                    if text.strip() and text != self._last:
                        new, self._last = True, text
                        self.latest.append((self._file, self._at, text))
        return new


class HostActor:
    """Keeps the expert hosts of one machine. Its calls come from several threads."""

    def __init__(self, configs: list[dict[str, Any]]) -> None:
        """`configs`: HostConfig.plain of each, with `workers` instead of cores, and the model and the cache
        that are this machine's own where they are None."""
        # Ray's process for this machine may die while a call runs here, and would leave this one behind.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        self._changed = threading.Condition()
        self._now: dict[str, dict[str, Any]] = {}  # of each host, by name
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._keep, args=(host_config(one),)) for one in configs]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def watch(self, known: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Returns what the hosts say, by name, with the latest `lines` of their logs; waits a moment as long
        as that is what is known."""
        with self._changed:
            self._changed.wait_for(lambda: self._now != known, WATCH_SECONDS)
            return dict(self._now)

    def stop(self) -> None:
        """End the hosts."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _keep(self, config: HostConfig) -> None:
        keeper, running, pause = HostKeeper(config), False, CHECK_SECONDS
        log, said = LogLines(config.name), dict[str, Any]()
        while not self._stopping.is_set():
            if log.read() and said:  # before another host takes the place of one that has died
                self._say(config, said, log)
            try:
                if not running:
                    self._say(config, said := asdict(keeper.start()), log)
                    running = True
                elif (place := keeper.check()) is not None:
                    self._say(config, said := asdict(place), log)
                    running = place.state != "ended"
                pause = CHECK_SECONDS
            except (PipelineError, OSError) as e:
                log.read()
                self._say(config, said := {"state": "failed", "error": str(e)}, log)
                running, pause = False, min(30.0, 2 * max(pause, 1.0))
            self._stopping.wait(pause)
        with suppress(PipelineError, OSError):
            keeper.stop()

    def _say(self, config: HostConfig, place: dict[str, Any], log: LogLines) -> None:
        with self._changed:
            self._now[config.name] = place | {"lines": [list(line) for line in log.latest]}
            self._changed.notify_all()


def host_config(plain: dict[str, Any]) -> HostConfig:
    """Returns a host's configuration on this machine."""
    own = dict(plain)
    cores = Cores.here()
    workers = own.pop("workers") or cores.default_workers()
    own["cores"] = [list(each.cores) for each in cores.for_workers(workers)]
    own["model"] = own["model"] or str(model_dir())
    own["cache"] = own["cache"] or str(user_folder("CACHE"))
    return HostConfig.from_map(own)


class Echo:
    """Answers at a tcp port for a while: first the bytes of a message as they come, each message with one
    byte."""

    def __init__(self, address: str, ports: tuple[int, int] = (0, 0)) -> None:
        """`ports`: the first and the last that it may take; 0: any. Raises OSError."""
        self._listener = _listener(address, *ports)
        threading.Thread(target=self._serve, daemon=True).start()

    def port(self) -> int:
        """Returns where it answers."""
        return int(self._listener.getsockname()[1])

    def _serve(self) -> None:
        self._listener.settimeout(ECHO_SECONDS)
        with suppress(OSError), self._listener:
            peer, _ = self._listener.accept()
            with peer:
                peer.settimeout(ECHO_SECONDS)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                incoming = peer.makefile("rb")
                while head := incoming.read(4):
                    size = int.from_bytes(head, "big")
                    if size > ECHO_BYTES or len(incoming.read(size)) < size:
                        return
                    peer.sendall(b"x")


def _listener(address: str, first: int, last: int) -> socket.socket:
    """Returns a socket that listens at the first free port of these."""
    for port in range(first, last):
        with suppress(OSError):
            return socket.create_server((address, port))
    return socket.create_server((address, last))


def call_echo(address: str, port: int) -> tuple[float, float]:
    """Returns the seconds of a round trip there (the median), and the bytes a second of the way. Raises
    OSError."""
    with socket.create_connection((address, port), 5.0) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def send(size: int) -> float:
            began = time.perf_counter()
            peer.sendall(size.to_bytes(4, "big") + bytes(size))
            if not peer.recv(1):
                raise OSError("the connection ended")
            return time.perf_counter() - began

        trips = sorted(send(1) for _ in range(100))
        ways = sorted(send(ECHO_BYTES) for _ in range(20))
    trip = trips[len(trips) // 2]
    return trip, ECHO_BYTES / max(1e-9, ways[len(ways) // 2] - trip / 2)
