"""Device `cuda`: the backbone by torch on one GPU, the slab one allocation outside torch's allocator.

torch computes on its current stream; the prefetcher copies on a stream of its own, in its own process
(through CUDA IPC) or in a thread of this one. A tile is computed after its landing: that was reported, or
torch's stream waits for its flag (`shm/landing_flags.py`). A slot is given to the prefetcher again only after
the fence of its last reader.
Between the host and the device go page-locked buffers: only `to_host` waits for the stream, once a layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.arrays import FloatArray, IntArray
from pipeline.device.base import (
    CONTEXT_BYTES,
    SLOT_ALIGNMENT,
    SPARE_BYTES,
    Device,
    DeviceChannelKernel,
    DeviceKernel,
    Fence,
    LayerSum,
    Locked,
    Locks,
    SlabMemory,
    heads_of,
)
from pipeline.device.cuda_graphs import CudaGraphs
from pipeline.device.host_reads import HostReads
from pipeline.device.partial_sums import Part
from pipeline.device.tile_sums import TileByTile
from pipeline.errors import NoRoom, UsageError
from protocol.messages import AttachSlab
from shm.blocks import BlockFormat
from shm.errors import ShmError
from shm.floe import FloeFormat
from shm.formats import Bytes, TileFormat
from shm.landing_flags import LandingFlags
from shm.layout import StoreLayout
from shm.segment import byte_size, unlink
from shm.store import Store
from workers.cuda import (
    CudaError,
    PageLocks,
    PinnedArena,
    PinnedBuffer,
    blocking_event,
    call,
    constant,
    ipc_handle,
)
from workers.cuda_copier import CudaCopier
from workers.device_flags import DeviceFlags
from workers.kernels.choice import DEFAULT, Choice
from workers.kernels.cuda import attention
from workers.kernels.cuda.attention import DecodeAttention
from workers.kernels.cuda.channels import CudaChannels
from workers.kernels.cuda.experts import NO_LIMIT, CudaExperts
from workers.kernels.cuda.launcher import CudaLauncher
from workers.kernels.cuda.matrix import CudaMatrix
from workers.kernels.cuda.sources import Program
from workers.kernels.native import chosen
from workers.kernels.reference import ReferenceKernel
from workers.kernels.reference_channels import ReferenceChannels

BLOCK = 1 << 21  # cudaMalloc places smaller allocations in a shared block, and IPC exports whole blocks
FLASH = (8, 0)  # the least compute capability with flash attention
FLOAT = 4  # bytes
# Of arrays that are copied to the device.
DTYPES = {"float32": torch.float32, "int64": torch.int64, "int32": torch.int32, "uint8": torch.uint8}

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


class TorchKernel(ReferenceKernel, TileByTile):
    """Plain torch operations, tile by tile: formats without CUDA kernels, and where those cannot be had."""

    def __init__(self, layout: StoreLayout, upload: Callable[[NDArray[Any]], Tensor]) -> None:
        super().__init__(layout)
        self.upload = upload


class FewRows:
    """CUDA kernels where an expert's rows are few; torch's matrix products where they are more."""

    reads_host = True  # of few rows

    def __init__(self, few: CudaExperts, many: TorchKernel) -> None:
        self._few, self._many = few, many

    def begin(
        self, x: Tensor, cuts: IntArray, offsets: IntArray, rows: IntArray, weights: FloatArray
    ) -> LayerSum:
        """As of DeviceKernel."""
        few = np.diff(offsets).max(initial=0) <= self._few.most_rows
        return (self._few if few else self._many).begin(x, cuts, offsets, rows, weights)


class _Fence:
    """An event behind the work of its moment; None once that has completed."""

    def __init__(self, event: Any, reads: int) -> None:
        self.event = event
        self.reads = reads  # of the device, before that moment


class CudaDevice(Device):
    """The first CUDA device."""

    name = "cuda"
    on_host = False
    process_bytes = CONTEXT_BYTES

    def __init__(
        self, kernels: Choice = DEFAULT, cache: Path | None = None, *, in_torch: bool = False
    ) -> None:
        """Quantized tiles have the bits of the host's `kernels`. `cache`: a folder of compiled kernels.
        `in_torch`: torch computes all tiles, for comparison."""
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.flash = torch.cuda.get_device_capability(self.torch_device) >= FLASH
        # cuDNN's attention makes a plan for each length of a sequence: 40 to 400 ms a token.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self._to_host = PinnedBuffer()
        self._from_host = PinnedArena()
        self._made: list[Any] = []  # all events of fences
        self._events: list[Any] = []  # of them, those that no fence uses
        self._reads = 0  # calls of `to_host`, each of which waits for all work before it
        self._host, self._cache, self._in_torch = kernels, cache, in_torch
        self._launchers: dict[Program, CudaLauncher] = {}
        self._graphs: CudaGraphs | None = None
        self._host_reads = HostReads(lambda: self._launcher(Program.of_sums()))

    def expert_kernel(self, layout: StoreLayout) -> DeviceKernel:
        in_torch, program = TorchKernel(layout, self.from_host), self._program(layout.format)
        if program is None or self._in_torch:
            return in_torch
        try:
            experts = CudaExperts(self._launcher(program), layout)
        except CudaError as e:
            log.warning(f"torch computes experts on the GPU, which takes many times as long: {e}")
            return in_torch
        return experts if experts.most_rows == NO_LIMIT else FewRows(experts, in_torch)

    def _program(self, format: TileFormat) -> Program | None:
        """Without it torch computes the format."""
        host = chosen(self._host)
        return Program.of_format(format, fused=host is None or host.variant != "portable")

    def _launcher(self, program: Program) -> CudaLauncher:
        """The compiled kernels. Raises CudaError."""
        if program not in self._launchers:
            self._launchers[program] = CudaLauncher(program, self.torch_device, self._cache, self.from_host)
        return self._launchers[program]

    def channel_kernel(self, layout: StoreLayout) -> DeviceChannelKernel:
        assert isinstance(layout.format, FloeFormat)
        program = self._program(layout.format.up)
        if program is None or self._in_torch:
            return ReferenceChannels(layout)
        try:
            return CudaChannels(self._launcher(program), layout)
        except CudaError as e:
            log.warning(f"torch computes up matrices on the GPU, which takes many times as long: {e}")
            return ReferenceChannels(layout)

    def heads_bytes(self, layout: StoreLayout) -> int:
        return layout.head_stride * layout.shape.experts * layout.shape.layers

    def load_heads(self, store: Store, tick: Callable[[], None] = lambda: None) -> list[Tensor]:
        found = []
        for layer in range(store.layout.shape.layers):
            heads = heads_of(store, layer)
            on_device = torch.empty(heads.shape, dtype=torch.uint8, device=self.torch_device)
            # Copied once more, because torch takes no read-only array; a layer's heads are small.
            found.append(on_device.copy_(torch.from_numpy(heads.copy())))
            tick()
        return found

    def check_quantized(self, format: BlockFormat) -> None:
        program = self._program(format)
        assert program is not None
        try:
            self._launcher(program)
        except CudaError as e:
            raise UsageError(
                f"--backbone-dtype {format.name} needs kernels that cannot be had here: {e}; use bf16"
            ) from None

    def quantized_matrix(self, format: BlockFormat, data: Bytes, shape: tuple[int, int]) -> CudaMatrix:
        program = self._program(format)
        assert program is not None
        return CudaMatrix(self._launcher(program), format, data, shape)

    def decode_attention(
        self, streams: Sequence[tuple[int, int]], dtype: torch.dtype, context: int
    ) -> DecodeAttention | None:
        if self._in_torch or not attention.fits(streams):
            return None
        try:
            return DecodeAttention(self._launcher(attention.program(dtype)), context)
        except CudaError as e:
            log.warning(f"torch computes attention on the GPU, one sequence after the other: {e}")
            return None

    def prepare(self, multiply_adds: int) -> None:
        """A GPU needs no setup."""

    @property
    def stream(self) -> int:
        """torch's current one."""
        return torch.cuda.current_stream(self.torch_device).cuda_stream

    def to_host(self, *tensors: Tensor) -> tuple[NDArray[np.float32], ...]:
        flat = [t.reshape(len(t), -1) for t in tensors]
        joined = flat[0].contiguous() if len(flat) == 1 else torch.cat(flat, dim=1)
        # An array, not a tensor: a tensor that inference mode has made cannot be written outside it.
        pinned = self._to_host.array(joined.numel() * FLOAT)
        kind = constant("cudaMemcpyKind").cudaMemcpyDeviceToHost
        call("cudaMemcpyAsync", pinned.ctypes.data, joined.data_ptr(), pinned.nbytes, kind, self.stream)
        self.wait_for_stream()
        # Copied, because the next call uses the pinned buffer again.
        columns = np.cumsum([t[0].numel() for t in tensors])[:-1]
        parts = np.split(pinned.view(np.float32).reshape(joined.shape).copy(), columns, axis=1)
        return tuple(np.ascontiguousarray(p).reshape(t.shape) for p, t in zip(parts, tensors, strict=True))

    def wait_for_stream(self) -> None:
        """Wait for all that was enqueued: fences have passed, and what was to be copied has been."""
        call("cudaStreamSynchronize", self.stream)
        self._reads += 1
        self._from_host.restart()

    def from_host(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.empty(array.shape, dtype=DTYPES[array.dtype.name], device=self.torch_device)
        self.upload_to(tensor, array)
        return tensor

    def upload_to(self, tensor: Tensor, array: NDArray[Any]) -> None:
        """Copy an array, which may change then, to a contiguous tensor of its shape and dtype, without
        waiting."""
        pinned = self._from_host.take(array.nbytes)
        pinned.view(array.dtype)[:] = array.reshape(-1)
        kind = constant("cudaMemcpyKind").cudaMemcpyHostToDevice
        call("cudaMemcpyAsync", tensor.data_ptr(), pinned.ctypes.data, pinned.nbytes, kind, self.stream)

    def graphs(self) -> CudaGraphs:
        if self._graphs is None:
            self._graphs = CudaGraphs(self)
        return self._graphs

    def share_memory(self, memory: NDArray[np.uint8]) -> str:
        return self._host_reads.share(memory)

    def unshare_memory(self, memory: NDArray[np.uint8]) -> None:
        self._host_reads.unshare(memory)

    def lock_pages(self, memory: NDArray[np.uint8], locks: Locks | None = None) -> Locks:
        attribute = constant("cudaDeviceAttr").cudaDevAttrCanUseHostPointerForRegisteredMem
        if not call("cudaDeviceGetAttribute", attribute, self.torch_device.index):
            return Locked(0)  # kernels would need other addresses
        return locks or PageLocks(memory, self.torch_device.index)

    def add_parts(self, parts: Sequence[Part], shape: tuple[int, ...]) -> tuple[Tensor, Fence]:
        y = self._host_reads.sum(parts, shape, self.torch_device)
        return super().add_parts(parts, shape) if y is None else (y, self.fence())

    def free_cached(self) -> None:
        torch.cuda.empty_cache()

    def fence(self) -> _Fence:
        if not self._events:
            self._made.append(blocking_event())
            self._events.append(self._made[-1])
        event = self._events.pop()
        call("cudaEventRecord", event, self.stream)
        return _Fence(event, self._reads)

    def wait(self, fence: _Fence | None) -> None:
        if fence is None or fence.event is None:
            return
        if fence.reads == self._reads:  # otherwise `to_host` has waited since
            call("cudaEventSynchronize", fence.event)
        self._events.append(fence.event)
        fence.event = None

    def time_mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds_between(self, earlier: Any, later: Any) -> float:
        return float(earlier.elapsed_time(later)) / 1e3 if later.query() else 0.0

    def check_memory(self, slab: int, kv: int, weights: int) -> None:
        free, _ = call("cudaMemGetInfo")
        if slab + kv + weights + SPARE_BYTES > free:
            raise NoRoom(
                f"the slab needs {byte_size(slab)}, the KV cache {byte_size(kv)} and the rest"
                f" {byte_size(weights + SPARE_BYTES)} of device memory, but {byte_size(free)} are free:"
                " use a smaller --expert-cache or --context"
            )

    def open_slab(
        self, name: str, slots: int, slot_bytes: int, tick: Callable[[], None] = lambda: None
    ) -> SlabMemory:
        number, stream = self.torch_device.index, lambda: self.stream
        return CudaSlab(number, name, slots, slot_bytes, self.from_host, stream)

    def close(self) -> None:
        call("cudaDeviceSynchronize")
        self._host_reads.close()
        self._to_host.close()
        self._from_host.close()
        if self._graphs is not None:
            self._graphs.close()
        for event in self._made:
            call("cudaEventDestroy", event)
        self._made.clear()
        self._events.clear()

    def describe(self) -> str:
        properties = torch.cuda.get_device_properties(self.torch_device)
        return f"cuda, {properties.name}, {byte_size(properties.total_memory)}"
