"""The device memory of an engine that keeps no experts on its device."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pipeline.arrays import IntArray
from pipeline.counters import StepClock
from pipeline.errors import PlanError
from pipeline.experts.device_work import DeviceWork
from pipeline.experts.fetch_link import Order
from pipeline.experts.shares import Share
from shm.mask import NOTHING, Mask, Tally


class EmptyDeviceMemory:
    """Without a slab: its capacity is 0, and no tile is ever resident."""

    exists: Literal[False] = False
    capacity = staging = 0
    idle = True
    resident_marks: tuple[object, object] = (0.0, 0.0)

    def __init__(self, layers: int, experts: int) -> None:
        self.residency: IntArray = np.zeros((layers, experts), np.int32)
        self.target = self.ordered = self.residency

    def _nothing(self, *_: object) -> None:
        """Replaces methods of DeviceMemory that act on tiles."""

    audit = count_in = poll = collect_landings = _nothing
    retarget = prefetch = prefetch_channels = end_layer = _nothing

    def wait_idle(self) -> bool:
        return True

    def under_way(self) -> tuple[list[Order], float]:
        return [], 0.0

    def copied(self) -> tuple[int, float]:
        return 0, 0.0

    def begin(self, layer: int, share: Share, x: Tensor, mask: Mask, clock: StepClock) -> DeviceWork:
        """Raises PlanError where the share is not empty."""
        if len(share.items):
            raise PlanError("the policy gave work to a device without a slab")
        return DeviceWork(layer, share, iter(()), [])

    def compute(self, work: DeviceWork, x: Tensor, clock: StepClock) -> Tensor:
        return torch.zeros_like(x)

    def tally(self, work: DeviceWork) -> Tally:
        return NOTHING
