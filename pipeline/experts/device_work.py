"""A layer's device share while it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from pipeline.device import Device
from pipeline.experts.shares import Missing, Share


class Landed(NamedTuple):
    """A tile that was fetched. It may be read until the iterator that gave it advances."""

    expert: int
    tile: int
    data: Tensor  # uint8, its bytes; with a mask, of the channels that some row keeps


# Tiles that are computed together. None: not all that were given have landed, which the device was to wait
# for; what was computed from any of them is wrong, and those that have landed come again.
Landing = Iterator[list[Landed] | None]


class DeviceWork(NamedTuple):
    """One layer's device share; its missing tiles are ordered. `missing`: those that cannot be fetched
    because the prefetcher is down; complete once `landing` is exhausted."""

    layer: int
    share: Share
    landing: Landing
    missing: list[Missing]
    masked: Any = None  # what the memory has found of the layer's masks, for itself


def rows_of(share: Share, device: Device) -> dict[int, Tensor]:
    """Of each expert of a share: its rows, int64, on the device."""
    every = device.from_host(share.rows.astype(np.int64))
    experts, places = share.items[:, 0].tolist(), pairwise(share.offsets.tolist())
    return {expert: every[start:end] for expert, (start, end) in zip(experts, places, strict=True)}
