"""Computes Works on the store's experts: in an expert worker, or in the coordinator without workers."""

from __future__ import annotations

import numpy as np

from protocol.messages import Work
from shm.control import ControlLine
from shm.formats import Float32
from shm.store import Store
from workers.kernels.host import HostKernel
from workers.kernels.native import Team


class HostExperts:
    """Computes Works with this process's kernel."""

    def __init__(self, store: Store, team: Team | None, line: ControlLine | None) -> None:
        """`line`: the progress counter."""
        self._store = store
        self._kernel = HostKernel(store.layout, team, line)

    def prepare(self) -> None:
        """Import everything that a Work may need, so that the first one is not slower."""
        self._kernel.prepare()

    def compute(self, work: Work) -> Float32:
        """The weighted sum over the items: float32 [R, H], a row for each row of `work.x`."""
        activations = self._kernel.activations(work.x)
        few = self._kernel.compute_work(work, self._store.tiles(work.layer, 0, 0, 1), activations)
        if few is not None:
            return few
        y = np.zeros(work.x.shape, np.float32)
        for (expert, lo, hi), start, end in zip(
            work.items.tolist(), work.offsets.tolist(), work.offsets[1:].tolist(), strict=False
        ):
            rows = work.rows[start:end]
            part = self._kernel.compute(self._store.tiles(work.layer, expert, lo, hi), activations, rows)
            part *= work.weights[start:end, None]
            y[rows] += part  # an item names a row once
        return y
