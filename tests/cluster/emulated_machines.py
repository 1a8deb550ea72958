"""Machines emulated on this one: a network namespace each, with a cable to a switch; own processes and
/dev/shm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]


class Network:
    """So many machines, whose addresses are 10.77.0.10 + i. A context manager. Needs root."""

    def __init__(self, machines: int, place: Path, room: int) -> None:
        """`room`: bytes of the /dev/shm of each."""
        self._prefix, self._place, self._room = f"tc{os.getpid()}", place, room
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
        mounts = f"mount -t proc proc /proc && mount -t tmpfs -o size={self._room} tmpfs /dev/shm"
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
        for one in (*psutil.Process(init.pid).children(), init):
            one.kill()
        init.wait()

    def cable(self, i: int, there: bool) -> None:
        """Plug a machine's cable in, or pull it."""
        _run(f"ip -n {self._prefix}s link set p{i} {'up' if there else 'down'}")

    def runtime(self, i: int) -> Path:
        """A machine's runtime directory."""
        path = self._place / f"machine{i}"
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def shared_memory(self, i: int) -> Path:
        """The shared memory of a machine that is on, as seen from outside."""
        return Path(f"/proc/{self._first(i)}/root/dev/shm")

    def run(
        self, i: int, *command: str, stderr: int | None = None, **environment: str
    ) -> subprocess.Popen[str]:
        """Run a program on a machine."""
        own = {"XDG_RUNTIME_DIR": str(self.runtime(i)), "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            [*self._enter(i), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | own | environment,
        )

    def _enter(self, i: int) -> list[str]:
        return ["nsenter", "-t", self._first(i), "-n", "-m", "-p"]

    def _first(self, i: int) -> str:
        """Returns the id, outside, of a machine's first process."""
        init = self._inits[i].pid
        return Path(f"/proc/{init}/task/{init}/children").read_text().split()[0]


def address(i: int) -> str:
    return f"10.77.0.{10 + i}"


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)
