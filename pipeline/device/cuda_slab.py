"""The slab on the device `cuda`: one allocation outside torch's allocator.

The prefetcher copies into it on a stream of its own, in its own process (through CUDA IPC) or in a thread of
this one. A tile is computed after its landing: that was reported, or torch's stream waits for its flag
(`shm/landing_flags.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.device.base import SLOT_ALIGNMENT, SlabMemory
from protocol.messages import AttachSlab
from shm.errors import ShmError
from shm.landing_flags import LandingFlags
from shm.segment import unlink
from shm.store import Store
from workers.cuda import CudaError, call, ipc_handle
from workers.cuda_copier import CudaCopier
from workers.device_flags import DeviceFlags

BLOCK = 1 << 21  # cudaMalloc places smaller allocations in a shared block, and IPC exports whole blocks

log = logging.getLogger(__name__)


class _Allocation:
    """Shows a raw allocation to torch through the CUDA array interface."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _allocated(address: int, size: int, device: int) -> Tensor:
    """An allocation on the device as a tensor, uint8 [size]."""
    return torch.as_tensor(_Allocation(address, size), device=f"cuda:{device}")


class CudaSlab(SlabMemory):
    """One cudaMalloc, so that its IPC handle exports this slab and nothing else."""

    def __init__(
        self,
        device: int,
        name: str,
        slots: int,
        slot_bytes: int,
        upload: Callable[..., Tensor],
        stream: Callable[[], int],
    ) -> None:
        """`name`: of the segment with its landing flags; `stream`: on which torch computes now."""
        self.slots, self._upload, self._stream = slots, upload, stream
        self.slot_bytes = -(-slot_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        self._used = slot_bytes
        self._device = device
        self._exported = False
        call("cudaSetDevice", device)
        self._address = int(call("cudaMalloc", -(-slots * self.slot_bytes // BLOCK) * BLOCK))
        whole = _allocated(self._address, slots * self.slot_bytes, device)
        self._all = whole.view(slots, self.slot_bytes)
        self._tensors = [whole[i * self.slot_bytes :][: self._used] for i in range(slots)]
        self._flags = self._open_flags(name)

    def _open_flags(self, name: str) -> DeviceFlags | None:
        try:
            self.flags = LandingFlags.create(name, self.slots)
            return DeviceFlags(self.flags, self._device, spare=0)
        except (CudaError, ShmError) as e:
            log.info(f"landings are reported by messages, because the GPU cannot wait for flags: {e}")
        self._remove_flags()
        return None

    def _remove_flags(self) -> None:
        if self.flags is not None:
            self.flags.close()
            unlink(self.flags.segment.name)
            self.flags = None

    def wait_landing(self, slot: int, number: int) -> None:
        assert self._flags is not None
        self._flags.wait(self._stream(), slot, number)

    @property
    def all_slots(self) -> Tensor:
        return self._all

    def slot(self, index: int) -> Tensor:
        return self._tensors[index]

    def upload(self, array: NDArray[Any]) -> Tensor:
        return self._upload(array)

    def address(self) -> AttachSlab:
        handle = ipc_handle(self._address)
        self._exported = True
        flags = self.flags.segment.name if self.flags is not None else ""
        return AttachSlab("cuda", handle, self._device, self.slots, self.slot_bytes, flags)

    def local_copier(self, store: Store) -> CudaCopier:
        copier = CudaCopier(store, self._device, self._address, self.slot_bytes, False, self._flags)
        self.locks = copier.locks
        return copier

    def close(self) -> None:
        call("cudaDeviceSynchronize")
        if self._flags is not None:
            self._flags.close()
        self._remove_flags()
        self._tensors.clear()
        del self._all
        if not self._exported:
            call("cudaFree", self._address)
        # Otherwise another process may still map it, and freeing it is undefined then: this process keeps an
        # exported slab until it exits, and the driver frees it.
