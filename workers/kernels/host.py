"""Expert kernels on the host's own cores, the same for expert workers and for the device `cpu`.

C computes the quantized formats and bf16. torch computes f32, a format for comparison; it is imported only
then. In C the same tiles for the same rows give the same bits in
every process of an engine; torch's bits also depend on its number of threads, which is the same in all
workers.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shm.control import ControlLine
from shm.descriptor import Descriptor, Parts, parts_of
from shm.formats import F32, Bytes, Float32
from shm.layout import StoreLayout
from shm.mask import NOTHING, Tally
from shm.store import Store
from workers.kernels.c_types import Geometry, Quantized
from workers.kernels.native import Kernel, Team, WorkKernel, best

if TYPE_CHECKING:
    from torch import Tensor

    from workers.kernels.reference import ReferenceKernel


class Activations:
    """Hidden states float32 [R, H], and their form for C and for torch, each made on first use."""

    def __init__(self, x: Float32) -> None:
        self.x = x
        self.native: Quantized | None = None
        self.reference: Tensor | None = None


def fault_of(work: Parts, layout: StoreLayout) -> str | None:
    """Returns which number of a Work is wrong, or None: what C checks of the Works that it computes."""
    offsets, shape = work.offsets.tolist(), layout.shape
    if work.mask != (0, 1):
        return "a mask that its format does not have, or no mask at all"
    if not 0 <= work.layer < shape.layers:
        return f"no layer {work.layer}"
    if offsets[0] != 0 or offsets[-1] != len(work.rows):
        return "offsets that do not fit the rows"
    for (expert, lo, hi), start, end in zip(work.items.tolist(), offsets, offsets[1:], strict=False):
        if not (0 <= expert < shape.experts and 0 <= lo < hi <= shape.tiles):
            return "an item outside the layer"
        if start > end:
            return "offsets that do not fit the rows"
        rows = work.rows[start:end]
        if len(rows) and not (rows[0] >= 0 and rows[-1] < work.x_rows):
            return "a row outside x"
        if len(rows) > 1 and not (rows[1:] > rows[:-1]).all():  # a difference of two could wrap
            return "an item's rows are not ascending"
    return None


class HostKernel:
    """Computes tiles in host memory. Used by one thread at a time."""

    def __init__(
        self,
        layout: StoreLayout,
        team: Team | None = None,
        line: ControlLine | None = None,
        guarded: bool = False,
        generation: int = 0,
    ) -> None:
        """`team`: the threads that compute; None: the caller alone. `line`: ticked for each tile. `guarded`,
        without a team: a Work that crashes in C, because its tiles cannot be read for example, raises
        IndexError, and the process goes on. `generation`: of the process, which refuses Works of another."""
        self._layout = layout
        self._line = line
        self._ticks = None if line is None else line.address
        self._native: Kernel | None = None
        self._works: WorkKernel | None = None  # of the store of the last Work
        self._guarded, self._generation = guarded, generation
        if not isinstance(layout.format, F32):
            shape = layout.shape
            geometry = Geometry(layout.format, shape.hidden, shape.hidden, shape.tile)
            self._native = best().kernel(geometry, team)
        self._reference: ReferenceKernel | None = None

    @property
    def native(self) -> bool:
        """C computes."""
        return self._native is not None

    def prepare(self) -> None:
        """Import what `compute` needs. Importing torch takes a second or two."""
        if self._native is None:
            import workers.kernels.reference  # noqa: F401

    def compute_work(self, descriptor: Descriptor, x: Float32, store: Store, y: Float32) -> Tally:
        """Write the answer to a Work into y, which has the descriptor's rows or more, like x; what its mask
        left out. One call where C computes all. Raises IndexError where a number of the descriptor is wrong,
        MemoryError."""
        if self._native is None:
            return self._compute_items(descriptor, x, store, y)
        tiles, works = store.all_tiles(), self._works
        if works is None or works.tiles is not tiles:
            how = self._ticks, self._guarded, self._generation
            self._works = works = self._native.works(tiles, self._layout, *how)
        return works.compute(descriptor, x, y)

    def _compute_items(self, descriptor: Descriptor, x: Float32, store: Store, y: Float32) -> Tally:
        work = parts_of(descriptor)
        if work.x_rows > min(len(x), len(y)):
            raise IndexError("arrays larger than their memory")
        if (fault := fault_of(work, self._layout)) is not None:
            raise IndexError(fault)
        if work.generation != self._generation:
            raise IndexError("a Work of another generation")
        x, y, offsets = x[: work.x_rows], y[: work.x_rows], work.offsets.tolist()
        activations = Activations(x)
        y[:] = 0
        for (expert, lo, hi), start, end in zip(work.items.tolist(), offsets, offsets[1:], strict=False):
            rows = work.rows[start:end]
            part = self.compute(store.tiles(work.layer, expert, lo, hi), activations, rows)
            part *= work.weights[start:end, None]
            y[rows] += part  # an item names a row once
        return NOTHING

    def compute(self, tiles: Bytes, x: Activations, rows: NDArray[np.int32]) -> Float32:
        """The sum of the outputs of consecutive tiles (uint8 [number * tile_bytes]) for the rows x[rows]:
        float32 [len(rows), H]. Tiles with heads are computed in Works, or by `ChannelKernel`."""
        if self._native is not None:
            if x.native is None:
                x.native = self._native.quantize(x.x)
            return self._native.tiles(tiles, x.native, rows, self._ticks)
        return self._compute_with_torch(tiles, x, rows)

    def _compute_with_torch(self, tiles: Bytes, x: Activations, rows: NDArray[np.int32]) -> Float32:
        import torch

        reference = self._torch_kernel()
        with torch.inference_mode():
            if x.reference is None:
                x.reference = reference.activations(torch.from_numpy(x.x))
            chosen = torch.from_numpy(rows.astype(np.int64))
            y: Float32 = reference.compute(torch.from_numpy(tiles), x.reference, chosen).numpy()
        return y

    def _torch_kernel(self) -> ReferenceKernel:
        if self._reference is None:
            from workers.kernels.reference import ReferenceKernel

            # Works and the store are read-only on purpose, and this code never writes to them.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            self._reference = ReferenceKernel(self._layout, None if self._line is None else self._line.tick)
        return self._reference
