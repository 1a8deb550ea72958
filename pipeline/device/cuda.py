"""Device `cuda`: the backbone by torch on one GPU, its copies to and from the host, and its fences.

torch computes on its current stream; demanded tiles are copied on another one, and predicted ones by the
prefetch process, through CUDA IPC: these are computed once their landing was reported. A slot is written
again only behind the fence of its last reader. Between the host and the device go page-locked buffers: only
`to_host` waits for the stream, once a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.arrays import FloatArray, IntArray, sum_on_host
from pipeline.device.base import (
    CONTEXT_BYTES,
    SLOT_ALIGNMENT,
    Added,
    Device,
    DeviceChannelKernel,
    DeviceKernel,
    SlabMemory,
    heads_of,
    spare_bytes,
)
from pipeline.errors import NoRoom, UsageError
from protocol.messages import AttachSlab
from shm.blocks import BlockFormat
from shm.floe import FloeFormat
from shm.formats import Bytes, MatrixFormat
from shm.layout import StoreLayout
from shm.segment import byte_size
from shm.store import Store
from workers.copiers import Copier, EmulatedLink
from workers.cuda import (
    CudaError,
    PinnedArena,
    PinnedBuffer,
    blocking_event,
    call,
    constant,
    ipc_handle,
    lasting_error,
)
from workers.cuda_copier import CudaCopier
from workers.kernels.cuda import attention
from workers.kernels.cuda.attention import DecodeAttention
from workers.kernels.cuda.compiler import Program
from workers.kernels.cuda.experts import CudaExperts
from workers.kernels.cuda.launcher import CudaLauncher
from workers.kernels.cuda.matrix import CudaChannels, CudaMatrix
from workers.kernels.cuda.products import fits
from workers.kernels.cuda.sums import SUMS, TERM, OutputSums, Weighted
from workers.kernels.native import best
from workers.kernels.tile_sums import TorchKernel

BLOCK = 1 << 21  # cudaMalloc places smaller allocations in a shared block, and IPC exports whole blocks
FLASH = (8, 0)  # the least compute capability with flash attention
FLOAT = 4  # bytes


class _Fence:
    """An event behind the work of its moment. It is taken once, by whoever waits for it."""

    def __init__(self, event: Any, device: CudaDevice) -> None:
        self._event, self._device = event, device
        self._reads = device.reads

    def pending(self) -> Any:
        """Take the event, to wait for it before the next fence is made; None where it has passed. A stream
        that waits for an event keeps to the moment at which that was recorded."""
        event, self._event = self._event, None
        if event is None:
            return None
        self._device.events.append(event)
        return event if self._reads == self._device.reads else None  # else `to_host` has waited since


class CudaDevice(Device):
    """A CUDA device."""

    name = "cuda"
    on_host = False
    process_bytes = CONTEXT_BYTES

    def __init__(self, cache: Path | None = None, number: int | None = None) -> None:
        """`number`: of the device; None: the present one. `cache`: a folder of compiled kernels."""
        self._cache = cache
        self._launchers: dict[Program, CudaLauncher] = {}  # each is compiled once
        self.torch_device = torch.device("cuda", torch.cuda.current_device() if number is None else number)
        self.flash = torch.cuda.get_device_capability(self.torch_device) >= FLASH
        # cuDNN's attention makes a plan for each length of a sequence: 40 to 400 ms a token.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self._to_host = PinnedBuffer()
        self._from_host = PinnedArena()
        self._made: list[Any] = []  # all events of fences
        self.events: list[Any] = []  # of them, those that no fence uses
        self._graphs: CudaGraphs | None = None
        self._prepared = False
        self._shared: dict[int, tuple[int, int]] = {}  # memory by its start: end, and distance on the device

    def launcher(self, program: Program) -> CudaLauncher:
        """Return the compiled kernels. Raises UsageError where they cannot be compiled."""
        if program not in self._launchers:
            place = self.torch_device, self._cache
            try:
                self._launchers[program] = CudaLauncher(program, *place, self.from_host)
            except CudaError as e:
                raise UsageError(f"--device cuda: no kernels for this GPU: {e}; use --device cpu") from None
        return self._launchers[program]

    def check_kernels(self) -> None:
        """Raise UsageError where no kernels can be compiled for this GPU, or the host's have other bits."""
        if best().variant == "portable":
            raise UsageError("--device cuda: the CPU has no fused additions (AVX2 and FMA); use --device cpu")
        self.launcher(SUMS)

    @cached_property
    def sums(self) -> OutputSums:
        """What adds up a layer's outputs."""
        return OutputSums(self.launcher(SUMS))

    def weighted_lines(self, lines: Tensor, chosen: IntArray, weights: FloatArray) -> Added:
        terms = np.zeros(chosen.size, TERM)
        terms["first"], terms["parts"], terms["weight"] = chosen.reshape(-1), 1, weights.reshape(-1)
        offsets = np.arange(len(chosen) + 1, dtype=np.int32) * chosen.shape[1]
        return Weighted(lines.data_ptr(), terms, offsets, lines)

    def expert_kernel(self, layout: StoreLayout) -> DeviceKernel:
        in_torch = TorchKernel(layout, self.from_host)
        program = Program.of_format(layout.format, layout.shape.math)
        if program is None or not fits(layout.format, layout.shape.hidden):
            return in_torch
        many = None if isinstance(layout.format, BlockFormat) else in_torch
        return CudaExperts(self.launcher(program), layout, many)

    def channel_kernel(self, layout: StoreLayout) -> DeviceChannelKernel:
        assert isinstance(layout.format, FloeFormat)
        program = Program.of_matrices(layout.format.up)
        channels = Program.of_channels(layout.format.rows.bits, layout.shape.math)
        return CudaChannels(self.launcher(program), self.launcher(channels), layout)

    def quantized_matrix(self, format: MatrixFormat, data: Bytes, shape: tuple[int, int]) -> CudaMatrix:
        return CudaMatrix(self.launcher(Program.of_matrices(format)), format, data, shape)

    def decode_attention(
        self, streams: Sequence[tuple[int, int]], dtype: torch.dtype, context: int
    ) -> DecodeAttention | None:
        if not attention.fits(streams, dtype):
            return None
        return DecodeAttention(self.launcher(attention.program(dtype)), context)

    def heads_bytes(self, layout: StoreLayout) -> int:
        return layout.head_stride * layout.shape.experts

    def load_heads(
        self, store: Store, layers: range, tick: Callable[[], None] = lambda: None
    ) -> dict[int, Tensor]:
        every = {}
        for layer in layers:
            heads = heads_of(store, layer)
            on_device = torch.empty(heads.shape, dtype=torch.uint8, device=self.torch_device)
            # Copied once more, because torch takes no read-only array; a layer's heads are small.
            every[layer] = on_device.copy_(torch.from_numpy(heads.copy()))
            tick()
        return every

    def prepare(self, multiply_adds: int) -> None:
        """At first, once all is loaded, leave the stream of other threads, for which all others wait."""
        if not self._prepared:
            self._prepared = True
            self.use()
            torch.cuda.synchronize(self.torch_device)
            torch.cuda.set_stream(torch.cuda.Stream(self.torch_device))  # type: ignore[no-untyped-call]

    def check(self, error: Exception) -> None:
        if left := lasting_error():
            reason = str(error).splitlines()[0]
            raise CudaError(f"the GPU computes nothing any more: {reason}; {left}") from error

    def use(self) -> None:
        call("cudaSetDevice", self.torch_device.index)

    def receive(self, tensor: Tensor, source: Device) -> Tensor:
        """By torch, on the source's stream: behind what computes the tensor and what has read the memory here
        before. This device's stream waits for it."""
        return tensor.to(self.torch_device, non_blocking=True).contiguous()

    @property
    def stream(self) -> int:
        """torch's current one."""
        return torch.cuda.current_stream(self.torch_device).cuda_stream

    def to_host(self, *tensors: Tensor) -> tuple[NDArray[np.float32], ...]:
        flat = [t.reshape(len(t), -1) for t in tensors]
        joined = flat[0].contiguous() if len(flat) == 1 else torch.cat(flat, dim=1)
        # An array, not a tensor: a tensor that inference mode has made cannot be written outside it.
        pinned = self._to_host.array(joined.numel() * FLOAT)
        self.copy_back(joined, pinned)
        self.wait_for_stream()
        # Copied, because the next call uses the pinned buffer again.
        columns = np.cumsum([t[0].numel() for t in tensors])[:-1]
        parts = np.split(pinned.view(np.float32).reshape(joined.shape).copy(), columns, axis=1)
        return tuple(np.ascontiguousarray(p).reshape(t.shape) for p, t in zip(parts, tensors, strict=True))

    def wait_for_stream(self) -> None:
        """Wait for all that was enqueued: fences have passed, and what was to be copied has been."""
        call("cudaStreamSynchronize", self.stream)
        self.reads += 1
        self._from_host.restart()

    def from_host(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), device=self.torch_device)
        self.upload_to(tensor, array)
        return tensor

    def upload_to(self, tensor: Tensor, array: NDArray[Any]) -> None:
        """Copy an array, which may change then, to a contiguous tensor of its shape and dtype, without
        waiting."""
        pinned = self._from_host.take(array.nbytes)
        pinned.view(array.dtype)[:] = array.reshape(-1)
        self.copy_here(tensor, pinned)

    def copy_here(self, to: Tensor, array: NDArray[Any]) -> None:
        """Enqueue a copy of a page-locked array to a contiguous tensor."""
        kind = constant("cudaMemcpyKind").cudaMemcpyHostToDevice
        call("cudaMemcpyAsync", to.data_ptr(), array.ctypes.data, array.nbytes, kind, self.stream)

    def copy_back(self, tensor: Tensor, to: NDArray[Any]) -> None:
        """Enqueue a copy of a contiguous tensor to a page-locked array of its size."""
        kind = constant("cudaMemcpyKind").cudaMemcpyDeviceToHost
        call("cudaMemcpyAsync", to.ctypes.data, tensor.data_ptr(), to.nbytes, kind, self.stream)

    def graphs(self) -> CudaGraphs:
        if self._graphs is None:
            self._graphs = CudaGraphs(self)
        return self._graphs

    def share_memory(self, memory: NDArray[np.uint8]) -> str:
        start = memory.ctypes.data
        try:
            call("cudaHostRegister", start, memory.nbytes, constant("cudaHostRegisterDefault"))
            try:
                there = int(call("cudaHostGetDevicePointer", start, 0))
            except CudaError:
                call("cudaHostUnregister", start)
                raise
        except CudaError as e:
            return str(e)
        self._shared[start] = start + memory.nbytes, there - start
        return ""

    def unshare_memory(self, memory: NDArray[np.uint8]) -> None:
        if self._shared.pop(memory.ctypes.data, None):
            call("cudaHostUnregister", memory.ctypes.data)

    def total(self, added: Sequence[Added], parts: Sequence[FloatArray], shape: tuple[int, ...]) -> Tensor:
        y = torch.empty(shape, dtype=torch.float32, device=self.torch_device)
        self.sums.total(y, added, self.places(parts, shape))
        return y

    def places(self, parts: Sequence[FloatArray], shape: tuple[int, ...]) -> list[int]:
        """Return the addresses by which kernels read these parts; where they cannot, that of their sum."""
        places = [self._place(y) for y in parts]
        if 0 not in places:
            return places
        pinned = self._from_host.take(FLOAT * int(np.prod(shape)))
        pinned.view(np.float32)[:] = sum_on_host(parts, shape).reshape(-1)
        return [int(pinned.ctypes.data)]  # page-locked by the driver: the same address there

    def _place(self, array: FloatArray) -> int:
        """Return the address by which kernels read an array of the host; 0 where they do not."""
        start = int(array.__array_interface__["data"][0])  # sooner than by ctypes
        for first, (end, distance) in self._shared.items():
            if first <= start < end:
                return start + distance
        return 0

    def free_cached(self) -> None:
        torch.cuda.empty_cache()

    def fence(self) -> _Fence:
        if not self.events:
            self._made.append(blocking_event())
            self.events.append(self._made[-1])
        event = self.events.pop()
        call("cudaEventRecord", event, self.stream)
        return _Fence(event, self)

    def wait(self, fence: _Fence | None) -> None:
        if fence is not None and (event := fence.pending()) is not None:
            call("cudaEventSynchronize", event)

    def time_mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds_between(self, earlier: Any, later: Any) -> float:
        return float(earlier.elapsed_time(later)) / 1e3 if later.query() else 0.0

    def check_memory(self, slab: int, kv: int, weights: int) -> None:
        free, _ = call("cudaMemGetInfo")
        weights += spare_bytes(free)
        if slab + kv + weights > free:
            raise NoRoom(
                f"the slab needs {byte_size(slab)}, the KV cache {byte_size(kv)} and the rest"
                f" {byte_size(weights)} of device memory, but {byte_size(free)} are free:"
                " use a smaller --expert-cache or --context"
            )

    def open_slab(
        self, name: str, slots: int, slot_bytes: int, tick: Callable[[], None] = lambda: None
    ) -> SlabMemory:
        return CudaSlab(self.torch_device.index, slots, slot_bytes, lambda: self.stream)

    def close(self) -> None:
        self.use()
        call("cudaDeviceSynchronize")
        for start in self._shared:
            call("cudaHostUnregister", start)
        self._shared.clear()
        self._to_host.close()
        self._from_host.close()
        if self._graphs is not None:
            self._graphs.close()
        for event in self._made:
            call("cudaEventDestroy", event)
        self._made.clear()
        self.events.clear()

    def describe(self) -> str:
        properties = torch.cuda.get_device_properties(self.torch_device)
        return f"cuda, {properties.name}, {byte_size(properties.total_memory)}"


def _allocated(address: int, size: int, device: int) -> Tensor:
    """An allocation on the device as a tensor, uint8 [size]."""
    interface = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
    shown = SimpleNamespace(__cuda_array_interface__=interface)
    return torch.as_tensor(shown, device=f"cuda:{device}")


class CudaSlab(SlabMemory):
    """One cudaMalloc, so that its IPC handle exports this slab and nothing else."""

    def __init__(self, device: int, slots: int, slot_bytes: int, stream: Callable[[], int]) -> None:
        """`stream`: on which torch computes now."""
        self.slot_bytes = -(-slot_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        self._device, self._stream, self._exported = device, stream, False
        call("cudaSetDevice", device)
        self._address = int(call("cudaMalloc", -(-slots * self.slot_bytes // BLOCK) * BLOCK))
        whole = _allocated(self._address, slots * self.slot_bytes, device)
        super().__init__(whole.view(slots, self.slot_bytes), slot_bytes)

    def address(self) -> AttachSlab:
        handle = ipc_handle(self._address)
        self._exported = True
        return AttachSlab("cuda", handle, self._device, self.slots, self.slot_bytes)

    def copier(self, store: Store, link: EmulatedLink | None, beside: Copier | None = None) -> CudaCopier:
        address, stream = self._address, self._stream
        locks = beside.locks if isinstance(beside, CudaCopier) else None
        return CudaCopier(
            store, self._device, address, self.slot_bytes, stream=stream, link=link, locks=locks
        )

    def close(self) -> None:
        call("cudaSetDevice", self._device)
        call("cudaDeviceSynchronize")
        del self.all_slots, self._each
        if not self._exported:
            call("cudaFree", self._address)
        # Otherwise another process may still map it, and freeing it is undefined then: this process keeps an
        # exported slab until it exits, and the driver frees it.


class CudaGraphs:
    """Makes CUDA graphs, work that is enqueued with one call of the driver instead of one for each of its
    kernels, and has the buffers by which they answer. Used by one thread.

    A graph repeats the launches and copies that its work has made while it was captured, on the same
    addresses. So the work reads and writes tensors that exist before and stay; what it allocates itself comes
    from a pool that all graphs share, and is free for the next graph once it is over. It waits for nothing
    and reads nothing back: torch and the driver refuse that while they capture."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self._pinned: list[PinnedBuffer] = []
        # The legacy default stream, which torch uses otherwise, cannot be captured.
        self._stream: Any = torch.cuda.Stream(device.torch_device)  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._first: Any = None  # the first graph: torch refuses a pool that it had and no graph uses
        self._failed: list[Any] = []  # graphs that could not be captured

    def answers(self, *shape: int) -> NDArray[np.float32]:
        """A page-locked array, until the device is closed, for copies of the device, which may be work."""
        self._pinned.append(PinnedBuffer())
        size = FLOAT * int(np.prod(shape))
        array: NDArray[np.float32] = self._pinned[-1].array(size).view(np.float32).reshape(shape)
        return array

    def wait(self) -> None:
        """Wait for all that was enqueued."""
        self.device.wait_for_stream()

    def free_bytes(self) -> int:
        """Return the free bytes of the device's memory."""
        free, _ = call("cudaMemGetInfo")
        return int(free)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do the work once, so that all that is made on first use exists, and then capture it. Returns a
        function that enqueues it. Raises RuntimeError or CudaError where it cannot be captured."""
        current = torch.cuda.current_stream(self.device.torch_device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self.device.torch_device)
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            try:
                # Other threads may allocate and lock pages meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                except BaseException:
                    with suppress(RuntimeError):  # which says only that there was an error
                        graph.capture_end()
                    raise
                graph.capture_end()
            except BaseException:
                self._end_capture(graph)
                raise
        self._first = self._first or graph
        replay: Callable[[], None] = graph.replay
        return replay

    def _end_capture(self, graph: Any) -> None:
        """End a capture in torch's allocator, where the driver refuses to end it: else the allocator would
        give no memory back any more, but fail, and ask the graph about streams."""
        self._failed.append(graph)
        index = self.device.torch_device.index
        with suppress(RuntimeError):  # it has ended
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)
        if self._first is None:
            self._pool = torch.cuda.graph_pool_handle()

    def close(self) -> None:
        """Free the buffers, and the pool once no graph is left."""
        self._first = None
        while self._pinned:
            self._pinned.pop().close()
