"""The doctor's findings on threads and kernels: the cores of each process, the kernels of each format."""

from __future__ import annotations

from unittest.mock import MagicMock

from hypothesis import given
from hypothesis import strategies as st

from launch.doctor import cpu, kernels
from launch.processes.cores import Cores, Thread
from shm.kernel_files import parse_cores
from workers.kernels.native import VARIANTS, Library, best, load


def machine(nodes: int, cores: int) -> Cores:
    return Cores(tuple(Thread(n // cores, (n,), n) for n in range(nodes * cores)))


@given(st.sets(st.integers(0, 300), min_size=1))
def test_spelled_list_of_cores_is_parsed_back(numbers: set[int]) -> None:
    assert parse_cores(cpu.spelled(numbers)) == numbers


def test_cores_of_every_worker_are_listed() -> None:
    found = [f.found for f in cpu.inspect_threads(machine(1, 2))]
    assert found == [
        "workers 0 and 1: one thread each on 0 | 1",
        "coordinator: 2 threads, prefetcher: one thread, on any idle core of 0-1",
    ]
    assert cpu.inspect_threads(machine(1, 1))[0].found == "worker 0: one thread on 0"


def library(variant: str) -> Library:
    """A variant that could run, on any machine."""
    return Library(variant, MagicMock())


def test_kernels_of_this_machine_are_the_best_that_load() -> None:
    loaded = {name: load(name) for name in VARIANTS}
    able = [name for name in VARIANTS if isinstance(loaded[name], Library)]
    chosen = best()
    assert (chosen.variant if chosen else None) == next(iter(able), None)
    found = [f.found for f in kernels.inspect()]
    if chosen is None:
        assert found[0].startswith("no compiled kernels: ")
        assert all(str(reason) in found[0] for reason in loaded.values())
    else:
        assert f"bf16, int8, int4, int4-g128: {VARIANTS[chosen.variant]}" in found
        for name in VARIANTS.keys() - set(able):
            assert f"{VARIANTS[name]} ({loaded[name]})" in found[2]


def test_kernels_of_every_format_and_unused_variants_are_listed_with_reasons() -> None:
    variants: dict[str, Library | str] = {
        "avx512": "this processor has no AVX-512 VNNI",
        "avx2": "not compiled at installation",
        "portable": library("portable"),
    }
    found = list(kernels.explain(variants, library("portable"), quantizer=True))
    assert {f.level for f in found} == {"ok"}
    assert [f.found for f in found] == [
        "bf16, int8, int4, int4-g128: portable C",
        "f32: torch",
        "not used: AVX-512 VNNI (this processor has no AVX-512 VNNI), AVX2 (not compiled at installation)",
    ]
    variants["avx2"] = library("avx2")
    assert (
        "AVX2 (not faster)" in list(kernels.explain(variants, library("portable"), quantizer=True))[-1].found
    )


def test_missing_kernels_are_reported_with_the_command_that_compiles_them() -> None:
    reason = "not compiled at installation"
    first, second = kernels.explain(dict.fromkeys(VARIANTS, reason), None, quantizer=False)
    assert first.level == second.level == "note"
    assert not first.prevents
    assert (
        first.found == f"no compiled kernels: {', '.join(f'{name} ({reason})' for name in VARIANTS.values())}"
    )
    assert "through torch" in first.means
    for finding in (first, second):
        assert "install a C compiler" in finding.do
        assert "-m pip install -e " in finding.do
    assert "numpy" in second.means
