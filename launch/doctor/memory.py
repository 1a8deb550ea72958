"""Main memory: size, limits, page locking; the limit of open files; and /dev/shm, which holds the experts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from launch.doctor.finding import Finding, Topic
from pipeline.memory.plan import FREE_BYTES
from shm.kernel_files import contents
from shm.segment import SHM_FOLDER, byte_size

TOPIC, SHARED = Topic("memory"), Topic("shared memory")
SMALL = 1 << 28  # bytes of /dev/shm; a container's default is 64 MB, too small for any larger model
LARGE_PAGES = {"always", "within_size"}
CAP_IPC_LOCK = 1 << 14
FEW_FILES = 256  # a coordinator opens dozens, and one for each client
KB = 1024
MEMINFO = Path("/proc/meminfo")


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo: sizes in bytes, counts (HugePages_*) unscaled; other lines are skipped."""
    sizes: dict[str, int] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit() and len(words) <= 2:
            sizes[key.strip()] = int(words[0]) * (KB if words[1:] == ["kB"] else 1)
    return sizes


def inspect(
    needed: int, group_limit: int | None, lockable: int | None, files: int, root: Path = Path("/")
) -> list[Finding]:
    """`needed`: bytes of the embedded model's store. `group_limit`: the control group's, bytes. `lockable`:
    RLIMIT_MEMLOCK in bytes, None where it is unlimited. `files`: RLIMIT_NOFILE."""
    info = parse_meminfo(contents(root / str(MEMINFO).lstrip("/")))
    if has_capability(contents(root / "proc/self/status"), CAP_IPC_LOCK):
        lockable = None
    return [
        *_amount(info, needed, group_limit),
        _locking(lockable, info.get("MemTotal", 0)),
        _files(files),
    ]


def has_capability(status: str, bit: int) -> bool:
    mask = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) & bit)


def _amount(info: dict[str, int], needed: int, group_limit: int | None) -> Iterator[Finding]:
    total, available = info.get("MemTotal"), info.get("MemAvailable")
    if not total or available is None:
        yield TOPIC.note("memory: unknown", "a model that does not fit fails only as it loads")
        return
    size = f"{byte_size(total)}, {byte_size(available)} available"
    if available < needed + FREE_BYTES:
        means = f"even the embedded model needs {byte_size(needed + FREE_BYTES)}"
        yield TOPIC.problem(size, means, "close other programs", prevents=True)
        return
    most = min(available, group_limit or available) - FREE_BYTES
    means = f"experts of up to {byte_size(max(most, 0))} fit; {byte_size(FREE_BYTES)} stay free for the rest"
    yield TOPIC.ok(size, means)
    if group_limit is not None and group_limit < total:
        yield TOPIC.note(
            f"the control group allows {byte_size(group_limit)}",
            "experts in shared memory count; beyond the limit the kernel kills a process of the engine",
            "choose a model that fits, or raise the limit (`docker run --memory`, MemoryMax)",
        )


def _locking(lockable: int | None, total: int) -> Finding:
    if lockable is None or (total and lockable >= total):
        return TOPIC.ok("pages can be locked without limit", "experts cannot be swapped out")
    return TOPIC.note(
        f"{byte_size(lockable)} can be locked (memlock limit)",
        "larger models work too, but the rest of their experts can be swapped out",
        "ulimit -l unlimited\n"
        "or for good, in /etc/security/limits.conf: `* - memlock unlimited`, then log in again\n"
        "in a container: `docker run --ulimit memlock=-1`",
    )


def _files(limit: int) -> Finding:
    found = f"limit of open files: {limit}"
    if limit < FEW_FILES:
        return TOPIC.note(found, "an engine opens dozens, and one for each client", "ulimit -n 4096")
    return TOPIC.ok(found, "sufficient: each client needs one")


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


def inspect_shared(needed: int, memory: int, root: Path = Path("/")) -> list[Finding]:
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
    return SHARED.problem(f"{SHM_FOLDER}: {why}", means, do, prevents=True)


def capacity(total: int, free: int, needed: int, memory: int) -> Finding:
    """Tells which models' experts fit /dev/shm; all arguments in bytes."""
    found = f"{SHM_FOLDER}: {byte_size(total)}, {byte_size(free)} free"
    half = max(memory // 2 // 2**20, 1024)
    enlarge = (
        f"sudo mount -o remount,size={half}m {SHM_FOLDER}\n"
        f"for a container: `docker run --shm-size={half}m` (or `--ipc=host`)"
    )
    if free < needed:
        means = f"even the embedded model's experts need {byte_size(needed)}"
        return SHARED.problem(found, means, enlarge, prevents=True)
    if total < SMALL:
        means = "large enough for the embedded model's experts alone: this is a container's default size"
        return SHARED.problem(found, means, enlarge)
    means = f"experts of up to {byte_size(free)} fit; the embedded model's are {byte_size(needed)}"
    if total < memory // 3:
        return SHARED.note(found, means + "; the memory could hold more", enlarge)
    return SHARED.ok(found, means)


def pages(options: tuple[str, ...]) -> list[Finding]:
    if not options:
        return []
    huge = next((o.removeprefix("huge=") for o in options if o.startswith("huge=")), "never")
    found = f"mounted with {','.join(options)}"
    if huge in LARGE_PAGES:
        return [SHARED.ok(found, "experts are stored in huge pages while memory has them free")]
    return [SHARED.ok(found, "experts are stored in small pages; see speed for huge ones")]
