"""The doctor's map of threads and kernels: who would compute where, and with what code."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import words

from launch.doctor import kernels, threads
from launch.doctor.finding import Finding
from launch.processes.cores import Cores, Thread
from shm.kernel_files import parse_cores
from shm.layout import FORMATS
from workers.kernels.native import VARIANTS, Library, load


def machine(nodes: int, cores: int) -> Cores:
    return Cores(tuple(Thread(n // cores, (n,), n) for n in range(nodes * cores)))


@given(st.sets(st.integers(0, 300), min_size=1))
def test_lists_of_cores_are_spelled_as_they_are_read(numbers: set[int]) -> None:
    assert parse_cores(threads.spelled(numbers)) == numbers


def test_the_map_names_every_worker_s_cores() -> None:
    found = [f.found for f in threads.inspect(machine(1, 2))]
    assert found == [
        "workers 0 and 1: one thread each on 0 | 1",
        "coordinator: 2 threads, prefetcher: one, wherever 0-1 are idle",
    ]
    assert threads.inspect(machine(1, 1))[0].found == "worker 0: one thread on 0"


def test_the_map_says_which_node_a_worker_is_on() -> None:
    first, second, rest = threads.inspect(machine(2, 16))
    assert first.found.startswith("workers 0 to 7: 2 threads each on 0-1 | 2-3 | ")
    assert first.found.endswith("14-15, NUMA node 0")
    assert "NUMA node 1" in second.found
    assert "its own node" in second.means
    assert rest.found.startswith("coordinator: 32 threads")


def test_every_format_is_said_to_be_computed_by_something() -> None:
    """By the variant that runs on this machine, or by torch."""
    found = kernels.inspect()
    text = words(found)
    assert all(name in text for name in FORMATS) or "experts of every format" in text
    assert all(title in text for title in VARIANTS.values())
    for name in VARIANTS:
        loaded = load(name)
        assert isinstance(loaded, Library) or loaded in text


def test_without_compiled_kernels_it_is_said_how_to_get_them() -> None:
    reason = "not compiled at installation"
    first, second = kernels.explain(dict.fromkeys(VARIANTS, reason), None, quantizer=False)
    assert first.level == second.level == "note"
    assert not first.prevents
    assert first.found == f"no compiled kernels: {', '.join(VARIANTS.values())}: {reason}"
    assert "through torch" in first.means
    for finding in (first, second):
        assert "install a C compiler" in finding.do
        assert "pip install -e ." in finding.do
    assert "numpy" in second.means


def test_variants_that_do_not_run_come_with_their_reason() -> None:
    able = next((loaded for name in VARIANTS if isinstance(loaded := load(name), Library)), None)
    if able is None:
        pytest.skip("no kernels were compiled")
    variants: dict[str, Library | str] = {"avx512": "this processor has no AVX-512 VNNI", able.variant: able}
    if able.variant == "avx512":
        variants = {"avx512": able, "avx2": "cannot be loaded: a reason", "portable": able}
    found: list[Finding] = kernels.explain(variants, able, quantizer=True)
    assert {f.level for f in found} == {"ok"}
    reason = next(v for v in variants.values() if isinstance(v, str))
    assert any(reason in f.found for f in found)
    assert any(f.found.startswith("int8, int4, int4-g128: ") for f in found)
