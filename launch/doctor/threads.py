"""The cores and NUMA nodes on which each of an engine's processes computes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from launch.doctor.finding import Finding, Topic
from launch.processes.cores import Cores

TOPIC = Topic("threads")


def inspect(cores: Cores) -> list[Finding]:
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
        found.append(TOPIC.ok(f"{words}{where}", _workers_mean(cores)))
        first = last + 1
    others = f"coordinator: {_count(cores.computing)}, prefetcher: one thread"
    means = "coordinator and workers compute alternately, and sleep while they wait"
    found.append(TOPIC.ok(f"{others}, on any idle core of {spelled(cores.numbers)}", means))
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
