"""Fixtures of the kernels' tests: the variants that run here, and torch on one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from child_harness import small_store

from workers.kernels.native import VARIANTS, Library, load


@pytest.fixture(params=VARIANTS)
def library(request: pytest.FixtureRequest) -> Library:
    found = load(request.param)
    if isinstance(found, str):
        pytest.skip(f"{VARIANTS[request.param]}: {found}")
    return found


@pytest.fixture(scope="module")
def fingerprint() -> Iterator[str]:
    """Of a small store."""
    with small_store() as fingerprint:
        yield fingerprint


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """As in a worker."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
