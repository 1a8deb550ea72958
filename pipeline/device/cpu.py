"""Device `cpu`: the backbone on the host's cores, the slab in a shared-memory segment. Every process,
protocol, policy and fault can be exercised with it on a machine without a GPU."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.device.base import (
    SPARE_BYTES,
    Device,
    DeviceChannelKernel,
    Fence,
    SlabMemory,
    heads_of,
)
from pipeline.errors import NoRoom
from protocol.messages import AttachSlab
from shm.floe import FloeFormat
from shm.formats import Bytes, MatrixFormat
from shm.layout import StoreLayout
from shm.segment import SHM_FOLDER, available_memory, byte_size, free_shm_bytes, unlink
from shm.slab import Slab
from shm.store import Store
from workers.copiers import Copier, EmulatedLink, HostCopier
from workers.kernels.c_types import Geometry, Quantized
from workers.kernels.channels import ChannelInputs, ChannelKernel
from workers.kernels.matrix import HostMatrix
from workers.kernels.native import Library, Team, best
from workers.kernels.reference import ReferenceChannels, UpByExpert
from workers.kernels.tile_sums import TileByTile

# Multiply-adds from which a product is faster on all cores. Below it, waking other threads costs more than
# they compute; they do not spin, because the workers need the cores.
WORTH_SHARING = 1 << 22


class CpuSlab(SlabMemory):
    """A slab in shared memory, made and removed by this process."""

    def __init__(self, name: str, slots: int, slot_bytes: int, tick: Callable[[], None]) -> None:
        self.slot_bytes = slot_bytes
        self._slab = Slab.create(name, slots, slot_bytes, lambda allocated: tick())
        self._name = self._slab.segment.name
        super().__init__(torch.from_numpy(self._slab.segment.array.reshape(slots, -1)), slot_bytes)

    def address(self) -> AttachSlab:
        return AttachSlab("shm", self._name.encode(), 0, self.slots, self.slot_bytes)

    def copier(self, store: Store, link: EmulatedLink | None, beside: Copier | None = None) -> HostCopier:
        return HostCopier(store, self._slab, link)

    def close(self) -> None:
        del self.all_slots, self._each
        self._slab.close()
        unlink(self._name)


class CpuKernel(TileByTile):
    """The expert workers' kernel, for tensors."""

    def __init__(self, layout: StoreLayout, team: Team | None) -> None:
        self._kernel = best().kernel(Geometry.of_tiles(layout), team)

    def activations(self, x: Tensor) -> Quantized:
        return self._kernel.quantize(x.numpy())

    def compute(self, tiles: Tensor, x: Quantized, rows: Tensor) -> Tensor:
        return torch.from_numpy(self._kernel.tiles(tiles.numpy(), x, rows.to(torch.int32).numpy()))


class CpuChannelKernel(UpByExpert):
    """The expert workers' kernel of formats with heads, for tensors: the same u, bit by bit, as in a Work."""

    def __init__(self, library: Library, layout: StoreLayout, format: FloeFormat, team: Team | None) -> None:
        self._format, self._hidden = format, layout.shape.hidden
        self._kernel = ChannelKernel(library, format, self._hidden, team, layout.shape.math)
        self.keeps = ReferenceChannels(layout).keeps  # the rule has no arithmetic

    def activations(self, x: Tensor) -> ChannelInputs:
        return self._kernel.activations(x.numpy())

    def up(self, heads: Tensor, x: ChannelInputs, rows: Tensor) -> Tensor:
        return torch.from_numpy(self._kernel.up(heads.numpy(), x, rows.to(torch.int32).numpy()))

    def channels(self, records: Tensor, u: Tensor, x: ChannelInputs, rows: Tensor) -> Tensor:
        chosen = rows.to(torch.int32).numpy()
        return torch.from_numpy(self._kernel.channels(records.numpy(), u.numpy(), x, chosen))


class CpuDevice(Device):
    """Computes synchronously, so its fences are None."""

    name = "cpu"
    torch_device = torch.device("cpu")
    on_host = True

    def __init__(self) -> None:
        self._all_threads = torch.get_num_threads()
        self.library: Library = best()
        self.team = self.library.team(self._all_threads)

    def expert_kernel(self, layout: StoreLayout) -> CpuKernel:
        return CpuKernel(layout, self.team)

    def channel_kernel(self, layout: StoreLayout) -> DeviceChannelKernel:
        format = layout.format
        assert isinstance(format, FloeFormat)
        return CpuChannelKernel(self.library, layout, format, self.team)

    def heads_bytes(self, layout: StoreLayout) -> int:
        """Returns 0: heads are read in the store."""
        return 0

    def load_heads(
        self, store: Store, layers: range, tick: Callable[[], None] = lambda: None
    ) -> dict[int, Tensor]:
        with warnings.catch_warnings():
            # The store is read-only on purpose, and no kernel writes to it.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return {layer: torch.from_numpy(heads_of(store, layer)) for layer in layers}

    def quantized_matrix(self, format: MatrixFormat, data: Bytes, shape: tuple[int, int]) -> HostMatrix:
        return HostMatrix(self.library, self.team, format, shape, data)

    def prepare(self, multiply_adds: int) -> None:
        torch.set_num_threads(self._all_threads if multiply_adds >= WORTH_SHARING else 1)

    def to_host(self, *tensors: Tensor) -> tuple[NDArray[np.float32], ...]:
        return tuple(t.numpy() for t in tensors)

    def from_host(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array)

    def fence(self) -> Fence:
        return None

    def wait(self, fence: Fence) -> None:
        """All work has completed."""

    def time_mark(self) -> float:
        return time.perf_counter()

    def seconds_between(self, earlier: float, later: float) -> float:
        return later - earlier

    def check_memory(self, slab: int, kv: int, weights: int) -> None:
        shm, memory = free_shm_bytes(), available_memory()
        if slab > shm or slab + kv + weights + SPARE_BYTES > memory:
            raise NoRoom(
                f"the slab needs {byte_size(slab)} of shared memory, the KV cache {byte_size(kv)} and the"
                f" rest {byte_size(weights + SPARE_BYTES)}, but {SHM_FOLDER} has {byte_size(shm)} and the"
                f" machine {byte_size(memory)} free: use a smaller --expert-cache or --context"
            )

    def open_slab(
        self, name: str, slots: int, slot_bytes: int, tick: Callable[[], None] = lambda: None
    ) -> SlabMemory:
        return CpuSlab(name, slots, slot_bytes, tick)

    def close(self) -> None:
        if self.team is not None:
            self.team.close()

    def describe(self) -> str:
        return f"cpu, {torch.get_num_threads()} threads of {os.cpu_count()} cores"
