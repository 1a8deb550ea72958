"""An engine's processes seen from outside: roles, resources, and handles that are safe for signals."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil

from launch.errors import WrongUsage
from launch.processes.children import MODULES
from launch.runtime import running_engines

_IPC = "ipc://"


@dataclass(frozen=True)
class Usage:
    """Resources of one process, memory in bytes; `private`, without store and slab, is freed by its exit."""

    role: str
    pid: int
    private: int
    descriptors: int


def runtime_of(endpoint: str) -> Path:
    """The runtime directory of the engine at this endpoint."""
    return Path(endpoint.removeprefix(_IPC)).parent


def supervisor_of(runtime: Path) -> int:
    """The process id of the supervisor of the engine in this directory. Raises WrongUsage without one."""
    for engine in running_engines():
        if engine.name == runtime.name:
            return engine.pid
    raise WrongUsage(f"no engine is running in {runtime}")


def usage(supervisor: int) -> list[Usage]:
    """Usage of the supervisor and its children; a process that exits meanwhile is left out."""
    found = []
    for process, role in [(_process(supervisor), "supervisor"), *_children(supervisor)]:
        try:
            found.append(Usage(role, process.pid, process.memory_full_info().uss, process.num_fds()))
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
        except psutil.Error:  # it has exited
            continue
        found += [(process, role) for role, module in MODULES.items() if module in words]
    return found


class PidHandle:
    """A process by the kernel's pidfd: signals never reach another process that has its id later."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._descriptor = descriptor

    @classmethod
    def take(cls, pid: int, role: str, supervisor: int) -> PidHandle | None:
        """A handle, or None unless the process is a running child of this supervisor in this role."""
        try:
            handle = cls(pid, os.pidfd_open(pid))
        except (OSError, ValueError):
            return None
        try:
            process = psutil.Process(pid)
            ours = process.ppid() == supervisor and MODULES[role] in process.cmdline()
        except (psutil.Error, KeyError):
            ours = False
        # Checked last: while the pidfd's process has not been reaped, no other process can have its id.
        if ours and handle.running:
            return handle
        handle.close()
        return None

    @property
    def running(self) -> bool:
        """Whether the process has not been waited for by its parent."""
        return self.send(0)

    def send(self, number: int) -> bool:
        """False where the process has exited."""
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        os.close(self._descriptor)
