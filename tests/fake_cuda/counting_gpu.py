"""The device `cuda` without numbers: tensors are torch's `meta`, kernels are counted. A step launches, copies
and waits for what it would on a GPU, and an operation on tensors of both the host and the device fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from fake_gpu import cuda_device, fake_runtime
from fake_runtime import FakeRuntime
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.device import cuda
from workers.kernels.cuda import attention
from workers.kernels.cuda.compiler import Program
from workers.kernels.cuda.launcher import Tables

META = torch.device("meta")
ALLOCATES = ("empty", "empty_like", "new_empty", "empty_strided")


class CountingLauncher:
    """A `Launcher` without a GPU. `launched`: how often each kernel."""

    def __init__(self, device: CountingDevice) -> None:
        self.device, self.upload = META, device.from_host
        self._counts = device.counts

    def launch(
        self, kernel: str, blocks: int, threads: int, *arguments: int, tables: Tables | None = None
    ) -> None:
        assert blocks > 0
        assert threads > 0
        kind = "attention kernels" if kernel.partition("_")[0] in attention.THREADS else "kernels"
        self._counts[kind] += 1


class CountingDevice(cuda.CudaDevice):
    """`counts`: kernels of ours; copies each way; allocations, operations and blocking copies of torch, while
    `counted` is on."""

    def __init__(self, *, flash: bool) -> None:
        super().__init__()
        self.torch_device, self.flash = META, flash
        self.counts: Counter[str] = Counter()
        self._random = np.random.default_rng(0)

    def launcher(self, program: Program) -> Any:
        return CountingLauncher(self)

    def to_host(self, *tensors: Tensor) -> tuple[NDArray[np.float32], ...]:
        self.counts["to host"] += 1
        found = super().to_host(*tensors)
        return tuple(self._random.standard_normal(array.shape).astype(np.float32) for array in found)

    def from_host(self, array: NDArray[Any]) -> Tensor:
        self.counts["from host"] += 1
        return super().from_host(array)

    def open_slab(
        self, name: str, slots: int, slot_bytes: int, tick: Callable[[], None] = lambda: None
    ) -> cuda.CudaSlab:
        return cuda.CudaSlab(0, slots, slot_bytes, lambda: self.stream)

    def time_mark(self) -> float:
        return 0.0

    def seconds_between(self, earlier: Any, later: Any) -> float:
        return 0.0

    def describe(self) -> str:
        return "a GPU that counts"

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """Operations of torch too."""
        with _Operations(self.counts):
            yield self.counts


class _Operations(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        wanted = kwargs.get("device")
        places = {t.device.type for t in tensors if t.dim()}
        places |= {wanted.type} if wanted is not None else set()
        if places == {"cpu", "meta"}:
            assert name in ("_to_copy", "copy_"), f"{name} mixes tensors of the host and of the device"
            self._counts["blocking copies"] += 1
        elif "meta" in places:
            assert name not in ("_local_scalar_dense", "nonzero", "unique2"), f"{name} waits for the device"
            views = [r.alias_info is not None and not r.alias_info.is_write for r in function._schema.returns]
            if name in ALLOCATES:
                self._counts["allocations"] += 1
            elif not any(views):
                self._counts["operations"] += 1
        return function(*args, **kwargs)


@contextmanager
def counting_device(*, flash: bool = False) -> Iterator[tuple[CountingDevice, FakeRuntime]]:
    """The device, and its runtime."""

    def allocated(address: int, size: int, device: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=META)

    with fake_runtime() as runtime, pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_allocated", allocated)
        with cuda_device(lambda: CountingDevice(flash=flash), runtime) as device:
            yield device, runtime
