"""The slab on the device `cuda`: one allocation outside torch's allocator.

Demanded tiles are copied into it by this process on a stream of their own, which torch's stream waits for;
predicted ones by the prefetcher, through CUDA IPC. These are computed once their landing was reported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.device.base import SLOT_ALIGNMENT, SlabMemory
from protocol.messages import AttachSlab
from shm.store import Store
from workers.copiers import EmulatedLink
from workers.cuda import call, ipc_handle
from workers.cuda_copier import CudaCopier

BLOCK = 1 << 21  # cudaMalloc places smaller allocations in a shared block, and IPC exports whole blocks


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
        slots: int,
        slot_bytes: int,
        upload: Callable[..., Tensor],
        stream: Callable[[], int],
    ) -> None:
        """`stream`: on which torch computes now."""
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
        return AttachSlab("cuda", handle, self._device, self.slots, self.slot_bytes)

    def copier(self, store: Store, link: EmulatedLink | None) -> CudaCopier:
        address, stream = self._address, self._stream
        return CudaCopier(store, self._device, address, self.slot_bytes, stream=stream, link=link)

    def close(self) -> None:
        call("cudaDeviceSynchronize")
        self._tensors.clear()
        del self._all
        if not self._exported:
            call("cudaFree", self._address)
        # Otherwise another process may still map it, and freeing it is undefined then: this process keeps an
        # exported slab until it exits, and the driver frees it.
