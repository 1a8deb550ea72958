"""CUDA graphs on the device `cuda`: work that is enqueued with one call of the driver instead of one for each
of its kernels.

A graph repeats the launches and copies that its work has made while it was captured, on the same addresses.
So the work reads and writes tensors that exist before and stay; what it allocates itself comes from a pool
that all graphs share, and is free for the next graph once it is over. It waits for nothing and reads nothing
back: torch and the driver refuse that while they capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.arrays import FloatArray
from workers.cuda import PinnedBuffer, call, constant
from workers.kernels.cuda.sums import OutputSums

FLOAT = 4  # bytes


class Stream(Protocol):
    """The device of graphs: its stream, and copies to it."""

    torch_device: torch.device

    @property
    def stream(self) -> int:
        """torch's current stream."""

    @property
    def sums(self) -> OutputSums:
        """The kernel that adds up experts' outputs."""

    def places(self, parts: Sequence[FloatArray], shape: tuple[int, ...]) -> list[int]:
        """Returns the addresses by which kernels read the workers' partial sums."""

    def wait_for_stream(self) -> None:
        """Wait for all that was enqueued."""

    def upload_to(self, tensor: Tensor, array: NDArray[Any]) -> None:
        """Enqueue a copy of an array, which may change at once."""


class CudaGraphs:
    """Makes them, and has the buffers by which they answer. Used by one thread."""

    def __init__(self, device: Stream) -> None:
        self.device = device
        self._pinned: list[PinnedBuffer] = []
        # The legacy default stream, which torch uses otherwise, cannot be captured.
        self._stream: Any = torch.cuda.Stream(device.torch_device)  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._first: Any = None  # the first graph: torch refuses a pool that it had and no graph uses
        self._failed: list[Any] = []  # graphs that could not be captured

    def answers(self, *shape: int) -> NDArray[np.float32]:
        """A page-locked array for `read` and `load`, until the device is closed."""
        self._pinned.append(PinnedBuffer())
        size = FLOAT * int(np.prod(shape))
        array: NDArray[np.float32] = self._pinned[-1].array(size).view(np.float32).reshape(shape)
        return array

    def read(self, tensor: Tensor, to: NDArray[np.float32]) -> None:
        """Enqueue a copy of a contiguous float32 tensor to a page-locked array; for work, too."""
        kind = constant("cudaMemcpyKind").cudaMemcpyDeviceToHost
        call("cudaMemcpyAsync", to.ctypes.data, tensor.data_ptr(), to.nbytes, kind, self.device.stream)

    def load(self, tensor: Tensor, array: NDArray[Any]) -> None:
        """Enqueue a copy of an array of `answers`, which must not change until `wait`; for work, too."""
        kind = constant("cudaMemcpyKind").cudaMemcpyHostToDevice
        call("cudaMemcpyAsync", tensor.data_ptr(), array.ctypes.data, array.nbytes, kind, self.device.stream)

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
