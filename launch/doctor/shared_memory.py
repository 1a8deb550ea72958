"""/dev/shm, which holds the experts: its size and free space, its mount options."""

from __future__ import annotations

import os
from pathlib import Path

from launch.doctor.finding import Finding, Topic
from shm.kernel_files import contents
from shm.segment import SHM_FOLDER, byte_size

TOPIC = Topic("shared memory")
SMALL = 1 << 28  # bytes; a container's default is 64 MB, too small for any larger model
LARGE_PAGES = {"always", "within_size"}


def mount_options(mountinfo: str, folder: str = SHM_FOLDER) -> tuple[str, ...]:
    """Options of the last mount at this folder, from /proc/self/mountinfo; empty without a mount."""
    options: tuple[str, ...] = ()
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) >= 6 and len(rest) >= 3 and fields[4] == folder:
            # of this mount, then of the file system
            options = tuple(dict.fromkeys(fields[5].split(",") + rest[2].split(",")))
    return options


def inspect(needed: int, memory: int, root: Path = Path("/")) -> list[Finding]:
    """`needed`: bytes of the embedded model's store. `memory`: MemTotal in bytes."""
    folder = root / SHM_FOLDER.lstrip("/")
    try:
        status = os.statvfs(folder)
    except OSError as e:
        do = f"sudo mount -t tmpfs -o mode=1777 tmpfs {SHM_FOLDER}"
        return [_unusable(e.strerror or str(e), do)]
    if not os.access(folder, os.W_OK | os.X_OK):
        return [_unusable("it is not writable", f"sudo chmod 1777 {SHM_FOLDER}")]
    options = mount_options(contents(root / "proc/self/mountinfo"))
    total, free = (blocks * status.f_frsize for blocks in (status.f_blocks, status.f_bavail))
    return [capacity(total, free, needed, memory), *pages(options)]


def _unusable(why: str, do: str) -> Finding:
    means = "experts cannot be stored anywhere else"
    return TOPIC.problem(f"{SHM_FOLDER}: {why}", means, do, prevents=True)


def capacity(total: int, free: int, needed: int, memory: int) -> Finding:
    """Which models' experts fit /dev/shm; all arguments in bytes."""
    found = f"{SHM_FOLDER}: {byte_size(total)}, {byte_size(free)} free"
    half = max(memory // 2 // 2**20, 1024)
    enlarge = (
        f"sudo mount -o remount,size={half}m {SHM_FOLDER}\n"
        f"for a container: `docker run --shm-size={half}m` (or `--ipc=host`)"
    )
    if free < needed:
        means = f"even the embedded model's experts need {byte_size(needed)}"
        return TOPIC.problem(found, means, enlarge, prevents=True)
    if total < SMALL:
        means = "large enough for the embedded model's experts alone: this is a container's default size"
        return TOPIC.problem(found, means, enlarge)
    means = f"experts of up to {byte_size(free)} fit; the embedded model's are {byte_size(needed)}"
    if total < memory // 3:
        return TOPIC.note(found, means + "; the memory could hold more", enlarge)
    return TOPIC.ok(found, means)


def pages(options: tuple[str, ...]) -> list[Finding]:
    if not options:
        return []
    huge = next((o.removeprefix("huge=") for o in options if o.startswith("huge=")), "never")
    found = f"mounted with {','.join(options)}"
    if huge in LARGE_PAGES:
        return [TOPIC.ok(found, "experts are stored in huge pages while memory has them free")]
    return [TOPIC.ok(found, "experts are stored in small pages; see speed for huge ones")]
