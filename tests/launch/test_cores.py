"""Cores: each worker has its own, and all are used, on any machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.processes.cores import Cores, CpuSet, Thread, read_threads
from launch.processes.supervisor import Supervisor
from pipeline.config import EngineConfig, ResolvedConfig


def machine(nodes: int, cores: int, threads: int = 1) -> tuple[Thread, ...]:
    """`cores` a node; numbered as usual: first the first thread of every core, then the second of each."""
    every = nodes * cores
    return tuple(Thread(number % every // cores, number % every, number) for number in range(every * threads))


def write(root: Path, **files: str) -> None:
    """Files under a root; "__" in a name is "/"."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def only(threads: tuple[Thread, ...], usable: Collection[int]) -> tuple[Thread, ...]:
    return tuple(thread for thread in threads if thread.number in usable)


def sets(cpu_sets: tuple[CpuSet, ...]) -> list[set[int]]:
    return [set(cpus.cores) for cpus in cpu_sets]


@st.composite
def any_cores(draw: st.DrawFn) -> Cores:
    whole = machine(draw(st.integers(1, 4)), draw(st.integers(1, 8)), draw(st.integers(1, 2)))
    usable = draw(st.sets(st.sampled_from([thread.number for thread in whole]), min_size=1))
    return Cores(only(whole, usable), draw(st.none() | st.floats(0.1, 64)))


@settings(max_examples=300)
@given(any_cores(), st.integers(1, 80))
def test_workers_divide_the_cores_among_them(cores: Cores, workers: int) -> None:
    cpu_sets = cores.for_workers(workers)
    assert len(cpu_sets) == workers
    used = [core for cpus in cpu_sets for core in cpus.cores]
    assert all(cpus.cores for cpus in cpu_sets)
    assert set(used) <= set(cores.numbers)
    node = {thread.number: thread.node for thread in cores.threads}
    for cpus in cpu_sets:
        nodes = {node[core] for core in cpus.cores}
        assert nodes == {cpus.node} if cpus.node is not None else len(nodes) > 1
    on = [cpus.node for cpus in cpu_sets if cpus.node is not None]
    assert on == sorted(on)
    physical = {(thread.node, thread.core) for thread in cores.threads}
    most = len(cores.threads) if cores.quota is None else max(1, int(cores.quota))
    if workers <= min(len(physical), most):
        assert len(used) == len(set(used)) == min(len(physical), most)  # disjoint, and together all
        core = {thread.number: (thread.node, thread.core) for thread in cores.threads}
        assert len({core[number] for number in used}) == len(used)  # one thread of each
        if workers >= len(cores.nodes):
            assert all(cpus.node is not None for cpus in cpu_sets)
    elif workers >= min(len(cores.threads), most):
        assert all(len(cpus.cores) == 1 for cpus in cpu_sets)
        assert len(set(used)) == min(len(cores.threads), most)  # all are used before any is shared


def test_threads_are_chosen_by_core_node_and_quota() -> None:
    cores = Cores(machine(1, 4, threads=2))
    assert cores.default_workers() == cores.computing == 4
    assert sets(cores.for_workers(2)) == [{0, 1}, {2, 3}]  # second threads only for more workers
    assert sets(Cores(only(cores.threads, {4, 5, 1})).for_workers(2)) == [{4}, {1}]  # 1 and 5 are one core
    cores = Cores(machine(2, 4))
    assert cores.nodes == (0, 1)
    assert cores.for_workers(2) == (CpuSet((0, 1, 2, 3), 0), CpuSet((4, 5, 6, 7), 1))
    assert [cpus.node for cpus in cores.for_workers(3)] == [0, 0, 1]
    assert cores.for_workers(1) == (CpuSet(tuple(range(8)), None),)
    uneven = Cores(only(machine(2, 4), {0, 1, 2, 3, 6}))
    assert Counter(cpus.node for cpus in uneven.for_workers(3)) == {0: 2, 1: 1}
    cores = Cores(machine(2, 2, threads=2), quota=3.5)
    assert cores.default_workers() == 3
    assert [cpus.cores for cpus in cores.for_workers(3)] == [(0,), (1,), (2,)]
    assert Cores(machine(1, 4), quota=0.5).for_workers(1) == (CpuSet((0,), 0),)


def test_topology_is_read_from_sysfs(tmp_path: Path) -> None:
    assert read_threads(range(2), tmp_path) == tuple(Thread(0, n, n) for n in range(2))
    write(
        tmp_path,
        sys__devices__system__cpu__online="0-1,3",  # 2 is offline
        sys__devices__system__node__node0__cpulist="0,2",
        sys__devices__system__node__node3__cpulist="1,3",
        sys__devices__system__cpu__cpu1__topology__thread_siblings_list="1,3",
        sys__devices__system__cpu__cpu3__topology__thread_siblings_list="1,3",
    )
    found = read_threads({1, 2, 3}, tmp_path)
    assert found == (Thread(3, 1, 1), Thread(3, 1, 3))
    assert Cores(found).for_workers(1) == (CpuSet((1,), 3),)


@pytest.mark.parametrize("quota", [None, 6.5])
@pytest.mark.parametrize(("nodes", "cores", "threads"), [(1, 8, 1), (1, 8, 2), (2, 4, 2), (1, 4, 1)])
def test_one_core_is_left_to_a_coordinator_with_a_gpu(nodes: int, cores: int, threads: int, quota) -> None:
    here = Cores(machine(nodes, cores, threads), quota)
    beside = here.beside_coordinator(None)
    assert beside.computing == here.computing - 1
    gone = set(here.threads) - set(beside.threads)
    assert {(thread.node, thread.core) for thread in gone} == {(0, cores - 1)}
    assert len(gone) == threads
    used = set().union(*sets(beside.for_workers(beside.default_workers())))
    assert not used & {thread.number for thread in gone}
    assert here.beside_coordinator(here.computing) is here  # all were asked for
    assert here.beside_coordinator(here.computing - 1) == beside


TWO_NODES = Cores(tuple(Thread(number // 2, number, number) for number in range(4)))


@pytest.mark.parametrize(
    ("workers", "sizes", "nodes"),
    [(2, [2, 2], 2), (3, [1, 1, 2], 2), (1, [4], 1), (0, [], 2)],
    ids=["a worker a node", "more workers", "one across both", "none"],
)
def test_coordinator_counts_nodes_where_each_worker_lies_on_one(
    workers: int, sizes: list[int], nodes: int
) -> None:
    asked = EngineConfig(model=Path("/m"), name="n", workers=workers)
    engine = Supervisor(asked)
    engine._config, engine._cores = ResolvedConfig(**vars(asked)), TWO_NODES
    engine._runtime = cast(Any, SimpleNamespace(path=Path("/r")))
    engine._monitor = cast(Any, SimpleNamespace(suspects={}))
    config_map = engine._child_config("coordinator")
    assert sorted(config_map["workers"]) == sizes
    assert config_map["nodes"] == nodes
