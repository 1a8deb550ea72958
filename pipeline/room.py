"""How much of a model fits the device, and what is said where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pipeline.errors import UsageError


def cache_tiles(share: float, tiles: int) -> int:
    """This share of the tiles, rounded down; 0.29 of 100 are 29, although the product is a little less."""
    return int(share * tiles + 1e-9)


@contextmanager
def full_memory_in_one_line() -> Iterator[None]:
    """Make a device allocation that failed the user's to change: raises UsageError."""
    try:
        yield
    except torch.OutOfMemoryError as e:
        what = ". ".join(str(e).split(". ")[:2])  # the rest is about torch's allocator
        raise UsageError(f"{what}: use a smaller --expert-cache, --context or --chunk") from e
