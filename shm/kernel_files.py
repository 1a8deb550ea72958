"""Small files of /proc and /sys, and the limits of control groups (version 1 and 2) that they tell.

A missing or malformed file gives an empty result. A limit of any group above ours binds us as well, so all
are read up to the root that is visible here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


def contents(path: Path) -> str:
    """A file's text without surrounding whitespace; "" if it cannot be read."""
    try:
        return path.read_text("utf-8", errors="replace").strip("\0 \n")
    except OSError:
        return ""


def number(text: str) -> int | None:
    """A whole number that is not negative; None for anything else."""
    return int(text) if re.fullmatch(r"[0-9]{1,20}", text) else None


def entries(folder: Path, pattern: str) -> list[Path]:
    """The matching entries of a folder, cpu2 before cpu10; none if it cannot be listed."""
    try:
        matching = list(folder.glob(pattern))
    except OSError:
        return []
    return sorted(matching, key=lambda p: [int(n) if n.isdigit() else n for n in re.split(r"(\d+)", p.name)])


def parse_cores(text: str) -> frozenset[int]:
    """The numbers of a kernel's list such as "0-3,8"; none if it is malformed."""
    if not re.fullmatch(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", text):
        return frozenset()
    spans = [part.partition("-") for part in text.split(",")]
    return frozenset(n for low, _, high in spans for n in range(int(low), int(high or low) + 1))


def parse_cpuinfo(text: str) -> str:
    """The model of the first processor in /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    model = fields.get("model name") or fields.get("Model") or fields.get("cpu") or ""
    if not model and "CPU part" in fields:
        model = f"implementer {fields.get('CPU implementer', '?')} part {fields['CPU part']}"
    return model or "unknown processor"


MEMORY_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")  # version 1's names
FILE_PAGES = ("active", "inactive")
UNLIMITED = 1 << 60  # version 1 writes "no limit" as the largest number of pages there is


@dataclass(frozen=True)
class Limits:
    """Limits of this process; None where there is no limit, or none that can be seen."""

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
