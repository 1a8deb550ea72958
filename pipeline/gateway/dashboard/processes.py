"""The engine's processes, as the kernel describes them: the children of the gateway's parent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROC = Path("/proc")
PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")
ROLES = {"expert_worker": "worker"}  # by module, where the name is another one


def processes(peers: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Role, number, pid, seconds alive, bytes of memory of its own, seconds of processor time. `peers`: those
    that the coordinator knows, by pid; where the kernel lists no children, these alone are returned."""
    parent = os.getppid()
    try:
        pids = [
            int(pid) for pid in (PROC / str(parent) / "task" / str(parent) / "children").read_text().split()
        ]
    except OSError:
        pids = list(peers)
    up = float((PROC / "uptime").read_text().split()[0])
    found = [_describe(pid, peers.get(pid, {}), up) for pid in [parent, *pids]]
    return [entry for entry in found if entry is not None]


def _describe(pid: int, peer: Mapping[str, Any], up: float) -> dict[str, Any] | None:
    folder = PROC / str(pid)
    try:
        words = (folder / "cmdline").read_bytes().split(b"\0")
        size = [int(pages) for pages in (folder / "statm").read_text().split()]
        times = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return None
    if b"workers.child" not in words and pid != os.getppid():
        return None
    role = str(peer.get("role", "supervisor"))
    if b"workers.child" in words and not peer:
        parts = words[words.index(b"workers.child") + 1].decode().split(".")
        name = parts[-2] if parts[-1] == "process" else parts[-1]
        role = ROLES.get(name, name)
    return {
        "role": role,
        "index": peer.get("index", 0),
        "pid": pid,
        "alive": round(up - int(times[19]) / TICKS, 1),
        "memory": (size[1] - size[2]) * PAGE,
        "cpu": (int(times[11]) + int(times[12])) / TICKS,
    }
