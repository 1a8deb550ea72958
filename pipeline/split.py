"""A layer's work divided between host and device, from its routing, its cuts and what is resident."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import PlanError
from pipeline.policies.view import FloatArray, IntArray, Routing


@dataclass(frozen=True)
class HostShare:
    """The experts with host tiles: their tiles [lo, hi), the rows that use them, those rows' weights."""

    experts: IntArray  # [m], ascending
    lo: IntArray  # [m]
    hi: IntArray  # [m]
    rows: list[NDArray[np.int32]]
    weights: list[FloatArray]


@dataclass(frozen=True)
class DeviceShare:
    """An expert with device tiles: [0, resident) are read from the slab, [resident, cut) are fetched."""

    expert: int
    resident: int
    cut: int
    rows: NDArray[np.int32]
    weights: FloatArray


@dataclass(frozen=True)
class Split:
    """Who computes what in one layer."""

    workload: IntArray  # [E] rows routed to each expert
    host: HostShare
    device: list[DeviceShare]  # experts ascending


def split_layer(routing: Routing, cut: IntArray, residency: IntArray, tiles: int) -> Split:
    """cut, residency: int32 [E], of this layer. For each active expert the device computes tiles [0, cut),
    the host [cut, tiles). Raises PlanError for a cut outside 0..tiles."""
    workload = routing.workload(len(residency))
    active = np.flatnonzero(workload).astype(np.int32)
    if cut.shape != workload.shape or (cut[active] < 0).any() or (cut[active] > tiles).any():
        raise PlanError(f"a policy's cuts must be {len(residency)} numbers in 0..{tiles}")
    on_host = active[cut[active] < tiles]
    host = HostShare(on_host, cut[on_host], np.full_like(on_host, tiles), [], [])
    device: list[DeviceShare] = []
    for expert in active.tolist():
        row, choice = np.nonzero((routing.experts == expert) & (routing.weights != 0))
        rows, weights, p = row.astype(np.int32), routing.weights[row, choice], int(cut[expert])
        if p < tiles:
            host.rows.append(rows)
            host.weights.append(weights)
        if p > 0:
            device.append(DeviceShare(expert, min(p, int(residency[expert])), p, rows, weights))
    return Split(workload, host, device)
