"""The ways of reading memory whose fastest one is the limit that shares of reading refer to."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from workers.kernels import reading
from workers.kernels.choice import DEFAULT
from workers.kernels.native import Library, chosen


@pytest.fixture
def library() -> Library:
    found = chosen(DEFAULT)
    if found is None:
        pytest.skip("no C library was compiled")
    return found


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Torch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_torch_counts_where_it_uses_no_more_cores(library: Library, threads: int) -> None:
    team = library.team(2)
    assert team is not None
    assert ("torch.sum" in reading.ways(library)) == (threads == 1)
    assert "torch.sum" in reading.ways(library, team)
    team.close()


@pytest.mark.usefixtures("threads")
def test_without_a_library_torch_reads_with_all_its_threads() -> None:
    assert sorted(reading.ways(None)) == ["numpy", "torch.sum"]


def test_all_ways_read_and_the_fastest_is_one_of_them(library: Library) -> None:
    memory = np.ones(1 << 22, np.uint8)
    for read in reading.ways(library).values():
        assert reading.timed(read, memory) > 0
    rates = {"slow": [1.0, 9.0, 2.0], "fast": [3.0, 3.0, 1.0]}
    assert reading.fastest(rates) == reading.Reading("fast", 3.0)
    assert callable(reading.fastest_way(memory, library))
