"""A layer's share on a device, computed one tile after the other: by kernels that take a single tile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shm.layout import StoreLayout
from workers.kernels.reference import ReferenceKernel

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
TileOutput = Callable[[int, int, Tensor, Tensor], Tensor]
Upload = Callable[[NDArray[Any]], Tensor]  # as `Device.from_host`


class TileSums:
    """Returns the sum so far."""

    def __init__(
        self,
        x: Tensor,
        offsets: IntArray,
        rows: IntArray,
        weights: FloatArray,
        output: TileOutput,
        upload: Upload,
    ) -> None:
        """Arguments as of `DeviceKernel.begin`. `output`: of an item's tile with these bytes for rows of x
        (int64 [n]), float32 [n, H], a new tensor."""
        every = upload(rows.astype(np.int64))
        self._x, self._output = x, output
        self._weights = upload(weights[:, None])
        self._places = list(pairwise(offsets.tolist()))
        self._rows = [every[start:end] for start, end in self._places]
        self._sums: dict[int, Tensor] = {}  # of an item

    def add(self, tiles: Sequence[tuple[int, int, Tensor]]) -> None:
        """Compute tiles, as LayerSum says."""
        for item, tile, data in tiles:
            part = self._output(item, tile, data, self._rows[item])
            self._sums[item] = self._sums[item].add_(part) if item in self._sums else part

    def result(self) -> Tensor:
        """Return the sum, as LayerSum says."""
        y = torch.zeros_like(self._x)
        for item, (start, end) in enumerate(self._places):
            if item in self._sums:
                y.index_add_(0, self._rows[item], self._sums[item] * self._weights[start:end])
        return y


class TileByTile(ABC):
    """A DeviceKernel that computes one tile at a time."""

    upload: Upload = staticmethod(torch.from_numpy)

    @abstractmethod
    def activations(self, x: Tensor) -> Any:
        """x, float32 [R, H], in the form that `compute` reads; once per layer."""

    @abstractmethod
    def compute(self, tiles: Tensor, x: Any, rows: Tensor) -> Tensor:
        """The sum of the outputs of consecutive tiles (uint8 [number * tile_bytes]) for the rows x[rows]
        (int64 [n]): float32 [n, H], a new tensor."""

    def inputs(self, rows: int) -> None:  # noqa: B027 - x is taken as it is
        """None, as DeviceKernel says."""

    def begin(
        self, x: Tensor, cuts: IntArray, offsets: IntArray, rows: IntArray, weights: FloatArray
    ) -> TileSums:
        """Begin a share, as DeviceKernel says."""
        inputs = self.activations(x)

        def output(item: int, tile: int, data: Tensor, chosen: Tensor) -> Tensor:
            return self.compute(data, inputs, chosen)

        return TileSums(x, offsets, rows, weights, output, self.upload)


class TorchKernel(ReferenceKernel, TileByTile):
    """Plain torch operations, tile by tile."""

    def __init__(self, layout: StoreLayout, upload: Callable[[NDArray[Any]], Tensor]) -> None:
        super().__init__(layout)
        self.upload = upload
