"""The processes of an engine on this machine, seen from outside: who they are, what they use, and a hold on
one that cannot slip to another process of the same number."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil

from launch.errors import WrongUsage
from launch.processes.children import MODULES
from launch.processes.runtime import running_engines
from protocol.keys import Address

_IPC = "ipc://"


@dataclass(frozen=True)
class Usage:
    """What one process holds. `private` are the bytes that would be free without it, so no store or slab."""

    role: str
    pid: int
    rss: int
    pss: int
    private: int
    descriptors: int


def runtime_of(address: Address) -> Path:
    """The runtime directory of the engine at this address. Raises WrongUsage for one that is not local."""
    if not address.endpoint.startswith(_IPC):
        raise WrongUsage(f"--chaos needs a local engine, not one at {address.endpoint}")
    return Path(address.endpoint.removeprefix(_IPC)).parent


def supervisor_of(runtime: Path) -> int:
    """The process id of the supervisor whose engine has this runtime directory. Raises WrongUsage where there
    is none."""
    for engine in running_engines():
        if engine.name == runtime.name:
            return engine.pid
    raise WrongUsage(f"no engine is running in {runtime}")


def usage(supervisor: int) -> list[Usage]:
    """Of the supervisor and its children; one that ends meanwhile is left out."""
    found = []
    for process, role in [(_process(supervisor), "supervisor"), *_children(supervisor)]:
        try:
            memory = process.memory_full_info()
            found.append(Usage(role, process.pid, memory.rss, memory.pss, memory.uss, process.num_fds()))
        except psutil.Error:
            continue
    return found


def _process(pid: int) -> psutil.Process:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        raise WrongUsage(f"the engine's supervisor, process {pid}, has ended") from None


def _children(supervisor: int) -> list[tuple[psutil.Process, str]]:
    found = []
    for process in _process(supervisor).children():
        try:
            words = process.cmdline()
        except psutil.Error:  # it has ended
            continue
        found += [(process, role) for role, module in MODULES.items() if module in words]
    return found


class PidHandle:
    """A hold on one process by a descriptor of the kernel's: what is sent reaches this process or none, also
    where it has ended and its number is another's."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._descriptor = descriptor

    @classmethod
    def take(cls, pid: int, role: str, supervisor: int) -> PidHandle | None:
        """Of a process that is a living child of this supervisor in this role, else None."""
        try:
            grip = cls(pid, os.pidfd_open(pid))
        except (OSError, ValueError):
            return None
        try:
            process = psutil.Process(pid)
            ours = process.ppid() == supervisor and MODULES[role] in process.cmdline()
        except (psutil.Error, KeyError):
            ours = False
        # Looked at before this: while the descriptor's process lives, the number is nobody else's.
        if ours and grip.alive:
            return grip
        grip.close()
        return None

    @property
    def alive(self) -> bool:
        """Whether the process has not been waited for by its parent."""
        try:
            signal.pidfd_send_signal(self._descriptor, 0)
        except ProcessLookupError:
            return False
        return True

    def send(self, number: signal.Signals) -> bool:
        """False where the process has ended."""
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        os.close(self._descriptor)
