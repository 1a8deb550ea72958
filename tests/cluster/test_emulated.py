"""Three emulated machines under faults: no sum ever differs, and all goes on after each."""

from __future__ import annotations

import json
import os
import queue
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster_heads import host_config
from emulated_machines import Network, address, end

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]
ROUNDS = 3  # each fault so often
SILENCE = 60.0  # seconds without a layer that count as the end


class Drill:
    """The head, its hosts' keepers, and what they say."""

    def __init__(self, network: Network, model: Path, held: dict[int, tuple[int, ...]]) -> None:
        self.network, self._model, self._held = network, model, held
        self.places: dict[int, dict[str, Any]] = {}
        self._keepers: dict[int, subprocess.Popen[str]] = {}
        self.counts = {"layers": 0, "wrong": 0, "slowest": 0.0}
        self._said: queue.Queue[tuple[int, str]] = queue.Queue()
        self._listeners: dict[int, threading.Thread] = {}
        self._head = network.start(0, "head", str(model))
        self._listen(0, self._head)

    def keep(self, i: int) -> None:
        """Start a machine's keeper."""
        config = host_config(self._model, *self._held[i], name=f"host-emulated-{i}", address=address(i))
        self._keepers[i] = self.network.start(i, "keep", json.dumps(config.plain()))
        self._listen(i, self._keepers[i])

    def end_keeper(self, i: int) -> None:
        self._end(self._keepers[i])

    def hear(self, seconds: float) -> None:
        """Pass on what the keepers say, and count what the head does, for a while."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            try:
                i, line = self._said.get(timeout=left)
            except queue.Empty:
                return
            if i == 0:
                self.counts |= json.loads(line)
                continue
            self.places[i] = json.loads(line)
            known = ("name", "endpoint", "key", "lanes")
            machines = [{key: place[key] for key in known} for place in self.places.values()]
            assert self._head.stdin is not None
            self._head.stdin.write(json.dumps(machines) + "\n")
            self._head.stdin.flush()

    def goes_on(self, layers: int = 20) -> None:
        """Wait until the head has computed more layers."""
        until, before = time.monotonic() + SILENCE, self.counts["layers"]
        while self.counts["layers"] < before + layers:
            assert time.monotonic() < until, f"no layer for {SILENCE} s: {self.counts}, {self.places}"
            assert self._head.poll() is None
            self.hear(0.2)

    def end(self) -> None:
        for process in (self._head, *self._keepers.values()):
            self._end(process)

    def _end(self, process: subprocess.Popen[str]) -> None:
        end(process)
        self._listeners[process.pid].join()

    def _listen(self, i: int, process: subprocess.Popen[str]) -> None:
        def listen() -> None:
            assert process.stdout is not None
            with process.stdout as lines:
                for line in lines:
                    self._said.put((i, line))

        self._listeners[process.pid] = threading.Thread(target=listen, daemon=True)
        self._listeners[process.pid].start()

    # --- faults ------------------------------------------------------------------------------------------

    def kill_host(self, i: int) -> None:
        self.network.signal(i, self.places[i]["pid"], "KILL")

    def kill_worker(self, i: int) -> None:
        self.network.signal(i, self.network.worker_of(i, self.places[i]["pid"]), "KILL")

    def kill_keeper_and_host(self, i: int) -> None:
        self.end_keeper(i)
        self.kill_host(i)
        self.keep(i)

    def adopt(self, i: int) -> None:
        self.end_keeper(i)
        self.keep(i)

    def stop_host(self, i: int) -> None:
        self.network.signal(i, self.places[i]["pid"], "STOP")
        self.hear(2)
        self.network.signal(i, self.places[i]["pid"], "CONT")

    def pull_cable(self, i: int) -> None:
        self.network.cable(i, False)
        self.hear(3)
        self.network.cable(i, True)

    def blink(self, i: int) -> None:
        for _ in range(3):
            self.network.cable(i, False)
            self.hear(0.1)
            self.network.cable(i, True)
            self.hear(0.3)

    def switch_off(self, i: int) -> None:
        self.network.switch_off(i)
        self.end_keeper(i)
        self.hear(1)
        self.network.switch_on(i)
        self.keep(i)


FAULTS = (
    Drill.kill_host,
    Drill.kill_worker,
    Drill.kill_keeper_and_host,
    Drill.adopt,
    Drill.stop_host,
    Drill.pull_cable,
    Drill.blink,
    Drill.switch_off,
)


@contextmanager
def drill(model: Path, place: Path, held: dict[int, tuple[int, ...]]) -> Iterator[Drill]:
    with Network(1 + len(held), place) as network:
        running = Drill(network, model, held)
        try:
            for i in held:
                running.keep(i)
            yield running
        finally:
            running.end()


@pytest.mark.parametrize(
    "held", [{1: (1, 2), 2: (1, 2)}, {1: (1,), 2: (2,)}], ids=["replicas", "no-replicas"]
)
def test_no_sum_differs_under_faults(
    three_tiles: Path, tmp_path: Path, held: dict[int, tuple[int, ...]]
) -> None:
    faults = [(fault, i) for fault in FAULTS for i in held] * ROUNDS
    random.Random(0).shuffle(faults)
    with drill(three_tiles, tmp_path, held) as running:
        running.goes_on()
        for fault, i in faults:
            began = time.monotonic()
            fault(running, i)
            running.goes_on()
            print(f"{fault.__name__} of {i}: {time.monotonic() - began:.1f} s, {running.counts}")
            assert running.counts["wrong"] == 0
