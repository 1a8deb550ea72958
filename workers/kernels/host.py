"""Expert kernels on the host's own cores, the same for expert workers and for the device `cpu`.

Which code computes depends on the format, on what was installed and on the number of rows alone. So in C the
same tiles for the same rows give the same bits in every process of a machine; torch's bits depend also on
its number of threads, which is the same in all workers. The quantized formats run in C at any number of
rows; bf16 does for few rows, where it is bound by memory, and through torch for many; f32, which is there
for comparison, always through torch, and everything where nothing was compiled. torch is imported when it is
first needed.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from protocol.messages import Work
from shm.blocks import BlockFormat
from shm.control import ControlLine
from shm.formats import BF16, Bytes, Float32
from shm.layout import StoreLayout
from workers.kernels.native import Geometry, Kernel, Quantized, Team, best

if TYPE_CHECKING:
    from torch import Tensor

    from workers.kernels.reference import ReferenceKernel

EVERY = 1 << 62  # rows: there is no limit
FEW_ROWS = 4  # of each item of a Work: up to these, its tiles and not their parts are divided among threads
BF16_ROWS = 4  # from more rows on, torch's product is faster than reading the weights once for all


class Activations:
    """Hidden states float32 [R, H] in whatever forms kernels have asked for, each made once."""

    def __init__(self, x: Float32) -> None:
        self.x = x
        self.native: Quantized | None = None
        self.reference: Tensor | None = None


class HostKernel:
    """Computes tiles whose bytes lie in host memory. Used by one thread at a time."""

    def __init__(
        self, layout: StoreLayout, team: Team | None = None, line: ControlLine | None = None
    ) -> None:
        """`team`: the threads that compute, the caller alone without one. `line`: where progress is counted,
        a tick for each tile."""
        self._layout = layout
        self._line = line
        self._ticks = None if line is None else line.address
        self._native: Kernel | None = None
        self._most = 0  # rows that run in C
        library = best()
        if library is not None and isinstance(layout.format, BlockFormat | BF16):
            shape = layout.shape
            geometry = Geometry(layout.format, shape.hidden, shape.hidden, shape.tile)
            self._native = library.kernel(geometry, team)
            self._most = BF16_ROWS if isinstance(layout.format, BF16) else EVERY
        self._reference: ReferenceKernel | None = None

    def prepare(self) -> None:
        """Have what `run` may ever need. Importing torch takes a second or two."""
        if self._native is None or self._most < EVERY:
            self._made_reference()

    def activations(self, x: Float32) -> Activations:
        """Hidden states float32 [R, H]; once per Work, not once per expert."""
        return Activations(x)

    def work(self, work: Work, layer: Bytes, x: Activations) -> Float32 | None:
        """The weighted sum over a Work's items in one call: float32 [R, H], the same bits as `run` for each
        of them; None where they have too many rows for that. `layer`: the first tile of the Work's layer."""
        native, offsets = self._native, work.offsets
        if native is None or len(offsets) < 2 or (offsets[1:] - offsets[:-1]).max() > FEW_ROWS:
            return None
        if x.native is None:
            x.native = native.quantize(x.x)
        stride = self._layout.expert_stride
        return native.work(layer, stride, work.items, offsets, x.native, work.rows, work.weights, self._ticks)

    def run(self, tiles: Bytes, x: Activations, rows: NDArray[np.int32]) -> Float32:
        """The sum of the outputs of consecutive tiles (uint8 [number * tile_bytes]) for the rows x[rows]:
        float32 [len(rows), H]."""
        if self._native is not None and len(rows) <= self._most:
            if x.native is None:
                x.native = self._native.quantize(x.x)
            return self._native.tiles(tiles, x.native, rows, self._ticks)
        return self._run_reference(tiles, x, rows)

    def _run_reference(self, tiles: Bytes, x: Activations, rows: NDArray[np.int32]) -> Float32:
        import torch

        reference = self._made_reference()
        with torch.inference_mode():
            if x.reference is None:
                x.reference = reference.activations(torch.from_numpy(x.x))
            chosen = torch.from_numpy(rows.astype(np.int64))
            y: Float32 = reference.run(torch.from_numpy(tiles), x.reference, chosen).numpy()
        return y

    def _made_reference(self) -> ReferenceKernel:
        if self._reference is None:
            from workers.kernels.reference import ReferenceKernel

            # Work and store are mapped read-only on purpose, and nothing here writes to them.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            self._reference = ReferenceKernel(self._layout, None if self._line is None else self._line.tick)
        return self._reference
