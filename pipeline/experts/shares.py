"""A layer's work divided between host and device, by its routing, its cuts and its residency."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray, IntArray
from pipeline.errors import PlanError
from pipeline.policies.view import Routing


@dataclass(frozen=True)
class Missing:
    """Tiles [lo, hi) of an expert that the device has to compute and that are not resident."""

    expert: int
    lo: int
    hi: int


@dataclass(frozen=True)
class HostShare:
    """The experts with host tiles: their tiles [lo, hi), the rows that use them and those rows' weights."""

    experts: IntArray  # [m], ascending
    lo: IntArray  # [m]
    hi: IntArray  # [m]
    rows: list[NDArray[np.int32]]  # each ascending
    weights: list[FloatArray]

    @property
    def total(self) -> int:
        """Number of tiles that the host computes."""
        return int(self.hi.sum() - self.lo.sum())


@dataclass(frozen=True)
class DeviceExpert:
    """An expert with device tiles: [0, resident) are read from the slab, [resident, cut) are fetched."""

    expert: int
    resident: int
    cut: int
    rows: NDArray[np.int32]
    weights: FloatArray


@dataclass(frozen=True)
class Split:
    """One layer's work for host and device."""

    host: HostShare
    device: list[DeviceExpert]  # experts ascending

    def host_share_of(self, missing: Iterable[Missing]) -> HostShare:
        """The host's share of device tiles that cannot be fetched."""
        shares = {share.expert: share for share in self.device}
        items = sorted(missing, key=lambda item: (item.expert, item.lo))
        return HostShare(
            np.array([item.expert for item in items], np.int32),
            np.array([item.lo for item in items], np.int32),
            np.array([item.hi for item in items], np.int32),
            [shares[item.expert].rows for item in items],
            [shares[item.expert].weights for item in items],
        )


def split_layer(routing: Routing, cut: IntArray, residency: IntArray, tiles: int) -> Split:
    """cut, residency: int32 [E], of this layer. Of each active expert the device computes tiles [0, cut), the
    host [cut, tiles). Raises PlanError for a cut outside 0..tiles."""
    if len(routing.experts) == 1:
        return _split_row(routing, cut, residency, tiles)
    chosen = routing.experts.ravel()
    weights = routing.weights.ravel()
    used = np.flatnonzero(weights)
    order = used[np.argsort(chosen[used], kind="stable")]  # by expert, and within one by row
    rows = (order // routing.experts.shape[1]).astype(np.int32)
    weights = weights[order]
    workload = np.bincount(chosen[order], minlength=len(residency)).astype(np.int32)
    active = np.flatnonzero(workload).astype(np.int32)
    if cut.shape != workload.shape:
        raise _wrong_cuts(residency, tiles)
    cuts = cut[active]
    if (cuts < 0).any() or (cuts > tiles).any():
        raise _wrong_cuts(residency, tiles)
    on_host = cuts < tiles
    lo = cuts[on_host]
    host = HostShare(active[on_host], lo, np.full_like(lo, tiles), [], [])
    device: list[DeviceExpert] = []
    start = 0
    for expert, p in zip(active.tolist(), cuts.tolist(), strict=True):
        part = slice(start, start := start + int(workload[expert]))
        if p < tiles:
            host.rows.append(rows[part])
            host.weights.append(weights[part])
        if p > 0:
            device.append(DeviceExpert(expert, min(p, int(residency[expert])), p, rows[part], weights[part]))
    return Split(host, device)


def _split_row(routing: Routing, cut: IntArray, residency: IntArray, tiles: int) -> Split:
    """`split_layer` of a single row, in plain numbers: decode calls it in every layer."""
    if cut.shape != residency.shape:
        raise _wrong_cuts(residency, tiles)
    row = np.zeros(1, np.int32)
    host: list[tuple[int, int, float]] = []  # expert, cut, weight
    device: list[DeviceExpert] = []
    for expert, weight in sorted(zip(routing.experts[0].tolist(), routing.weights[0].tolist(), strict=True)):
        if weight == 0:
            continue
        p = int(cut[expert])
        if not 0 <= p <= tiles:
            raise _wrong_cuts(residency, tiles)
        if p < tiles:
            host.append((expert, p, weight))
        if p > 0:
            kept = min(p, int(residency[expert]))
            device.append(DeviceExpert(expert, kept, p, row, np.array([weight], np.float32)))
    numbers = np.array([(expert, p, tiles) for expert, p, _ in host], np.int32).reshape(-1, 3)
    weights = [np.array([weight], np.float32) for _, _, weight in host]
    share = HostShare(numbers[:, 0], numbers[:, 1], numbers[:, 2], [row] * len(host), weights)
    return Split(share, device)


def _wrong_cuts(residency: IntArray, tiles: int) -> PlanError:
    return PlanError(f"a policy's cuts must be {len(residency)} numbers in 0..{tiles}")
