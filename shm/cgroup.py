"""Limits of the control groups that this process is in, of version 1 and 2, as containers and services set
them.

A limit of any group above ours binds us as well, so all are read up to the root that is visible here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from shm.kernel_files import contents, number

MEMORY_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")  # version 1's names
FILE_PAGES = ("active", "inactive")
UNLIMITED = 1 << 60  # version 1 writes "no limit" as the largest number of pages there is


@dataclass(frozen=True)
class Limits:
    """None: no limit, or none that can be seen."""

    cpus: float | None  # computing time in cores
    memory: int | None  # bytes, shared memory included


def limits(root: Path = Path("/")) -> Limits:
    """The lowest limits that bind this process."""
    cpus = [cores for group in _groups(root, "cpu") if (cores := _cpus(group)) is not None]
    memory: list[int] = []
    for group in _groups(root, "memory"):
        sizes = (number(contents(group / name)) for name in ("memory.max", MEMORY_1[0]))
        memory += [size for size in sizes if size is not None and size < UNLIMITED]
    return Limits(min(cpus, default=None), min(memory, default=None))


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that may still be used under the memory limits that bind this process; None where none does.
    Pages of files on disk are counted as free, as the kernel takes them back."""
    free = []
    for group in _groups(root, "memory"):
        for limit, used in (("memory.max", "memory.current"), MEMORY_1):
            most, now = number(contents(group / limit)), number(contents(group / used))
            if most is not None and most < UNLIMITED and now is not None:
                lines = re.findall(r"^(\w+) (\d+)$", contents(group / "memory.stat"), re.M)
                stat: dict[str, str] = dict(lines)
                # version 1 has a group's own pages, and with "total_" those of the groups in it
                pages = [stat.get(f"total_{kind}_file", stat.get(f"{kind}_file", "0")) for kind in FILE_PAGES]
                free.append(max(0, most - now + sum(map(int, pages))))
    return min(free, default=None)


def parse_quota(text: str) -> float | None:
    """Cores of a cpu.max such as "150000 100000"; None for "max 100000" and anything else."""
    quota, _, period = text.partition(" ")
    return _share(quota, period or "100000")


def _cpus(group: Path) -> float | None:
    if text := contents(group / "cpu.max"):
        return parse_quota(text)
    return _share(contents(group / "cpu.cfs_quota_us"), contents(group / "cpu.cfs_period_us"))


def _share(quota: str, period: str) -> float | None:
    a, b = number(quota), number(period)
    return a / b if a and b else None


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the groups that we are in and that have this controller, from ours upwards."""
    ours = {}
    for line in contents(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for name in controllers.split(","):  # "" for version 2
            ours[name] = path
    for line in contents(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            group = ours.get("")
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            group = ours.get(controller)
        else:
            continue
        if group is None:
            continue
        mount = root / fields[4].lstrip("/")
        inside = PurePosixPath(group)
        # A container often sees its own group as the mount's root, while the path is the host's.
        within = inside.relative_to(fields[3]) if inside.is_relative_to(fields[3]) else PurePosixPath()
        yield from (mount / part for part in (within, *within.parents))
