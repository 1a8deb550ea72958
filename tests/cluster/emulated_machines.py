"""Machines emulated on this one: a network namespace each, with a cable to a switch; own processes and
/dev/shm.

Run as a program inside one, it is its keeper or the head:

    keep CONFIG     keeps a host (a HostConfig as JSON), and prints each of its places as a JSON line
    head MODEL      computes random layers, compares each with what it computes alone, prints a JSON line a
                    second; reads lists of places, JSON lines"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from cluster_heads import BOUNDS, KEYS, head

from pipeline.cluster.keeper import HostConfig, HostKeeper
from pipeline.config import Machine

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
ROWS = (1, 1, 1, 2, 8, 1, 100)  # of the head's layers, in turn


class Network:
    """So many machines, whose addresses are 10.77.0.10 + i. A context manager. Needs root."""

    def __init__(self, machines: int, place: Path) -> None:
        self._prefix, self._place = f"tc{os.getpid()}", place
        self._count = machines
        self._inits: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Network:
        switch = f"{self._prefix}s"
        _run(f"ip netns add {switch}")
        _run(f"ip -n {switch} link add br0 type bridge")
        _run(f"ip -n {switch} link set br0 up")
        for i in range(self._count):
            name = f"{self._prefix}m{i}"
            _run(f"ip netns add {name}")
            _run(f"ip -n {name} link set lo up")
            _run(f"ip link add eth0 netns {name} type veth peer name p{i} netns {switch}")
            _run(f"ip -n {switch} link set p{i} master br0 up")
            _run(f"ip -n {name} addr add {address(i)}/24 dev eth0")
            _run(f"ip -n {name} link set eth0 up")
            self.switch_on(i)
        return self

    def __exit__(self, *_: object) -> None:
        for i in list(self._inits):
            self.switch_off(i)
        for name in [f"{self._prefix}s", *(f"{self._prefix}m{i}" for i in range(self._count))]:
            _run(f"ip netns del {name}")

    def switch_on(self, i: int) -> None:
        """Start a machine's first process, which owns its processes and its shared memory."""
        mounts = "mount -t proc proc /proc && mount -t tmpfs -o size=512m tmpfs /dev/shm"
        inside = f"{mounts} && echo on && exec sleep infinity"
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", inside]
        init = subprocess.Popen(
            ["ip", "netns", "exec", f"{self._prefix}m{i}", *unshare], stdout=subprocess.PIPE
        )
        assert init.stdout is not None
        with init.stdout as said:
            assert said.readline() == b"on\n"
        self._inits[i] = init

    def switch_off(self, i: int) -> None:
        """Kill all that runs on a machine; its shared memory is lost."""
        init = self._inits.pop(i)
        end(init)  # and with it, by --kill-child, the namespace's first process

    def cable(self, i: int, there: bool) -> None:
        """Plug a machine's cable in, or pull it."""
        _run(f"ip -n {self._prefix}s link set p{i} {'up' if there else 'down'}")

    def runtime(self, i: int) -> Path:
        """A machine's runtime directory."""
        path = self._place / f"machine{i}"
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def start(self, i: int, *arguments: str) -> subprocess.Popen[str]:
        """Run this program on a machine."""
        return self.run(i, sys.executable, "-P", __file__, *arguments, CLUSTER_TEST_KEYS=" ".join(KEYS))

    def run(self, i: int, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Run a program on a machine."""
        own = {"XDG_RUNTIME_DIR": str(self.runtime(i)), "PYTHONPATH": f"{ROOT}:{HERE}"}
        return subprocess.Popen(
            [*self._enter(i), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | own | environment,
        )

    def signal(self, i: int, pid: int, name: str) -> None:
        """Send a signal to a process of a machine, by its number there."""
        subprocess.run([*self._enter(i), "kill", f"-{name}", str(pid)], check=False)

    def worker_of(self, i: int, pid: int) -> int:
        """Returns the number of a child of a process."""
        found = subprocess.run([*self._enter(i), "pgrep", "-P", str(pid)], capture_output=True, text=True)
        return int(found.stdout.split()[0])

    def _enter(self, i: int) -> list[str]:
        init = self._inits[i].pid
        children = Path(f"/proc/{init}/task/{init}/children").read_text().split()
        return ["nsenter", "-t", children[0], "-n", "-m", "-p"]


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a process and its children, as nsenter has one, and close its standard input."""
    for one in (*psutil.Process(process.pid).children(), process):
        one.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def address(i: int) -> str:
    return f"10.77.0.{10 + i}"


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


def _say(what: Any) -> None:
    print(json.dumps(what), flush=True)


def keep(plain: dict[str, Any]) -> None:
    keeper = HostKeeper(HostConfig.from_map(plain))
    _say(asdict(keeper.start()))
    while True:
        if (place := keeper.check()) is not None:
            _say(asdict(place))
        time.sleep(0.05)


def be_head(model: Path) -> None:
    every = tuple(range(len(BOUNDS) - 1))
    layers = wrong = 0
    slowest, next_line = 0.0, time.monotonic() + 1
    with head(model) as several, head(model, held=every) as alone:
        expected = [alone.sums(seed, ROWS[seed % len(ROWS)]) for seed in range(64)]

        def listen() -> None:
            for line in sys.stdin:
                several.tell(*(Machine(**one | {"lanes": tuple(one["lanes"])}) for one in json.loads(line)))

        threading.Thread(target=listen, daemon=True).start()
        while True:
            began = time.monotonic()
            seed = layers % 64
            wrong += several.sums(seed, ROWS[seed % len(ROWS)]) != expected[seed]
            layers += 1
            slowest = max(slowest, time.monotonic() - began)
            if time.monotonic() > next_line:
                _say({"layers": layers, "wrong": wrong, "slowest": slowest})
                slowest, next_line = 0.0, time.monotonic() + 1


if __name__ == "__main__":
    keep(json.loads(sys.argv[2])) if sys.argv[1] == "keep" else be_head(Path(sys.argv[2]))
