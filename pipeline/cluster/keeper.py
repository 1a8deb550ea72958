"""Keeps the expert host of a machine: adopts the one that runs, or starts one, and starts another when it has
died.

A host outlives its keeper: it is no child of the process that starts it, and ends by itself when its
coordinator is silent for as long as its lease. The keeper only reads what the host writes about itself
(`place.py`)."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import zmq
from msgspec import json

from pipeline.cluster import place
from pipeline.cluster.place import HostPlace
from pipeline.config import LanePlan
from pipeline.errors import PeerLost
from shm.locks import sweep
from workers.lifetime import PYTHON, environment

START_LIMIT = 60.0  # seconds for a host to have an endpoint; its imports take long on a busy machine
STOP_LIMIT, KILL_LIMIT = 10.0, 5.0  # seconds for a host to end
FIRST_PAUSE, LONGEST_PAUSE = (
    0.1,
    10.0,
)  # seconds before a restart, doubled for each that failed before it was ready
POLL_SECONDS = 0.01
ORDERED = ("f32", "bf16", "fp8")  # formats whose products are added in each variant's own order


@dataclass(frozen=True)
class HostConfig:
    """Describes an expert host to the process that becomes it."""

    name: str  # of its runtime directory: letters, digits, _ and -, at most 32
    model: Path
    format: str
    tile: int | None  # channels; None: chosen as the coordinator does
    lanes: LanePlan  # `held`: what this machine holds
    address: str  # IP address at which it listens
    coordinator_key: str  # the public CURVE key of the one that it answers
    cores: tuple[tuple[int, ...], ...]  # of each expert worker; an empty one is bound to none
    cache: Path  # folder of files that are kept between starts
    ports: tuple[int, int] = (0, 0)  # the first and the last that it may take; 0: any that is free
    lease: float = 60.0  # seconds that it lives after its coordinator's last message
    reserve_bytes: int = 2 << 30  # of memory that its store must leave free
    # Bytes of experts in memory, or of these what is free; the others stay on disk. None: all are in memory.
    disk_memory: int | None = None
    host_slowdown: float = 1.0  # emulation, as in EngineConfig
    log_level: str = "INFO"

    def plain(self) -> dict[str, Any]:
        """Return a map of plain values, for `from_map`."""
        return asdict(self) | {"model": str(self.model), "cache": str(self.cache)}

    @classmethod
    def from_map(cls, plain: dict[str, Any]) -> Self:
        """Return the configuration of `plain`. Raises ValueError for lanes that are none."""
        lanes = LanePlan.from_map(plain["lanes"])
        assert lanes is not None
        paths = {name: Path(plain[name]) for name in ("model", "cache")}
        cores = tuple(tuple(one) for one in plain["cores"])
        return cls(**plain | paths | {"lanes": lanes, "cores": cores, "ports": tuple(plain["ports"])})

    @property
    def setting(self) -> str:
        """Returns a digest of all that makes another host of it: not its lease, nor what its log tells."""
        same = replace(self, lease=0.0, log_level="", reserve_bytes=0)
        return hashlib.sha256(json.encode(same.plain(), order="sorted")).hexdigest()


def same_bits(variants: set[str], format: str) -> bool:
    """Returns whether kernels of these variants give sums with the same bits in a format."""
    return "portable" not in variants and (len(variants) == 1 or format not in ORDERED)


def new_keys() -> tuple[str, str]:
    """Returns a public CURVE key, and the secret one that belongs to it."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


class HostKeeper:
    """Keeps one host. Used by one thread."""

    def __init__(self, config: HostConfig) -> None:
        self.config = config
        self._latest: HostPlace | None = None  # that was returned
        self._failures = 0  # in a row, of hosts that were not ready
        self._start_at = 0.0  # monotonic seconds: the next restart

    def place(self) -> HostPlace | None:
        """Returns what the running host says about itself; None where none runs."""
        name = self.config.name
        return place.read(name) if place.runs(name) else None

    def start(self, limit: float = START_LIMIT) -> HostPlace:
        """Adopt the host of this name and configuration, or start one, after ending one of another
        configuration; returns once it has an endpoint, when it may still be loading. Raises PeerLost, with
        what it has said, where it fails or has none after `limit` seconds."""
        running = self.place()
        if running is not None and running.setting != self.config.setting:
            self.stop()
            running = None
        if running is None:
            launch(self.config)
            running = self._wait_place(limit)
        self._latest = running
        return running

    def check(self) -> HostPlace | None:
        """Start the host again where it has died, after a growing pause while it does so before it is ready.
        Returns its place where that has changed since the last call; of one that has ended by itself, because
        its coordinator was silent, once with the state "ended": `start` begins again. Raises PeerLost where
        it cannot be started."""
        now, latest = self.place(), self._latest
        if now is None and latest is not None and not place.folder_of(self.config.name).exists():
            now = replace(latest, state="ended")
        elif now is None and time.monotonic() >= self._start_at:
            ready = latest is not None and latest.state == "ready"
            self._failures = 0 if ready else self._failures + 1
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(self._failures, 16))
            self._start_at = time.monotonic() + pause
            launch(self.config)
            now = self._wait_place(START_LIMIT)
        if now is None and (said := place.read(self.config.name)) is not None and said.state == "failed":
            now = said
        if now is None or now == latest:
            return None
        self._latest = now
        return now

    def wait_exit(self, limit: float) -> bool:
        """Wait until the host has exited; False where it still runs after `limit` seconds."""
        return place.wait_exit(self.config.name, limit)

    def stop(self) -> None:
        """End the host, also one of another configuration, and remove what it has made."""
        name = self.config.name
        for number, limit in ((signal.SIGTERM, STOP_LIMIT), (signal.SIGKILL, KILL_LIMIT)):
            running = self.place()
            if running is None:
                break
            with suppress(ProcessLookupError):
                os.kill(running.pid, number)
            place.wait_exit(name, limit)
        if (claimed := place.claim(name)) is not None:
            place.remove(*claimed)
        sweep()  # the store of one that was killed

    def _wait_place(self, limit: float) -> HostPlace:
        name, setting = self.config.name, self.config.setting

        def said() -> HostPlace | None:
            gone, now = not place.runs(name), place.read(name)
            if now is not None and now.setting == setting:
                return now
            if gone:
                raise PeerLost(f"the expert host {name} has exited in its start")
            return None

        now = _until(said, limit)
        if now is None:
            raise PeerLost(f"the expert host {self.config.name} has said nothing for {limit:.0f} s")
        if now.state == "failed":
            raise PeerLost(now.error)
        return now


def launch(config: HostConfig) -> None:
    """Start a host that is no child of this process; returns when it has taken its place, or has exited.
    Raises PeerLost where that takes too long."""
    # Its folder's host.json is of an earlier one, which must not be taken for what this one says.
    if (claimed := place.claim(config.name)) is not None:
        place.remove(*claimed)
    process = subprocess.Popen(
        [*PYTHON, "-m", "pipeline.cluster.host"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,  # which it closes then
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment(1),
    )
    try:
        process.communicate(json.encode(config.plain()), timeout=START_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        why = f"for {START_LIMIT:.0f} s it has only been imported"
        raise PeerLost(f"the expert host {config.name} has not started: {why}") from None


def _until(say: Callable[[], HostPlace | None], limit: float) -> HostPlace | None:
    until = time.monotonic() + limit
    while (said := say()) is None and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    return said
