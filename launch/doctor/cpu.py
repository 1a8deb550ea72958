"""The processor: cores, caches, instruction sets, NUMA nodes, clock; where an engine's processes compute."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from launch.doctor.finding import Finding, Topic, binary, parse_size
from launch.processes.cores import Cores
from protocol.program import COMMAND
from shm.kernel_files import contents, entries, parse_cores, parse_cpuinfo

TOPIC, THREADS = Topic("cpu"), Topic("threads")
INSTRUCTIONS = (
    # as /proc/cpuinfo names them on x86, then on aarch64
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2", "svebf16"),
)
BF16 = {"avx512_bf16", "amx_bf16"}  # of which the kernels have products; not of ARM's
WIDE = {"avx2", "avx512f", "asimd"}
SLOW_GOVERNORS = {"powersave", "conservative", "ondemand"}
SELF_CLOCKED = ("intel_pstate", "amd-pstate")  # drivers: their "powersave" follows the load at once


@dataclass(frozen=True)
class Cache:
    """All caches of one level: instances, and their bytes together."""

    instances: int
    total: int


def caches(root: Path = Path("/")) -> dict[str, Cache]:
    """Returns all by name (L1d, L2, L3); none where sysfs lists none, as in some virtual machines."""
    seen: dict[tuple[str, str, str], int] = {}
    for index in entries(root / "sys/devices/system/cpu", "cpu[0-9]*/cache/index*"):
        level, kind = contents(index / "level"), contents(index / "type")
        size, shared = parse_size(contents(index / "size")), contents(index / "shared_cpu_list")
        if level and size and kind != "Instruction":
            name = f"L{level}" + ("d" if kind == "Data" else "")
            seen[(name, shared, "" if shared else str(index))] = size
    levels: dict[str, Cache] = {}
    for (name, _, _), size in sorted(seen.items()):
        before = levels.get(name, Cache(0, 0))
        levels[name] = Cache(before.instances + 1, before.total + size)
    return levels


def physical_cores(root: Path = Path("/")) -> int | None:
    """Cores, each counted once for all its hardware threads; None where sysfs does not list them."""
    folders = entries(root / "sys/devices/system/cpu", "cpu[0-9]*/topology")
    pairs = {(contents(f / "physical_package_id"), contents(f / "core_id")) for f in folders}
    return len(pairs) if pairs and all(core for _, core in pairs) else None


def inspect(usable: Collection[int], quota: float | None, root: Path = Path("/")) -> list[Finding]:
    """`usable`: the cores this process may run on. `quota`: its control group's CPU time, in cores."""
    model, flags = parse_cpuinfo(contents(root / "proc/cpuinfo"))
    online = parse_cores(contents(root / "sys/devices/system/cpu/online")) or frozenset(usable)
    return [
        *_cores(model, len(online), physical_cores(root), len(usable), quota),
        _caches(caches(root)),
        _instructions(flags),
        *_nodes(root),
        *_clock(root),
    ]


def _cores(
    model: str, logical: int, physical: int | None, usable: int, quota: float | None
) -> Iterator[Finding]:
    cores = f"{physical} cores, {logical} threads" if physical else f"{logical} threads"
    means = "workers use one thread of each usable core: see threads"
    yield TOPIC.ok(f"{model}: {cores}, {usable} usable here", means)
    if usable < logical:
        yield TOPIC.note(
            f"this process may use {usable} of {logical} threads",
            "the memory bandwidth of the other cores is not used either",
            "if unintended, check: `taskset -c`, `docker run --cpuset-cpus`, a service's AllowedCPUs",
        )
    if quota is not None and quota < usable:
        used = max(1, int(quota))
        yield TOPIC.note(
            f"the control group's CPU quota: {quota:g} of {usable} usable cores",
            f"so an engine's workers compute on {used} core{'s' if used > 1 else ''}: on more they would"
            " exhaust the quota and all be stopped for the rest of each period",
            f"to use more cores, raise it: `docker run --cpus {usable}`",
        )
    if physical and logical > physical and usable > physical:
        yield TOPIC.ok(
            f"each core runs {logical / physical:g} threads",
            "the threads of a core share its memory bandwidth, so one thread of each core is used;"
            f" `{COMMAND} bench --workers {usable}` measures all of them",
        )


def _caches(found: dict[str, Cache]) -> Finding:
    if not found:
        return TOPIC.note("caches: unknown", "the size of the measurements' buffers is a guess")
    parts = [
        f"{name} {binary(cache.total)}" + (f" in {cache.instances}" if cache.instances > 1 else "")
        for name, cache in found.items()
    ]
    means = "experts that fit the last level are read faster than from memory; a large model's do not fit"
    return TOPIC.ok("caches: " + ", ".join(parts), means)


def _instructions(flags: frozenset[str]) -> Finding:
    have = [name for name in INSTRUCTIONS if name in flags]
    found = "instruction sets: " + (", ".join(have) or "none that the kernels use")
    if BF16 & set(have):
        return TOPIC.ok(found, "bf16 experts are multiplied by bf16 instructions")
    if WIDE & set(have):
        means = "the kernels use no bf16 instructions here: bf16 weights are widened as they are multiplied,"
        return TOPIC.note(found, means + " which slows prompts more than single tokens")
    return TOPIC.note(found, "computation, not memory bandwidth, will bound the speed")


def _nodes(root: Path) -> Iterator[Finding]:
    folders = entries(root / "sys/devices/system/node", "node[0-9]*")
    nodes = {f.name: parse_cores(contents(f / "cpulist")) for f in folders}
    if len(nodes) == 1:
        yield TOPIC.ok("one NUMA node", "all memory is equally fast for all cores")
    elif nodes:
        sizes = ", ".join(f"{name} {len(cores)} threads" for name, cores in nodes.items())
        means = "the store's tiles are spread over the nodes of the workers' cores; the backbone is not"
        yield TOPIC.ok(f"{len(nodes)} NUMA nodes: {sizes}", means)


def _clock(root: Path) -> Iterator[Finding]:
    folder = root / "sys/devices/system/cpu/cpu0/cpufreq"
    governor, driver = contents(folder / "scaling_governor"), contents(folder / "scaling_driver")
    found = f"frequency governor: {governor}" + (f" ({driver})" if driver else "")
    if governor in SLOW_GOVERNORS and not driver.startswith(SELF_CLOCKED):
        means = "workers sleep between tokens, and each token waits for the cores to reach full clock again"
        yield TOPIC.note(found, means, "sudo cpupower frequency-set -g performance")
    elif governor:
        yield TOPIC.ok(found, "the cores' clock follows the load")


def inspect_threads(cores: Cores) -> list[Finding]:
    """Findings for an engine that is started without `--workers`."""
    core_sets = cores.for_workers(cores.default_workers())
    several = len(cores.nodes) > 1
    found = []
    first = 0
    for (width, node), group in groupby(core_sets, key=lambda seat: (len(seat.cores), seat.node)):
        same = list(group)
        last = first + len(same) - 1
        between = "and" if last == first + 1 else "to"
        workers = f"worker {first}" if first == last else f"workers {first} {between} {last}"
        each = " each" if first != last else ""
        words = f"{workers}: {_count(width)}{each} on {' | '.join(spelled(seat.cores) for seat in same)}"
        where = f", NUMA node {node}" if several and node is not None else ""
        found.append(THREADS.ok(f"{words}{where}", _workers_mean(cores)))
        first = last + 1
    others = f"coordinator: {_count(cores.computing)}, prefetcher: one thread"
    means = "coordinator and workers compute alternately, and sleep while they wait"
    found.append(THREADS.ok(f"{others}, on any idle core of {spelled(cores.numbers)}", means))
    return found


def spelled(numbers: Iterable[int]) -> str:
    """ "0-3,8" for 0, 1, 2, 3, 8: the notation of the kernel and taskset."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in spans)


def _count(threads: int) -> str:
    return "one thread" if threads == 1 else f"{threads} threads"


def _workers_mean(cores: Cores) -> str:
    means = "pinned to these cores, which no other worker uses"
    if len(cores.nodes) > 1:
        means += "; in decode each computes tiles of its own node, as far as all workers stay busy"
    return means
