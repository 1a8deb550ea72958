"""Main memory: size, limits, swap, page locking, page sizes; and the limit of open files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from launch.doctor.finding import Finding, Topic, chosen
from pipeline.memory.plan import FREE_BYTES
from shm.kernel_files import contents
from shm.segment import byte_size

TOPIC = Topic("memory")
CAP_IPC_LOCK = 1 << 14
FEW_FILES = 256  # a coordinator opens dozens, and one for each client
KB = 1024
MEMINFO = Path("/proc/meminfo")


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo: sizes in bytes, counts (HugePages_*) unscaled; other lines are skipped."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit() and len(words) <= 2:
            found[key.strip()] = int(words[0]) * (KB if words[1:] == ["kB"] else 1)
    return found


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
        *_swap(info),
        _locking(lockable, info.get("MemTotal", 0)),
        *_pages(root, info),
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


def _swap(info: dict[str, int]) -> Iterator[Finding]:
    total = info.get("SwapTotal")
    if total:
        used = total - info.get("SwapFree", total)
        means = "experts that are not locked can be swapped out under memory pressure, and then take seconds"
        yield TOPIC.ok(f"swap: {byte_size(total)}, {byte_size(used)} used", means)
    elif total == 0:
        yield TOPIC.ok("no swap", "experts stay in memory; a model that does not fit fails")


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


def _pages(root: Path, info: dict[str, int]) -> Iterator[Finding]:
    folder = root / "sys/kernel/mm/transparent_hugepage"
    enabled, shared = contents(folder / "enabled"), contents(folder / "shmem_enabled")
    if enabled:
        words = f"transparent huge pages: {chosen(enabled)}"
        words += f"; for shared memory: {chosen(shared)}" if shared else ""
        yield TOPIC.ok(words, "for experts the mount option of /dev/shm decides: see shared memory")
    else:
        yield TOPIC.ok("no transparent huge pages", "experts are stored in small pages")
    reserved, free = info.get("HugePages_Total", 0), info.get("HugePages_Free", 0)
    if reserved:
        size = byte_size(reserved * info.get("Hugepagesize", 2 << 20))
        yield TOPIC.note(
            f"{reserved} huge pages are reserved, {free} of them free",
            f"these {size} are reserved for programs that request them; experts cannot use them",
            "if no other program needs them: sudo sysctl vm.nr_hugepages=0",
        )


def _files(limit: int) -> Finding:
    found = f"limit of open files: {limit}"
    if limit < FEW_FILES:
        return TOPIC.note(found, "an engine opens dozens, and one for each client", "ulimit -n 4096")
    return TOPIC.ok(found, "sufficient: each client needs one")
