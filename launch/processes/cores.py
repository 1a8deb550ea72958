"""The choice of cores that the engine's processes compute on.

Decode is bound by reading weights, and two hardware threads of a core read no more than one: so workers take
one thread of each core, and both only where --workers asks for more workers than there are cores. By default
there is one worker a core, because a worker's threads synchronize several times within each tile. Beyond
MOST_WORKERS each has more cores instead: a worker costs the coordinator two messages in every layer.

Workers' sets of cores are disjoint, cover what the process may use, and lie within one NUMA node each where
there are at least as many workers as nodes. Coordinator and prefetcher are bound to no core: the coordinator
computes while the workers wait, and the prefetcher copies on any idle core. Where a GPU computes, the
coordinator launches kernels and waits for landings while the workers compute, so one core is left to it.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from shm.kernel_files import contents, entries, limits, parse_cores

MOST_WORKERS = 16  # by default
LEAST_TO_LEAVE_ONE = 4  # cores: of fewer, one is too large a part of what reads the host's experts


@dataclass(frozen=True, order=True)
class Thread:
    """A hardware thread by the kernel's number. `core`: the first thread of the same core."""

    node: int
    core: int
    number: int


@dataclass(frozen=True)
class CpuSet:
    """One worker's hardware threads. `node`: the NUMA node of all of them; None where they lie on several."""

    cores: tuple[int, ...]
    node: int | None


@dataclass(frozen=True)
class Cores:
    """The threads that this process may run on, and how many cores' time its control group grants it."""

    threads: tuple[Thread, ...]
    quota: float | None = None

    @classmethod
    def here(cls) -> Cores:
        return cls(read_threads(os.sched_getaffinity(0)), limits().cpus)

    @property
    def numbers(self) -> list[int]:
        return sorted(thread.number for thread in self.threads)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The NUMA nodes that workers compute on, ascending."""
        return tuple(sorted({thread.node for thread in self._units(1)}))

    @property
    def computing(self) -> int:
        """Counts the threads that can compute at once without sharing a core or exceeding the quota."""
        return len(self._units(1))

    def default_workers(self) -> int:
        return min(self.computing, MOST_WORKERS)

    def beside_coordinator(self, workers: int | None) -> Cores:
        """Returns the workers' cores where the coordinator uses a GPU: one less, the last of the first node,
        unless so many `workers` were asked for that each would not have one."""
        most = self.computing - 1
        if most + 1 < LEAST_TO_LEAVE_ONE or (workers is not None and workers > most):
            return self
        first = min(self.threads)
        last = max(thread.core for thread in self.threads if thread.node == first.node)
        others = tuple(t for t in self.threads if (t.node, t.core) != (first.node, last))
        return Cores(others, None if self.quota is None else self.quota - 1)

    def for_workers(self, workers: int) -> tuple[CpuSet, ...]:
        """The cores of each worker, by node. Where there are more workers than threads, some share one."""
        units = self._units(workers)
        nodes = [list(group) for _, group in groupby(units, key=lambda thread: thread.node)]
        if workers < len(nodes):
            return tuple(_cpu_set(part) for part in _parts(units, workers))
        counts = [1] * len(nodes)
        for _ in range(workers - len(nodes)):  # to the node with most cores a worker
            counts[max(range(len(nodes)), key=lambda i: len(nodes[i]) / counts[i])] += 1
        divided = (_parts(node, count) for node, count in zip(nodes, counts, strict=True))
        return tuple(_cpu_set(part) for parts in divided for part in parts)

    def _units(self, workers: int) -> list[Thread]:
        """The threads for so many workers, by node and core: one of each core, or all where these are too
        few; at most the quota."""
        order = sorted(self.threads)
        chosen = sorted({(thread.node, thread.core): thread for thread in reversed(order)}.values())
        if workers > len(chosen):
            chosen += [thread for thread in order if thread not in chosen]
        most = len(chosen) if self.quota is None else max(1, int(self.quota))
        return sorted(chosen[:most])


def read_threads(usable: Collection[int], root: Path = Path("/")) -> tuple[Thread, ...]:
    """The usable threads that are online, by sysfs; without its data each is a core of its own on node 0."""
    system = root / "sys/devices/system"
    online = parse_cores(contents(system / "cpu/online"))
    node_of = {
        number: int(folder.name.removeprefix("node"))
        for folder in entries(system / "node", "node[0-9]*")
        for number in parse_cores(contents(folder / "cpulist"))
    }
    threads = []
    for number in sorted(online & set(usable)) or sorted(usable):
        siblings = parse_cores(contents(system / f"cpu/cpu{number}/topology/thread_siblings_list"))
        threads.append(Thread(node_of.get(number, 0), min(siblings, default=number), number))
    return tuple(threads)


def _parts(units: list[Thread], count: int) -> list[list[Thread]]:
    """`count` parts of about equal size, in order; of one thread each, in turns, where there are too few."""
    if count >= len(units):
        return [[units[i % len(units)]] for i in range(count)]
    return [units[len(units) * i // count : len(units) * (i + 1) // count] for i in range(count)]


def _cpu_set(threads: list[Thread]) -> CpuSet:
    nodes = {thread.node for thread in threads}
    return CpuSet(tuple(sorted(t.number for t in threads)), nodes.pop() if len(nodes) == 1 else None)
