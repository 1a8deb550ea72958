"""What the comparisons with transformers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch in this process, for tiny models: their products are shorter than it takes to wake another
    thread, and many times shorter than to wait for one while an engine has the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
