"""A stand-in for torch.cuda.CUDAGraph, with tensors on the CPU. It is as strict as a GPU, and tells more:

- while work is captured nothing is computed: results are garbage, what it writes stays as it was;
- a replay computes the same operations, copies and kernels again, on the same memory;
- waiting, allocating beside torch, uploading and reading a number while capturing are errors;
- a replay that would read memory of a tensor that is gone is an error;
- a capture in which something was refused cannot be ended, and torch's allocator goes on with it;
- a pool that no graph uses any more cannot be used again.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from emulated_cuda import EmulatedLauncher
from fake_runtime import FakeRuntime
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from workers.kernels.cuda.launcher import Tables

READS = ("_local_scalar_dense", "item", "nonzero", "unique2", "_unique2", "equal", "is_nonzero")


class Outside:
    """A tensor that a capture did not make, without keeping it."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._dtype, self._place = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())

    def tensor(self) -> Tensor:
        if self._storage.expired():
            raise RuntimeError("a graph reads memory of a tensor that is gone")
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._place)


class Tape(TorchDispatchMode):
    """Records operations; `made` are the tensors that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Callable[[], None]] = []
        self.made: list[Tensor] = []
        self.failed = False
        self._own: set[int] = set()  # storages

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.overloadpacket.__name__ in READS:
            self.failed = True
            raise RuntimeError("operation not permitted when stream is capturing")
        kept = tree_map(self._kept, (args, kwargs))
        if function._schema.is_mutable:
            self.entries.append(lambda: self._again(function, kept, []))
            return kwargs.get("out", args[0])
        read = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = function(*args, **kwargs)
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor) and _storage(t) not in read]
        if made:  # otherwise it is a view
            self.made += made
            self._own |= {_storage(tensor) for tensor in made}
            self.entries.append(lambda: self._again(function, kept, made))
        return result

    def _kept(self, leaf: Any) -> Any:
        return Outside(leaf) if isinstance(leaf, Tensor) and _storage(leaf) not in self._own else leaf

    @staticmethod
    def _again(function: Any, kept: Any, made: list[Tensor]) -> None:
        args, kwargs = tree_map(lambda x: x.tensor() if isinstance(x, Outside) else x, kept)
        result = function(*args, **kwargs)
        found = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        for old, new in zip(made, found if made else (), strict=True):
            old.copy_(new)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class FakeGraph:
    runtime: FakeRuntime

    def __init__(self) -> None:
        self._runtime, self._tape = self.runtime, Tape()
        self._captured = False

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        assert pool is not None
        assert capture_error_mode == "thread_local"
        assert self._runtime.on_side_stream, "the default stream cannot be captured"
        if pool in self._runtime.pools_underway or self._runtime.pools.get(pool) == 0:
            raise RuntimeError("INTERNAL ASSERT FAILED: it->second->use_count > 0")
        self._pool, self._runtime.capture_failed = pool, False
        self._runtime.pools[pool] += 1
        self._runtime.pools_underway.add(pool)
        self._runtime.capturing = threading.get_ident(), self._tape.entries
        self._tape.__enter__()

    def capture_end(self) -> None:
        self._tape.__exit__(None, None, None)
        self._runtime.capturing = None
        for tensor in self._tape.made:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        if self._runtime.capture_failed or self._tape.failed:
            raise RuntimeError("operation failed due to a previous error during capture")
        self._runtime.pools_underway.remove(self._pool)
        self._captured = True

    def __del__(self) -> None:
        if self._captured:
            self._runtime.pools[self._pool] -= 1

    def replay(self) -> None:
        assert self._runtime.capturing is None
        self._runtime.calls["graph launches"] += 1
        self._runtime.replaying = True
        for entry in self._tape.entries:
            entry()
        self._runtime.replaying = False


CAPTURE_UNSUPPORTED = 900  # cudaErrorStreamCaptureUnsupported


def function(runtime: FakeRuntime, name: str) -> Any:
    """Of the runtime, for any thread; one that captures may only enqueue copies of page-locked memory."""
    found = getattr(runtime, name)
    if runtime.capturing is None or not callable(found) or not name.startswith("cuda"):
        return found
    thread, entries = runtime.capturing
    if thread != threading.get_ident() or name == "cudaGetErrorString":
        return found

    def refused(*arguments: Any) -> tuple[int, None]:
        runtime.capture_failed = True
        return CAPTURE_UNSUPPORTED, None

    def recorded(to: int, source: int, size: int, kind: int, stream: int) -> tuple[int]:
        there = kind == runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        if not runtime.page_locked(to if there else source, size):
            runtime.capture_failed = True
            return (CAPTURE_UNSUPPORTED,)
        entries.append(lambda: _copied(found(to, source, size, kind, stream)))
        return (0,)

    return recorded if name == "cudaMemcpyAsync" else refused


def _copied(status: tuple[int]) -> None:
    assert status == (0,)


class RecordedLauncher(EmulatedLauncher):
    """Kernels on the host; while a graph is captured they are only recorded."""

    def __init__(self, library: ctypes.CDLL, device: Any) -> None:
        """`device`: a FakeCudaDevice, through which uploads go."""
        super().__init__(library)
        self._runtime: FakeRuntime = device.runtime
        self._device = device

    def upload(self, data: NDArray[np.uint8]) -> Tensor:
        uploaded: Tensor = self._device.from_host(data)
        return uploaded

    def launch(
        self, kernel: str, blocks: int, threads: int, *arguments: int, tables: Tables | None = None
    ) -> None:
        again = functools.partial(super().launch, kernel, blocks, threads, *arguments, tables=tables)
        if self._runtime.capturing is None:
            self._runtime.calls["launches"] += 1
            again()
        else:
            self._runtime.capturing[1].append(again)


class Enqueued(TorchDispatchMode):
    """Counts as "operations" and "allocations" what torch would enqueue and allocate, beside graphs."""

    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__()
        self._runtime = runtime

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = [
            one.alias_info is not None and not one.alias_info.is_write for one in function._schema.returns
        ]
        if not self._runtime.replaying and not any(views):
            made = function.overloadpacket.__name__.startswith(("empty", "new_empty"))
            self._runtime.calls["allocations" if made else "operations"] += 1
        return function(*args, **(kwargs or {}))


class _Stream:
    cuda_stream = 0

    def __init__(self, device: Any = None) -> None:
        """All are one: torch computes at once."""

    def wait_stream(self, other: Any) -> None:
        """All work is done at once."""


@contextmanager
def side_stream(runtime: FakeRuntime) -> Iterator[None]:
    runtime.on_side_stream = True
    try:
        yield
    finally:
        runtime.on_side_stream = False


def patch_graphs(patch: Any, runtime: FakeRuntime) -> None:
    """torch's names of what makes graphs."""
    stream = _Stream()

    def end_allocate(index: int, pool: Any) -> None:
        if pool not in runtime.pools_underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        runtime.pools_underway.remove(pool)

    def release(index: int, pool: Any) -> None:
        assert runtime.pools[pool] > 0
        runtime.pools[pool] -= 1

    def empty_cache() -> None:
        if runtime.pools_underway:
            raise RuntimeError("INTERNAL ASSERT FAILED: captures_underway.empty()")

    patch.setattr(torch._C, "_cuda_endAllocateToPool", end_allocate, raising=False)
    patch.setattr(torch._C, "_cuda_releasePool", release, raising=False)
    patch.setattr(torch.cuda, "empty_cache", empty_cache)
    patch.setattr(torch.cuda, "current_stream", lambda device: stream)
    patch.setattr(torch.cuda, "Stream", _Stream)
    patch.setattr(torch.cuda, "set_stream", lambda stream: None)
    patch.setattr(torch.cuda, "stream", lambda stream: side_stream(runtime))
    patch.setattr(torch.cuda, "synchronize", lambda device: runtime.torch_stream.drain())
    handles = itertools.count(1)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(handles)))
    patch.setattr(torch.cuda, "CUDAGraph", type("Graph", (FakeGraph,), {"runtime": runtime}))
